"""One layer of the cache: Transformers' layer contract, implemented over a storage and the row lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths, Shared
from hf_sparse_attn.cache.offload.reads import ReadAhead
from hf_sparse_attn.cache.offload.storage import OffloadStorage
from hf_sparse_attn.cache.parked import Exchange, ParkedTensors
from hf_sparse_attn.cache.prefix import Prefix
from hf_sparse_attn.cache.queries import PromptQueries, followed_by
from hf_sparse_attn.cache.split import of_kind
from hf_sparse_attn.cache.storage import Present, Rows, Storage
from hf_sparse_attn.checks import whole_number
from hf_sparse_attn.head_shard import WHOLE, HeadShard
from hf_sparse_attn.methods import FULL, SparseMethod
from hf_sparse_attn.methods.base import Selection
from hf_sparse_attn.precision import uncast
from hf_sparse_attn.rope import Rope, RopeTables
from hf_sparse_attn.sinks import with_sinks
from hf_sparse_attn.stats import LayerCounter


class SparseLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys, values and metadata.

    Row ``b`` holds its tokens at positions ``seq_start[b] .. seq_end[b] - 1`` of the buffers, after its left padding.
    Both are device tensors that kernels read without synchronizing the host. All layers on a device share them; the
    first layer to be updated advances them for the others.

    In a decode step of a patched model, :meth:`update` does not write the token but holds it in one slot. The attention
    function takes it from there (:meth:`take_token`) and passes it to the method's ``decode``, which writes it. One op
    can then write, score and select. :meth:`update` writes everything else at once: prompts, and any token of an
    unpatched model. ``SparseCache.begin_call`` announces each decode step of a patched model. ``held`` counts the
    tokens that are written. After a failed pass some layers hold fewer tokens than the lengths say:
    ``SparseCache.recover`` cuts the lengths back and empties the slots.

    Parameters
    ----------
    method
        The sparse-attention method; ``FULL`` in dense layers.
    storage
        The buffers.
    shared
        State of the cache that the layer belongs to; None for a standalone layer.
    q_heads
        Number of the model's query heads that this process has.
    layer_idx
        Index of the layer in the model.
    keep_queries
        Last queries of a prompt to keep beside the mean of all, at least the method's ``keeps_queries``; 0 for none.
    head_shard
        The part of the KV heads that this process has, which a method reduces over the others with.
    kv_heads
        Number of KV heads that keys must have; None, with a ``head_shard`` of all, to accept any.
    """

    is_sliding = False
    is_croppable = True

    device: torch.device
    lengths: Lengths
    finished: torch.Tensor
    """int32 [batch, kv_heads]: scratch counters of the ops, zero between calls."""
    rope: Rope
    """Rotations by slot, on the layer's device, if the method sets ``rotates_keys``."""

    def __init__(
        self,
        method: SparseMethod,
        storage: Storage,
        shared: Shared | None = None,
        q_heads: int = 1,
        layer_idx: int = 0,
        keep_queries: int = 0,
        head_shard: HeadShard = WHOLE,
        kv_heads: int | None = None,
    ) -> None:
        # Skips the base class's constructor, which sets keys and values: here the storage has them.
        self.method = method
        self.storage = storage
        self.is_compileable = storage.is_compileable
        self.is_initialized = False
        self.q_heads = q_heads
        self.layer_idx = layer_idx
        self.head_shard = head_shard
        self._kv_heads = kv_heads
        self.counter = LayerCounter(method.counts, storage.traffic)
        self.rope_tables: RopeTables | None = None
        self.keep_queries = max(keep_queries, method.keeps_queries)
        self.prompt_queries: PromptQueries | None = None
        """The prompt's last ``keep_queries`` queries, and the mean of all; None if they are not known."""
        self.rehearsed_query: torch.Tensor | None = None
        """[batch, q_heads, head_dim]: a decode step's query, made from the previous layer's input; None if no one asks.
        """
        self.sinks: torch.Tensor | None = None
        """[q_heads]: logits of the model's attention sinks, until a pass takes them; None without sinks."""
        self.prefix: Prefix | None = None
        """Tokens before every row that are not among :attr:`keys`, for a method with ``reads_prefix``."""
        self._shared = Shared() if shared is None else shared
        self._leads = False
        self._token: tuple[torch.Tensor, torch.Tensor] | None = None
        self._held: int | None = 0
        self._step_kind: tuple[Any, ...] | None = None
        self._parked: ParkedTensors | None = None

    @property
    def keys(self) -> torch.Tensor:
        """[batch, kv_heads, capacity, head_dim], after RoPE, or before it if the method sets ``rotates_keys``.

        If the method offloads, their contents are valid in passes over several tokens only; with
        ``kv_storage="host"``, between these passes only. :attr:`rows`, :attr:`newest` and :meth:`present` serve both.
        """
        return self.storage.keys

    @property
    def values(self) -> torch.Tensor:
        """[batch, kv_heads, capacity, head_dim]."""
        return self.storage.values

    @property
    def metadata(self) -> dict[str, Any]:
        """The method's own tensors, batch dimension first. Typed ``Any`` so that ops take them as keyword arguments."""
        return self.storage.metadata

    @property
    def capacity(self) -> int:
        """Number of tokens that the buffers have room for."""
        return self.storage.capacity

    @property
    def keeps_rows(self) -> bool:
        """Whether an op of a decode step may write to and read from :attr:`keys` and :attr:`values`."""
        return self.storage.keeps_rows

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
        """Tokens per row, left padding included. Waits for the device after compiled steps."""
        return self.lengths.length if self.is_initialized else 0

    @property
    def least_padding(self) -> int:
        """Left padding of the row with the least."""
        return self.lengths.least_padding

    @property
    def held(self) -> int:
        """Tokens per row written to this layer: fewer than :attr:`length` during a forward pass."""
        return self.length if self._held is None else self._held

    @property
    def longest_row(self) -> int:
        """Upper bound on the tokens of any row that needs no device read: the capacity of static buffers."""
        return self.storage.longest_row(self.lengths)

    @property
    def step_method(self) -> SparseMethod:
        """The method of a decode step: ``FULL`` if the budget covers every row, since selecting would save nothing.

        Static storage uses the method at every length: one compiled step must serve them all. So do keys before RoPE on
        CUDA: kernels rotate only the keys that they read, while dense attention would rotate all of them at each step.
        A prefix is read by the method alone, and so are offloaded blocks.
        """
        kernels_rotate = self.method.rotates_keys and self.keys.is_cuda
        may_be_dense = self.prefix is None and not kernels_rotate and self.storage.keeps_rows
        if may_be_dense and self.method.covers(self.storage.planned_length(self.lengths)):
            return FULL
        return self.method

    @property
    def verifies_draft(self) -> bool:
        """Whether the pass in progress is a compiled one that verifies a draft."""
        return self._shared.verifies_draft

    @property
    def prefill_chunk(self) -> int | None:
        """Maximum number of tokens that the method's ``prefill`` attends from at once; None for no limit."""
        return None if self.method == FULL else self._shared.prefill_chunk

    @contextmanager
    def ending_at(self, length: int) -> Iterator[None]:
        """Let the rows end after ``length`` tokens, for a chunk of a pass whose later tokens are written already."""
        whole = self.lengths
        self.lengths = whole.until(length)
        try:
            yield
        finally:
            self.lengths = whole

    @property
    def rotations(self) -> dict[str, Any]:
        """Keyword arguments of the ops with the tables of :attr:`rope`; empty if keys are cached after RoPE."""
        return {"rope_cos": self.rope.cos, "rope_sin": self.rope.sin} if self.method.rotates_keys else {}

    @property
    def newest(self) -> Rows:
        """The rows for an op that reads and writes nothing but the newest block of each, in a decode step or a crop."""
        return self.storage.newest(self.lengths)

    @property
    def rows(self) -> Rows:
        """The rows for an op that reads all their tokens, in a pass over several tokens."""
        return self.storage.rows(self.lengths)

    @property
    def present_rows(self) -> Rows:
        """The rows for an op that chooses blocks while it reads them, in a decode step after :meth:`append`."""
        return self.storage.present_rows(self.lengths)

    def present(self, selection: Selection) -> Iterable[Present]:
        """Return where an op finds the selected blocks of a decode step, after :meth:`append`.

        There may be several parts of the selection. What reads a part must be queued before the next one is asked for:
        an offloaded layer then waits for blocks that are being loaded.
        """
        return self.storage.present(selection, self.lengths, self.counter)

    def read_ahead(self, block_order: torch.Tensor, microbatch: int) -> ReadAhead:
        """Return the blocks of a decode step of an offloaded layer, ``microbatch`` at a time, after :meth:`append`.

        ``block_order`` is int32 [batch, kv_heads, n]: blocks in the order in which to read them, then -1.
        """
        assert isinstance(self.storage, OffloadStorage)
        return self.storage.read_ahead(block_order, microbatch, self.lengths, self.counter)

    def row_lengths(self) -> torch.Tensor:
        """int32 [batch]: tokens of each row, padding excluded."""
        return (self.seq_end - self.seq_start).clamp_min(0)

    def max_blocks(self, block_size: int) -> int:
        """Upper bound on the blocks of any row that needs no device read."""
        return -(-self.longest_row // block_size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate buffers for the batch size, heads, dtype and device of the first tokens.

        Raises
        ------
        ValueError
            The keys have another number of heads than the configuration says this process has.
        """
        if self._kv_heads is not None and key_states.shape[1] != self._kv_heads:
            raise ValueError(
                f"layer {self.layer_idx} gets keys of {key_states.shape[1]} KV heads, but the model's configuration "
                f"says {self._kv_heads * self.head_shard.size}, {self._kv_heads} in this process: heads that something "
                "other than Transformers' tensor parallelism has divided are not supported"
            )
        self.is_initialized = False  # until it is complete, so that the next use allocates anew if memory runs out
        self._step_kind = None
        if self._leads and key_states.device != self.device:
            self._shared.lengths.pop(self.device, None)
        self.dtype, self.device = key_states.dtype, key_states.device
        batch = key_states.shape[0]
        if self.device not in self._shared.lengths:
            self._leads = True
            self._shared.lengths[self.device] = Lengths(batch, self.device, self.storage.is_compileable)
        elif self._leads:
            self.lengths.allocate(batch, self.device)
        self.lengths = self._shared.lengths[self.device]
        self.storage.allocate(key_states, value_states)
        if self.rope_tables is not None:
            self.rope = self.rope_tables.on(self.device)
        self.storage.allocate_metadata(self._make_metadata)
        self._allocate_counters()
        self._expand_prefix()
        self._held = 0
        self.is_initialized = True

    def _expand_prefix(self) -> None:
        if self.prefix is not None:
            self.prefix = self.prefix.expand(len(self.keys)).map(self.storage.pin)

    def use_rope(self, tables: RopeTables) -> None:
        """Set the patched model's rotations, for a method with ``rotates_keys``."""
        self.rope_tables = tables
        if self.is_initialized:
            self.rope = tables.take(self.rope) if hasattr(self, "rope") else tables.on(self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to every row and update the metadata.

        Parameters
        ----------
        key_states, value_states
            [batch, kv_heads, new tokens, head_dim].

        Returns
        -------
        tuple of torch.Tensor
            Views of all keys and values so far, [batch, kv_heads, length, head_dim]; the whole buffers after a single
            token in static storage; the arguments themselves if the method's ``decode`` will write them.

        Raises
        ------
        ValueError
            The tokens do not fit or have another batch size than the cached ones, or a failed forward pass left the
            cache incomplete.
        """
        num_new = key_states.shape[2]
        is_traced = self.is_initialized and self.lengths.is_traced
        # Under torch.autocast RoPE leaves keys in another dtype than values, which SDPA would change too.
        dtype = self.dtype if is_traced or self._held else value_states.dtype
        if key_states.dtype != dtype or value_states.dtype != dtype:
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not is_traced:  # a compiled step knows no length, and the prompt has allocated its buffers
            self._check_update(key_states.shape[0], num_new)
            if not self.is_initialized or not self._fits(key_states):
                self.lazy_initialization(key_states, value_states)
        if self._leads:
            if self._shared.padding is not None and self.lengths.known_length == 0:
                self.lengths.set_padding(self._shared.padding)
            self.lengths.advance(num_new)
        if not is_traced:
            self.storage.reserve(self.lengths.known_length, self._make_metadata)
        if num_new == 1 and self.lengths.in_step:
            self._token = (key_states, value_states)
            return self._token
        # A token of an unpatched model may follow tokens that no method has seen.
        if not self.verifies_draft:
            self._shared.prompt_is_open = True
        self.append(key_states, value_states)
        return self.storage.visible(self.lengths, num_new)

    def _fits(self, key_states: torch.Tensor) -> bool:
        """Whether the buffers can hold such tokens; empty ones are reallocated for another dtype or device."""
        same_kind = self.keys.dtype == key_states.dtype and self.keys.device == key_states.device
        return self.keys.shape[0] == key_states.shape[0] and (same_kind or self._held != 0)

    def take_token(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the key and value, [batch, kv_heads, 1, head_dim], that :meth:`update` held back for ``decode``."""
        token, self._token = self._token, None
        return token

    def take_sinks(self) -> torch.Tensor | None:
        """Return :attr:`sinks`, [q_heads], for attention that they take part in; None if the model has none."""
        sinks, self.sinks = self.sinks, None
        return sinks

    def with_sinks(self, output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Return the output of a softmax that the model's attention sinks take part in.

        A method's ``decode`` and ``prefill`` return what this returns, called once, after attention to several sets of
        tokens is merged. :func:`~hf_sparse_attn.dense.dense_attention` and ``attend`` have called it already.

        Parameters
        ----------
        output
            [batch, q_heads, head_dim] or [batch, q_heads, tokens, head_dim].
        lse
            [batch, q_heads] or [batch, q_heads, tokens]: log-sum-exp of the scaled scores, as ops return it.

        Returns
        -------
        torch.Tensor
            Same shape and dtype as ``output``; ``output`` itself if the model has no sinks.
        """
        return output if self.sinks is None else with_sinks(output, lse, self.take_sinks())

    def is_like_last_step(self, method: SparseMethod, *states: torch.Tensor) -> bool:
        """Whether an uncompiled step has the method, and ``states`` of the shapes, dtypes and devices, of the last one.

        The ops of that step have checked such arguments together with the buffers, which fit the layer at any length.
        """
        if self.lengths.is_traced:
            return False
        kind = (method, *((each.shape, each.stride(-1), each.dtype, each.device) for each in states))
        if kind == self._step_kind:
            return True
        self._step_kind = kind
        return False

    def observe(self, query: torch.Tensor, scale: float) -> None:
        """Keep the last queries of a pass of a prompt, [batch, q_heads, tokens, head_dim], and the sum of all.

        A compiled pass that verifies a draft is left out, as decode steps are.
        """
        if self.keep_queries and not self.verifies_draft:
            self.prompt_queries = followed_by(
                self.prompt_queries,
                query.detach(),
                self.row_lengths(),
                self.lengths.has_padding,
                scale,
                most=self.keep_queries,
                end=self.length,
            )

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write tokens, [batch, kv_heads, tokens, head_dim], at the end of the rows, whose lengths include them."""
        self.storage.write(key_states, value_states, self.lengths)
        with uncast(self.device):
            self.method.update_metadata(self, key_states.shape[2])
        self.mark_written()

    def mark_written(self) -> None:
        """Record that all tokens in the lengths are written."""
        self.storage.mark_written(self.lengths)
        self._held = self.lengths.known_length

    @property
    def is_recorded(self) -> bool:
        """Whether ``record_selections`` is active."""
        return self._shared.recorder is not None

    def note(self, selection: Selection | None) -> None:
        """Record the selection of the current decode step, None for everything, if ``record_selections`` is active."""
        if self._shared.recorder is not None:
            self._shared.recorder.add(self, selection)

    def rebuild_metadata(self) -> None:
        """Rebuild the metadata of all tokens, as after the start of a row has moved."""
        self.storage.clear_metadata(self._make_metadata, kept=self.method.lasting_metadata)
        if self.length:
            self.storage.stage(self.lengths)
            self.method.update_metadata(self, self.length)

    def offload(self) -> None:
        """Move keys, values, metadata and the prompt's queries to host memory, and free them on the device.

        The lengths and the counts of the stats stay: they take a few bytes. So does a prefix, which many caches may
        share. Any later use moves everything back, but a compiled step; see :meth:`prefetch`. Until then the tensors of
        the layer are placeholders without contents.
        """
        if not self.is_initialized or self._parked is not None:
            return
        self.settle()
        self._parked = ParkedTensors(self._exchange)
        self.storage.leave_device()

    def prefetch(self) -> None:
        """Move what :meth:`offload` has moved to host memory back to the device, to new addresses."""
        if self._parked is not None:
            self._parked.restore(self._exchange, before=self.storage.enter_device)
            self._parked = None

    def _exchange(self, change: Exchange) -> None:
        """Replace all tensors that lie on the device, but for the lengths and the counts."""
        self.storage.exchange(change, self.held)
        if self.prompt_queries is not None:
            self.prompt_queries = self.prompt_queries.map(change)

    def settle(self) -> None:
        """Bring back what is on the host; read the length from the device if compiled steps have advanced it there."""
        self.prefetch()
        self._held = self.held

    def roll_back(self, keeps_metadata: bool) -> None:
        """Drop the tokens of a failed forward pass, once the lengths are cut back.

        With ``keeps_metadata`` the metadata is cut back with the rows. Otherwise it is rebuilt.
        """
        self._token = self.rehearsed_query = self.sinks = self._step_kind = None
        if not self.is_initialized:
            self.storage.drop_reserved()
            return
        self._held = self.length
        self.storage.cut(self.length)
        if keeps_metadata:
            self.method.crop_metadata(self)
        else:
            self.rebuild_metadata()

    def _check_update(self, batch: int, num_new: int) -> None:
        if not self.is_initialized:
            return
        self.prefetch()
        if self._token is not None:
            raise ValueError("the cache holds a decode step's token that no attention function has processed")
        before = self.lengths.length - (0 if self._leads else num_new)
        if self._held not in (None, before):
            raise ValueError(
                f"the cache is incomplete: a failed forward pass left a layer with {self._held} of {before} tokens; "
                "call crop(0) on the cache to return to the state before that pass"
            )
        if not self._leads:
            return
        if before and batch != self.keys.shape[0]:
            raise ValueError(f"new tokens must have the cache's batch size {self.keys.shape[0]}, got {batch}")
        self.check_room(before, num_new)

    def reserve(self, length: int) -> None:
        """Make room for rows of ``length`` tokens; they stay as they are."""
        self.storage.reserve(length, self._make_metadata)

    def check_room(self, held: int, num_new: int) -> None:
        """Raise ``ValueError`` if new tokens do not fit."""
        if self.storage.max_tokens is not None and held + num_new > self.storage.max_tokens:
            raise ValueError(
                f"{num_new} new tokens do not fit: the cache holds {held} of max_cache_len={self.storage.max_tokens}"
            )

    def _make_metadata(self, storage: Storage) -> dict[str, torch.Tensor]:
        """Allocate the method's metadata for a storage, which may be larger than the layer's own."""
        layer = self
        if storage is not self.storage:
            layer = copy.copy(self)
            layer.storage = storage
        return self.method.init_metadata(layer)

    def metadata_shapes(self, capacity: int) -> dict[str, torch.Size]:
        """Return the shapes that the metadata would have in buffers for so many tokens."""
        batch, kv_heads, _, head_dim = self.keys.shape
        other = copy.copy(self.storage)
        other.keys = self.keys.new_empty(batch, kv_heads, capacity, head_dim, device="meta")
        return {name: tensor.shape for name, tensor in self._make_metadata(other).items()}

    def _allocate_counters(self) -> None:
        with lasting_tensors():
            self.finished = self.storage.pin(
                torch.zeros(self.keys.shape[0], self.storage.kv_heads, dtype=torch.int32, device=self.keys.device)
            )
        self.counter.allocate(self.keys.device, self.storage.pin)
        self.counter.set_token_bytes(self.keys, self.values)

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens held per row, left padding included; a device scalar in a compiled step."""
        if self.is_initialized and self.lengths.is_traced:
            return self.seq_end[0].to(torch.int64)  # a copy: this step advances seq_end in place later
        return self.held

    def get_query_offset(self) -> int | torch.Tensor:
        """Position of the next token; a device scalar after compiled steps. Never waits for the device."""
        known = self.lengths.known_length if self.is_initialized else 0
        return self.seq_end[0] if known is None else known

    def get_max_length(self) -> int:
        """Maximum number of tokens; -1 for no limit."""
        return -1 if self.storage.max_tokens is None else self.storage.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset of the attention mask for the next ``query_length`` tokens."""
        return self.storage.mask_length(self.lengths if self.is_initialized else None, query_length), 0

    def reset(self) -> None:
        """Remove all tokens; keep the buffers."""
        self.prefetch()
        self._token = None
        if not self.is_initialized:
            return
        if self._leads:
            self.lengths.cut(0)
        self._held = 0
        self.prompt_queries = None
        self.storage.cut(0)
        self.storage.clear_metadata(self._make_metadata)

    def discard(self) -> None:
        """Remove all tokens and the buffers, which may be of different sizes."""
        self._token = self.rehearsed_query = self.prompt_queries = None
        self._held, self.storage.shared_tokens = 0, 0
        if self._leads:
            self.lengths.cut(0)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row.

        Raises
        ------
        ValueError
            ``tokens_to_remove`` is positive or exceeds the cached tokens, or tokens were evicted at a greater length.
        """
        self.prefetch()
        length = length_after_crop(self.held, tokens_to_remove)
        self.check_cut(length)
        self.cut(length)

    def check_cut(self, length: int) -> None:
        """Raise ``ValueError`` if tokens were evicted that the first ``length`` positions would need."""
        least = self.storage.least_length
        if 0 < length < least:
            raise ValueError(
                f"{self.method.name!r} cannot return to {length} tokens: it evicted some when there were {least}, and "
                f"they are gone; allowed: 0, or at least {least}"
            )

    def cut(self, length: int) -> None:
        """Keep the first ``length`` positions of every row."""
        self._token = None
        if not self.is_initialized or length == self.held:
            return
        if self._leads:
            self.lengths.cut(length)
        self._held = length
        self.prompt_queries = None if self.prompt_queries is None else self.prompt_queries.cut(length)
        self.storage.cut(length)
        self.method.crop_metadata(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row ``b`` by row ``beam_idx[b]``, for beam search."""
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in ``indices``."""
        self._change_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def fork(self, method: SparseMethod, shared: Shared) -> SparseLayer:
        """Create a layer for a method over the same keys and values; see ``SparseCache.fork``.

        ``shared`` holds copies of the lengths.
        """
        fork = copy.copy(self)
        fork.method = method
        fork.keep_queries = max(self.keep_queries, method.keeps_queries)
        fork.storage = of_kind(
            self.storage.fork(self.held, method.selection_size),
            method.evicts,
            self.head_shard.own(method.evicting_heads(self.layer_idx), self._kv_heads or 0),
        )
        fork.is_compileable = fork.storage.is_compileable
        fork.counter = LayerCounter(method.counts, fork.storage.traffic)
        fork._shared, fork._step_kind = shared, None
        if (device := getattr(self, "device", None)) in shared.lengths:  # also of a layer that has lost its buffers
            fork.lengths = shared.lengths[device]
        if self.is_initialized:
            fork.storage.allocate_metadata(fork._make_metadata)
            fork._allocate_counters()
            if method == self.method:
                for name, tensor in self.metadata.items():
                    fork.metadata[name].copy_(tensor)
            elif self.length:
                for name in method.lasting_metadata:
                    fork.metadata[name].copy_(self.metadata[name])
                fork.storage.stage(fork.lengths)
                method.update_metadata(fork, self.length)
        return fork

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.is_initialized:
            return
        self.prefetch()
        self._token = None
        if self._leads:
            self.lengths.map(change, self.storage.replace)
        self.storage.replace_all(change)
        if self.prompt_queries is not None:
            self.prompt_queries = self.prompt_queries.map(change)
        if self.finished.shape[0] != self.keys.shape[0]:
            self._allocate_counters()
            self._expand_prefix()


def length_after_crop(length: int, tokens_to_remove: int | torch.Tensor) -> int:
    """Return the length after a crop; raise ``ValueError`` if it removes more tokens than are cached."""
    tokens_to_remove = whole_number("tokens_to_remove", tokens_to_remove)  # assisted decoding passes a device tensor
    if tokens_to_remove > 0 or -tokens_to_remove > length:
        allowed = f"between -{length} (all tokens) and 0" if length else "0, since the cache is empty"
        raise ValueError(f"tokens_to_remove must be {allowed}, got {tokens_to_remove}")
    return length + tokens_to_remove
