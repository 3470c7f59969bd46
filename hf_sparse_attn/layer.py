"""One layer of the cache: keys, values and the method's metadata, in buffers that are written in place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_sparse_attn.buffers import enlarged, mark_static, replaced, roomier
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.rope import Rope, RopeTables
from hf_sparse_attn.rows import Rows
from hf_sparse_attn.stats import LayerCounter

MIN_CAPACITY = 64


class SparseLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys, values and metadata; the buffers grow when they are full, or are static.

    Row ``b`` holds its tokens at positions ``seq_start[b] .. seq_end[b] - 1`` of the buffers; what lies before is left
    padding, what lies after is unused. Both are device tensors, read by the kernels without a host synchronize, and
    shared by all layers on a device: the first of them to be updated advances them for the others.

    A patched model's single tokens are not written by :meth:`update` where the layer decodes sparsely: the attention
    function takes them from :meth:`take_pending` and hands them to the method, which writes, scores and selects at
    once. What else works on the layer writes them first.

    Parameters
    ----------
    method
        The sparse-attention method.
    is_dense
        Whether attention in this layer stays dense; then no metadata is kept.
    max_cache_len
        The most tokens that the layer may hold, allocated at once for compiled decode steps; None for no limit.
    initial_capacity
        Where ``max_cache_len`` is None: tokens to allocate room for at first.
    rows_by_device
        The rows of the cache that the layer is part of; None for a layer of its own.
    q_heads
        Query heads of the model.
    """

    is_sliding = False
    is_croppable = True

    keys: torch.Tensor
    """[batch, kv_heads, capacity, head_dim], after RoPE; before it where the method has ``rotates_keys``."""
    values: torch.Tensor
    """[batch, kv_heads, capacity, head_dim]."""
    metadata: dict[str, torch.Tensor]
    """The method's own tensors, batch dimension first."""
    finished: torch.Tensor
    """int32 [batch, kv_heads]: zeros between ops, which count their finished programs in it."""
    rope: Rope
    """Rotations by slot, on the layer's device, where the method has ``rotates_keys``."""

    def __init__(
        self,
        method: SparseMethod,
        is_dense: bool,
        max_cache_len: int | None = None,
        initial_capacity: int = 0,
        rows_by_device: dict[torch.device, Rows] | None = None,
        q_heads: int = 1,
    ) -> None:
        super().__init__()
        self.method = method
        self.is_dense = is_dense
        self.max_cache_len = max_cache_len
        self.initial_capacity = max_cache_len or max(initial_capacity, MIN_CAPACITY)
        self.is_static = self.is_compileable = max_cache_len is not None
        self.q_heads = q_heads
        self.rope_tables: RopeTables | None = None
        self.metadata = {}
        self.counter = LayerCounter()
        self._rows_by_device = {} if rows_by_device is None else rows_by_device
        self.rows = Rows(self.is_static)
        self._advances_rows = False
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pending_padding: tuple[torch.Tensor, int, bool] | None = None

    @property
    def seq_start(self) -> torch.Tensor:
        """int32 [batch]: position of each row's first token."""
        return self.rows.seq_start

    @property
    def seq_end(self) -> torch.Tensor:
        """int32 [batch]: position after each row's last token."""
        return self.rows.seq_end

    @property
    def length(self) -> int:
        """Tokens per row, left padding counted in; waits for the device where compiled steps have run."""
        return self.rows.length

    @property
    def least_padding(self) -> int:
        """The left padding of the row that has the least."""
        return self.rows.least_padding

    @property
    def capacity(self) -> int:
        """Tokens that the buffers have room for."""
        return self.keys.shape[2]

    @property
    def decodes_sparsely(self) -> bool:
        """Whether the method chooses what a decode step reads.

        Not in dense layers, nor within the budget where the host knows the length (on CUDA only with keys after RoPE).
        Static buffers are read through the method at every length, so that one compiled step serves all of them; within
        the budget it chooses everything.
        """
        if self.is_dense:
            return False
        if self.method.rotates_keys and self.device.type == "cuda":
            return True  # the kernels rotate what they read; dense attention takes all keys rotated anew
        return not self.method.covers(sys.maxsize if self.is_static else self.length - self.least_padding)

    @property
    def rotations(self) -> dict[str, Any]:
        """The tables of :attr:`rope` as the ops take them; nothing where keys are cached after RoPE."""
        return {"rope_cos": self.rope.cos, "rope_sin": self.rope.sin} if self.method.rotates_keys else {}

    def row_lengths(self) -> torch.Tensor:
        """int32 [batch]: the tokens of each row, padding left out."""
        return (self.seq_end - self.seq_start).clamp_min(0)

    def max_blocks(self, block_size: int) -> int:
        """The most blocks that any row can have, known without asking the device: of static buffers, all they hold."""
        tokens = self.capacity if self.is_static else self.length - self.least_padding
        return -(-tokens // block_size)

    def set_padding(self, seq_start: torch.Tensor, least_padding: int, has_padding: bool) -> None:
        """Say where each row's first token lies; takes effect with the next :meth:`update`."""
        self._pending_padding = (seq_start, least_padding, has_padding)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for the batch size, heads, dtype and device of the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = self._rows_by_device.setdefault(self.device, self.rows)
        self._advances_rows = self._advances_rows or not hasattr(self.rows, "seq_end")
        if self._advances_rows:
            self.rows.allocate(key_states.shape[0], self.device)
        capacity = self.initial_capacity if self.is_static else max(self.initial_capacity, key_states.shape[2])
        self.keys = self._new_buffer(key_states, capacity)
        self.values = self._new_buffer(value_states, capacity)
        if self.rope_tables is not None:
            self.rope = self.rope_tables.on(self.device)
        self.metadata = self._new_metadata()
        self.finished = self._new_finished()
        self.counter.allocate(self)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to every row and take them into the metadata.

        Parameters
        ----------
        key_states, value_states
            [batch, kv_heads, new tokens, head_dim].

        Returns
        -------
        tuple of torch.Tensor
            Views of all keys and values so far, [batch, kv_heads, length, head_dim]; the whole buffers for a single
            token in static ones; the arguments themselves where the attention function is to append them.

        Raises
        ------
        ValueError
            The tokens do not fit into ``max_cache_len``, or are of another batch size than those cached.
        """
        num_new = key_states.shape[2]
        self._check_update(key_states.shape[0], num_new)
        if not self.is_initialized or self.keys.shape[0] != key_states.shape[0]:
            self.lazy_initialization(key_states, value_states)
        self._advance(num_new)
        if not self.is_static and self.length > self.capacity:
            self._grow(max(self.length, roomier(self.capacity)))
        if num_new == 1 and self.rows.attention_appends and self.decodes_sparsely:
            self._pending = (key_states, value_states)
            return self._pending
        self.append(key_states, value_states)
        if self.is_static and (num_new == 1 or torch.compiler.is_compiling()):
            return self.keys, self.values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def take_pending(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the token that :meth:`update` left to the attention function, [batch, kv_heads, 1, head_dim] each."""
        pending, self._pending = self._pending, None
        return pending

    def append_pending(self) -> None:
        """Write the token that the attention function has not taken, if there is one."""
        pending = self.take_pending()
        if pending is not None:
            self.append(*pending)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write tokens at the end of the rows, which count them already, and take them into the metadata."""
        num_new = key_states.shape[2]
        if self.is_static and (torch.compiler.is_compiling() or not self.rows.length_is_known):
            positions = self.seq_end[:1] + torch.arange(-num_new, 0, device=self.device)
            self.keys.index_copy_(2, positions, key_states)
            self.values.index_copy_(2, positions, value_states)
        else:
            self.keys[:, :, self.length - num_new : self.length] = key_states
            self.values[:, :, self.length - num_new : self.length] = value_states
        if not self.is_dense:
            self.method.update_metadata(self, num_new)

    def _check_update(self, batch: int, num_new: int) -> None:
        if torch.compiler.is_compiling() or (self.is_initialized and not self._advances_rows):
            return  # a compiled step knows no length, and the layer that advances the rows has looked
        held = self.length
        if held and batch != self.keys.shape[0]:
            raise ValueError(f"the cache holds {self.keys.shape[0]} rows, got {batch} rows of new tokens")
        if self.max_cache_len is not None and held + num_new > self.max_cache_len:
            raise ValueError(
                f"{num_new} new tokens do not fit: the cache holds {held} of max_cache_len={self.max_cache_len}"
            )

    def _advance(self, num_new: int) -> None:
        padding, self._pending_padding = self._pending_padding, None
        if not self._advances_rows:
            return
        if padding is not None:
            self.rows.set_padding(*padding)
        self.rows.advance(num_new)

    def _new_buffer(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        batch, kv_heads, _, head_dim = like.shape
        if not self.is_static:
            return like.new_empty(batch, kv_heads, capacity, head_dim)
        # Zeros, since an unpatched model reads static buffers to their end, under a mask that a NaN would pass.
        return mark_static(like.new_zeros(batch, kv_heads, capacity, head_dim), dynamic_dims=(2,))

    def _new_finished(self) -> torch.Tensor:
        finished = torch.zeros(self.keys.shape[:2], dtype=torch.int32, device=self.keys.device)
        return mark_static(finished) if self.is_static else finished

    def _new_metadata(self) -> dict[str, torch.Tensor]:
        if self.is_dense:
            return {}
        metadata = self.method.init_metadata(self)
        if self.is_static:
            roomier = copy.copy(self)  # only asked for shapes, to see which sizes follow the capacity
            roomier.keys = self.keys.new_empty(
                *self.keys.shape[:2], 4 * self.capacity, self.keys.shape[3], device="meta"
            )
            for name, other in self.method.init_metadata(roomier).items():
                sizes = zip(metadata[name].shape, other.shape, strict=True)
                mark_static(metadata[name], [dim for dim, (size, larger) in enumerate(sizes) if size != larger])
        return metadata

    def _grow(self, capacity: int) -> None:
        self.keys = enlarged(self.keys, self._new_buffer(self.keys, capacity))
        self.values = enlarged(self.values, self._new_buffer(self.values, capacity))
        grown = self._new_metadata()
        self.metadata = {name: enlarged(old, grown[name]) for name, old in self.metadata.items()}

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens held per row, left padding counted in; in a compiled step a device scalar."""
        if torch.compiler.is_compiling() and self.is_static and self.is_initialized:
            return self.seq_end[0].to(torch.int64)  # a copy: the step that asks goes on to advance the rows
        return self.length

    def get_query_offset(self) -> int | torch.Tensor:
        """The position of the next token, without ever waiting for the device: a scalar there where only that knows."""
        if self.is_static and (torch.compiler.is_compiling() or not self.rows.length_is_known):
            return self.seq_end[0]
        return self.length

    def get_max_length(self) -> int:
        """The most tokens that the layer may hold; -1 for no limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The attention mask's key length and offset for the next ``query_length`` tokens."""
        if self.is_static and (query_length == 1 or torch.compiler.is_compiling()):
            return self.capacity if self.is_initialized else self.initial_capacity, 0
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self._pending = self._pending_padding = None
        if not self.is_initialized:
            return
        if self._advances_rows:
            self.rows.cut(0)
        fresh = {} if self.is_dense else self.method.init_metadata(self)
        self.metadata = {name: replaced(old, fresh[name], self.is_static) for name, old in self.metadata.items()}

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row.

        Raises
        ------
        ValueError
            ``tokens_to_remove`` is positive, or asks for more than there is.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding counts with a device tensor
        self.append_pending()
        if self._advances_rows or not self.is_initialized:
            if tokens_to_remove > 0 or -tokens_to_remove > self.length:
                raise ValueError(
                    f"tokens_to_remove must be between -{self.length} (all tokens) and 0, got {tokens_to_remove}"
                )
            if tokens_to_remove < 0:
                self.rows.cut(self.length + tokens_to_remove)
        if tokens_to_remove < 0 and not self.is_dense:
            self.method.crop_metadata(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put row ``beam_idx[b]`` in place of row ``b``, for beam search."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in ``indices``."""
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def fork(
        self, method: SparseMethod, is_dense: bool, rows_by_device: dict[torch.device, Rows] | None = None
    ) -> SparseLayer:
        """Make a layer for another method over the same keys and values; see ``SparseCache.fork``.

        ``rows_by_device`` holds copies of the rows, where the layer is one of several that share them.
        """
        self.append_pending()
        fork = copy.copy(self)
        fork.method, fork.is_dense = method, is_dense
        fork.counter = LayerCounter()
        fork.metadata = {}
        fork._rows_by_device = {} if rows_by_device is None else rows_by_device
        fork.rows = Rows(self.is_static)
        if self.is_initialized:
            if self.device not in fork._rows_by_device:
                fork._rows_by_device[self.device] = self.rows.copy()
            fork.rows = fork._rows_by_device[self.device]
            fork.metadata = fork._new_metadata()
            fork.counter.allocate(fork)
            if not is_dense and self.length:
                method.update_metadata(fork, self.length)
        return fork

    def _map_rows(self, of_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.is_initialized:
            return
        self.append_pending()
        if self._advances_rows:
            self.rows.map(of_rows)
        self.keys = replaced(self.keys, of_rows(self.keys), self.is_static)
        self.values = replaced(self.values, of_rows(self.values), self.is_static)
        self.metadata = {name: replaced(old, of_rows(old), self.is_static) for name, old in self.metadata.items()}
        if self.finished.shape[0] != self.keys.shape[0]:
            self.finished = self._new_finished()
