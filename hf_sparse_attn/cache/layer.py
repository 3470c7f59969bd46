"""One layer of the cache: Transformers' contract for a layer, over a storage and the rows' lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths, Shared
from hf_sparse_attn.cache.storage import Storage
from hf_sparse_attn.methods import FULL, SparseMethod
from hf_sparse_attn.methods.base import Selection
from hf_sparse_attn.rope import Rope, RopeTables
from hf_sparse_attn.stats import LayerCounter


class SparseLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys, values and metadata.

    Row ``b`` holds its tokens at positions ``seq_start[b] .. seq_end[b] - 1`` of the buffers; what lies before is left
    padding, what lies after is unused. Both are device tensors, read by the kernels without a host synchronize, and
    shared by all layers on a device: the first of them to be updated advances them for the others.

    How a step's token is written: in a decode step of a patched model, :meth:`update` does not write it but holds it in
    one slot; the attention function takes it from there (:meth:`take_token`) and hands it to the method's ``decode``,
    which writes it, so that one op may write, score and select. Everything else (prompts, and whatever an unpatched
    model feeds) is written by :meth:`update` at once. Whether a step is a patched model's is said before each one, by
    ``SparseCache.begin_call``, and holds for one advance of the lengths. ``held`` counts the tokens that are really
    written; where a forward pass fails, layers hold fewer tokens than the lengths say, and ``SparseCache.recover``
    cuts the lengths back and empties the slots.

    Parameters
    ----------
    method
        The sparse-attention method; ``FULL`` in dense layers.
    storage
        The buffers.
    shared
        Of the cache that the layer is part of; None for a layer of its own.
    q_heads
        Query heads of the model.
    layer_idx
        Index of the layer in the model.
    """

    is_sliding = False
    is_croppable = True

    device: torch.device
    lengths: Lengths
    finished: torch.Tensor
    """int32 [batch, kv_heads]: scratch counters of the ops, zero between them."""
    rope: Rope
    """Rotations by slot, on the layer's device, where the method has ``rotates_keys``."""

    def __init__(
        self,
        method: SparseMethod,
        storage: Storage,
        shared: Shared | None = None,
        q_heads: int = 1,
        layer_idx: int = 0,
    ) -> None:
        # Not the base class's constructor, which sets keys and values: here they are the storage's.
        self.method = method
        self.storage = storage
        self.is_compileable = storage.is_compileable
        self.is_initialized = False
        self.q_heads = q_heads
        self.layer_idx = layer_idx
        self.counter = LayerCounter(method.counts)
        self.rope_tables: RopeTables | None = None
        self._shared = Shared() if shared is None else shared
        self._leads = False
        self._token: tuple[torch.Tensor, torch.Tensor] | None = None
        self._held: int | None = 0

    @property
    def keys(self) -> torch.Tensor:
        """[batch, kv_heads, capacity, head_dim], after RoPE; before it where the method has ``rotates_keys``."""
        return self.storage.keys

    @property
    def values(self) -> torch.Tensor:
        """[batch, kv_heads, capacity, head_dim]."""
        return self.storage.values

    @property
    def metadata(self) -> dict[str, Any]:
        """The method's own tensors, batch dimension first; any value, so that ops take them by name."""
        return self.storage.metadata

    @property
    def capacity(self) -> int:
        """Tokens that the buffers have room for."""
        return self.storage.capacity

    @property
    def seq_start(self) -> torch.Tensor:
        """int32 [batch]: position of each row's first token."""
        return self.lengths.seq_start

    @property
    def seq_end(self) -> torch.Tensor:
        """int32 [batch]: position after each row's last token."""
        return self.lengths.seq_end

    @property
    def length(self) -> int:
        """Tokens per row, left padding included; waits for the device where compiled steps have run."""
        return self.lengths.length if self.is_initialized else 0

    @property
    def least_padding(self) -> int:
        """The left padding of the row that has the least."""
        return self.lengths.least_padding

    @property
    def held(self) -> int:
        """Tokens per row that are written here: less than :attr:`length` while a forward pass is on its way."""
        return self.length if self._held is None else self._held

    @property
    def longest_row(self) -> int:
        """The most tokens that any row can have, known without asking the device: of static buffers, all they hold."""
        return self.storage.longest_row(self.lengths)

    @property
    def step_method(self) -> SparseMethod:
        """The method of a decode step: ``FULL`` where the budget covers every row, so that a selection saves nothing.

        Static storage is read through the method at every length, so that one compiled step serves all of them. So are
        keys before RoPE on CUDA: the kernels rotate what they read, dense attention takes all keys rotated anew.
        """
        kernels_rotate = self.method.rotates_keys and self.keys.is_cuda
        if not kernels_rotate and self.method.covers(self.storage.planned_length(self.lengths)):
            return FULL
        return self.method

    @property
    def rotations(self) -> dict[str, Any]:
        """The tables of :attr:`rope` as the ops take them; nothing where keys are cached after RoPE."""
        return {"rope_cos": self.rope.cos, "rope_sin": self.rope.sin} if self.method.rotates_keys else {}

    def row_lengths(self) -> torch.Tensor:
        """int32 [batch]: the tokens of each row, padding left out."""
        return (self.seq_end - self.seq_start).clamp_min(0)

    def max_blocks(self, block_size: int) -> int:
        """The most blocks that any row can have, known without asking the device."""
        return -(-self.longest_row // block_size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for the batch size, heads, dtype and device of the first tokens."""
        if self._leads and key_states.device != self.device:
            self._shared.lengths.pop(self.device)
        self.dtype, self.device = key_states.dtype, key_states.device
        batch = key_states.shape[0]
        if self.device not in self._shared.lengths:
            self._shared.lengths[self.device] = Lengths(batch, self.device, self.storage.is_compileable)
            self._leads = True
        elif self._leads:
            self.lengths.allocate(batch, self.device)
        self.lengths = self._shared.lengths[self.device]
        self.storage.allocate(key_states, value_states)
        if self.rope_tables is not None:
            self.rope = self.rope_tables.on(self.device)
        self.storage.allocate_metadata(self._make_metadata)
        self._allocate_counters()
        self._held = 0
        self.is_initialized = True

    def use_rope(self, tables: RopeTables) -> None:
        """Take a patched model's rotations, for a method with ``rotates_keys``."""
        if self.rope_tables is not tables:
            self.rope_tables = tables
            if self.is_initialized:
                self.rope = tables.take(self.rope) if hasattr(self, "rope") else tables.on(self.device)

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
            token in static ones; the arguments themselves where the decode verb is to write them.

        Raises
        ------
        ValueError
            The tokens do not fit, are of another batch size than those cached, or the cache was left incomplete by a
            forward pass that failed.
        """
        num_new = key_states.shape[2]
        self._check_update(key_states.shape[0], num_new)
        if not self.is_initialized or not self._fits(key_states):
            self.lazy_initialization(key_states, value_states)
        if self._leads:
            if self._shared.padding is not None and self.lengths.known_length == 0:
                self.lengths.set_padding(self._shared.padding)
            self.lengths.advance(num_new)
        self.storage.reserve(self.lengths.known_length, self._make_metadata)
        if num_new == 1 and self.lengths.in_step:
            self._token = (key_states, value_states)
            return self._token
        self.append(key_states, value_states)
        return self.storage.visible(self.lengths, num_new)

    def _fits(self, key_states: torch.Tensor) -> bool:
        """Whether the buffers can take such tokens; while they are empty, they can be made anew for others."""
        same_kind = self.keys.dtype == key_states.dtype and self.keys.device == key_states.device
        return self.keys.shape[0] == key_states.shape[0] and (same_kind or self._held != 0)

    def take_token(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the token that :meth:`update` held back for the decode verb, [batch, kv_heads, 1, head_dim] each."""
        token, self._token = self._token, None
        return token

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write tokens, [batch, kv_heads, tokens, head_dim], where the rows end; their lengths count them already."""
        self.storage.write(key_states, value_states, self.lengths)
        self.method.update_metadata(self, key_states.shape[2])
        self.mark_written()

    def mark_written(self) -> None:
        """Say that every token that the lengths count is written."""
        self._held = self.lengths.known_length

    def note(self, selection: Selection | None) -> None:
        """Note what the current decode step reads, None for everything, where somebody records it."""
        if self._shared.recorder is not None:
            self._shared.recorder.add(self, selection)

    def rebuild_metadata(self) -> None:
        """Make the metadata of all tokens anew, as after a change of where the rows begin."""
        self.storage.clear_metadata(self._make_metadata)
        if self.length:
            self.method.update_metadata(self, self.length)

    def finish_prompt(self) -> None:
        """Let the method know that the prompt is complete."""
        if self.is_initialized:
            self.method.finish_prompt(self)

    def settle(self) -> None:
        """Take over the length that compiled steps have left to the device to know."""
        self._held = self.held

    def roll_back(self, keeps_metadata: bool) -> None:
        """Drop what a failed forward pass has left; the lengths are cut back already.

        ``keeps_metadata`` where it was a decode step, of which the metadata can forget a token; else it is made anew.
        """
        self._token = None
        if not self.is_initialized:
            return
        self._held = self.length
        if keeps_metadata:
            self.method.crop_metadata(self)
        else:
            self.rebuild_metadata()

    def _check_update(self, batch: int, num_new: int) -> None:
        if not self.is_initialized or self.lengths.is_traced:
            return  # a compiled step knows no length
        if self._token is not None:
            raise ValueError("the cache holds a decode step's token that no attention function has taken")
        before = self.lengths.length - (0 if self._leads else num_new)
        if self._held not in (None, before):
            raise ValueError(
                f"the cache is incomplete: a forward pass failed, and left a layer with {self._held} of {before} "
                "tokens; call crop(0) on the cache to go on from before that pass"
            )
        if not self._leads:
            return
        if before and batch != self.keys.shape[0]:
            raise ValueError(f"the cache holds {self.keys.shape[0]} rows, got {batch} rows of new tokens")
        self.check_room(before, num_new)

    def check_room(self, held: int, num_new: int) -> None:
        """Raise ``ValueError`` where new tokens do not fit beside those held."""
        if self.storage.max_tokens is not None and held + num_new > self.storage.max_tokens:
            raise ValueError(
                f"{num_new} new tokens do not fit: the cache holds {held} of max_cache_len={self.storage.max_tokens}"
            )

    def _make_metadata(self, storage: Storage) -> dict[str, torch.Tensor]:
        """Allocate the method's metadata for a storage that may be larger than the layer's own."""
        layer = self
        if storage is not self.storage:
            layer = copy.copy(self)
            layer.storage = storage
        return self.method.init_metadata(layer)

    def _allocate_counters(self) -> None:
        with lasting_tensors():
            self.finished = self.storage.pin(
                torch.zeros(self.keys.shape[:2], dtype=torch.int32, device=self.keys.device)
            )
            self.counter.allocate(self.keys.device, self.storage.pin)
        self.counter.set_token_bytes(self.keys, self.values)

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens held per row, left padding included; in a compiled step a device scalar."""
        if self.is_initialized and self.lengths.is_traced:
            return self.seq_end[0].to(torch.int64)  # a copy: the step that asks goes on to advance the rows
        return self.held

    def get_query_offset(self) -> int | torch.Tensor:
        """The position of the next token, without ever waiting for the device: a scalar there where only that knows."""
        known = self.lengths.known_length if self.is_initialized else 0
        return self.seq_end[0] if known is None else known

    def get_max_length(self) -> int:
        """The most tokens that the layer may hold; -1 for no limit."""
        return -1 if self.storage.max_tokens is None else self.storage.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The attention mask's key length and offset for the next ``query_length`` tokens."""
        return self.storage.mask_length(self.lengths if self.is_initialized else None, query_length), 0

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self._token = None
        if not self.is_initialized:
            return
        if self._leads:
            self.lengths.cut(0)
        self._held = 0
        self.storage.keep_prefix(0)
        self.storage.clear_metadata(self._make_metadata)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row.

        Raises
        ------
        ValueError
            ``tokens_to_remove`` is positive, or asks for more than there is.
        """
        self.cut(length_after_crop(self.held, tokens_to_remove))

    def cut(self, length: int) -> None:
        """Keep the first ``length`` positions of every row."""
        self._token = None
        if not self.is_initialized or length == self.held:
            return
        if self._leads:
            self.lengths.cut(length)
        self._held = length
        self.storage.keep_prefix(length)
        self.method.crop_metadata(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put row ``beam_idx[b]`` in place of row ``b``, for beam search."""
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in ``indices``."""
        self._change_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def fork(self, method: SparseMethod, shared: Shared) -> SparseLayer:
        """Make a layer for another method over the same keys and values; see ``SparseCache.fork``.

        ``shared`` holds copies of the lengths.
        """
        fork = copy.copy(self)
        fork.method = method
        fork.storage = self.storage.fork(self.held)
        fork.counter = LayerCounter(method.counts)
        fork._shared = shared
        if self.is_initialized:
            fork.lengths = shared.lengths[self.device]
            fork.storage.allocate_metadata(fork._make_metadata)
            fork._allocate_counters()
            if self.length:
                method.update_metadata(fork, self.length)
        return fork

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.is_initialized:
            return
        self._token = None
        if self._leads:
            self.lengths.map(change, self.storage.replace)
        self.storage.replace_all(change)
        if self.finished.shape[0] != self.keys.shape[0]:
            self._allocate_counters()


def length_after_crop(length: int, tokens_to_remove: int | torch.Tensor) -> int:
    """Return the length that is left; raise ``ValueError`` where there are not so many tokens to remove."""
    tokens_to_remove = int(tokens_to_remove)  # assisted decoding counts with a device tensor
    if tokens_to_remove > 0 or -tokens_to_remove > length:
        raise ValueError(f"tokens_to_remove must be between -{length} (all tokens) and 0, got {tokens_to_remove}")
    return length + tokens_to_remove
