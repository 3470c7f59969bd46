"""A layer's keys and values in host memory; the device has its newest blocks, and the blocks read lately in a pool."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.offload.blocks import KeysAndValues, Shape, SharedBlocks
from hf_sparse_attn.cache.offload.loading import BlockLoader
from hf_sparse_attn.cache.storage import Rows, Storage, enlarged, grown_capacity
from hf_sparse_attn.cache.traffic import Traffic

if TYPE_CHECKING:
    from hf_sparse_attn.cache.parked import Exchange
    from hf_sparse_attn.methods.base import SelectionSize


class OffloadStorage(BlockLoader):
    """Buffers in host memory, of which decode steps load the blocks that they read.

    The host's buffers have the layout of :class:`GrowingStorage`. Of each row the device keeps the newest block, which
    decode steps fill and attend to; it is stored on the host once it is full. The other blocks that a step reads come
    from the pool, and those that are not in it are loaded. In a pass over several tokens :attr:`keys` and
    :attr:`values` hold the whole layer: buffers that the layers share, so one layer's contents replace another's, and
    decode steps must not read them.

    Parameters
    ----------
    shared
        The memory of the cache's devices.
    initial_capacity
        Tokens to allocate room for at first.
    max_tokens
        Maximum number of tokens per row; None for no limit.
    """

    keeps_rows = False

    def __init__(self, shared: SharedBlocks, initial_capacity: int = 0, max_tokens: int | None = None) -> None:
        super().__init__(shared, initial_capacity, max_tokens)
        self._staging: KeysAndValues | None = None
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._end = 0  # tokens written, on the host or in the newest blocks
        self._starts = ()
        self._void_newest()

    def _void_newest(self) -> None:
        self._is_newest_valid = False  # whether the newest blocks hold their tokens before `_end`
        self._is_unsaved = False  # whether the host lacks some of them
        self._is_open = False  # whether a token may have been written at `_end` that is not counted yet

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create empty host buffers with room for at least these tokens, and the pool if there is none."""
        batch, kv_heads, tokens, head_dim = key_states.shape
        blocks = self._shared.on(key_states.device)
        if blocks is not self._blocks:
            self._blocks = blocks
            self._add_table()
        self._forget_rows()
        self._capacity = max(self.initial_capacity, tokens)
        self._shape = Shape(batch, kv_heads, head_dim, key_states.dtype)
        self._enter()
        self._memory.pool.forget(self._table)
        self._host = self._host_buffers(self._capacity)

    def _add_table(self) -> None:
        pool = self._memory.pool
        self._table = pool.add_table()
        weakref.finalize(self, pool.drop_table, self._table)

    def _enter(self) -> None:
        """Lay out the device's memory for these rows, and show its staging buffers as :attr:`keys`, :attr:`values`."""
        self._memory.lay_out(self._shape, self._capacity)
        if self._staging is not self._memory.staging or self.capacity != self._capacity:
            self._staging = self._memory.staging
            self.keys, self.values = (tensor[:, :, : self._capacity] for tensor in self._staging)

    def reserve(self, length: int | None, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Grow the host buffers if ``length`` does not fit."""
        if length is None or length <= self.capacity:
            return
        self._memory.transfers.finish()
        larger = copy.copy(self)  # memory may run out at any of the buffers: all are replaced, or none
        larger._capacity = max(length, grown_capacity(self.capacity))
        with lasting_tensors():
            keys, values = self._host_buffers(larger._capacity)
            larger._host = enlarged(self._host[0], keys), enlarged(self._host[1], values)
            larger._enter()
            grown = make(larger)
            metadata = {name: enlarged(old, grown[name]) for name, old in self.metadata.items()}
        self._capacity, self._host, self.metadata, self.shared_tokens = larger._capacity, larger._host, metadata, 0
        self._enter()

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: Lengths) -> None:
        """Write a decode step's token to the newest blocks, other tokens to the host by way of the staging buffers."""
        if lengths.in_step:
            newest = self.newest(lengths)
            at = (newest.seq_end - 1).clamp_min(0).long()
            rows = torch.arange(len(at), device=at.device)
            newest.keys[rows, :, at] = key_states[:, :, 0]
            newest.values[rows, :, at] = value_states[:, :, 0]
            return
        end = lengths.length
        begin = end - key_states.shape[2]
        self._enter()
        self._memory.claim_newest(self, self._index)  # a fork's unsaved tokens reach the host before these do
        self._stage(begin)
        self._memory.transfers.protect_stored()
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        rows_of_tokens = [(row, begin, end) for row in range(self._shape.batch)]
        self._store((self.keys[:, :, begin:end], self.values[:, :, begin:end]), rows_of_tokens)
        self._end, self._is_newest_valid = end, False
        self._memory.staged = weakref.ref(self), end

    def mark_written(self, lengths: Lengths) -> None:
        """Count a decode step's token, and store the blocks that it has filled on the host."""
        if lengths.length == self._end:
            return
        self._end, self._is_open, self._is_unsaved = lengths.length, False, True
        self._store_newest(lambda held: held > 0 and held % self._size == 0)
        self._keep_full(self.held(lengths))

    def newest(self, lengths: Lengths) -> Rows:
        """Return the newest blocks, as the part of the rows that begins where they do."""
        self._open(lengths)
        bounds = self._memory.bounds(lengths)
        return Rows(*self._memory.newest(self._index), bounds.newest_start, bounds.newest_end)

    def _open(self, lengths: Lengths) -> None:
        self._enter()
        if lengths.starts != self._starts:
            self.settle()
            self._memory.pool.forget(self._table)
            self._starts, self._is_newest_valid = lengths.starts, False
        if not self._memory.claim_newest(self, self._index) or not self._is_newest_valid:
            self._load_newest(lengths.length)
            self._is_newest_valid = True
        if lengths.length > self._end:
            self._is_open = True
            self._memory.transfers.protect_stored()

    def _load_newest(self, length: int) -> None:
        self._memory.transfers.finish_stores()
        newest = self._memory.newest(self._index)
        parts = []
        for row, start in enumerate(self._starts):
            begin = start + (max(length - start, 1) - 1) // self._size * self._size
            if begin < self._end:
                parts.append((row, begin))

        def copy_in() -> None:
            for target, source in zip(newest, self._host, strict=True):
                for row, begin in parts:
                    held = source[row, :, begin : self._end].contiguous()
                    target[row, :, : self._end - begin] = held.to(target.device)

        num_bytes = sum(2 * self._end - 2 * begin for _, begin in parts) * self._token_bytes
        self.wait(self._memory.transfers.load(copy_in, self.traffic, num_bytes))

    @property
    def _token_bytes(self) -> int:
        """Bytes of one token's keys, or of its values."""
        return self._shape.kv_heads * self._shape.head_dim * self._shape.dtype.itemsize

    def _store_newest(self, is_due: Callable[[int], bool]) -> None:
        """Store the newest blocks of rows whose number of tokens ``is_due``."""
        rows = []
        for row, start in enumerate(self._starts):
            held = max(self._end - start, 0)
            if is_due(held):
                rows.append((row, start + (max(held, 1) - 1) // self._size * self._size, self._end))
        if rows:
            self._store(self._memory.newest(self._index), rows)

    def _store(self, tokens: KeysAndValues, rows: list[tuple[int, int, int]]) -> None:
        """Copy the first tokens of device buffers to the host: for each row its index, begin and end there."""

        def copy_out() -> None:
            for target, source in zip(self._host, tokens, strict=True):
                for row, begin, end in rows:
                    for head in range(self._shape.kv_heads):  # one contiguous piece, so that the copy is asynchronous
                        target[row, head, begin:end].copy_(source[row, head, : end - begin], non_blocking=True)

        num_bytes = sum(2 * (end - begin) for _, begin, end in rows) * self._token_bytes
        self._memory.transfers.store(copy_out, self.traffic, num_bytes)

    def settle(self) -> None:
        """Store the tokens that the host lacks."""
        if self._is_unsaved:  # a full block is on the host already, and an open step may have begun to overwrite it
            self._store_newest(lambda held: held % self._size > 0)
            self._is_unsaved = False

    def leave_newest(self) -> None:
        """Give up the newest blocks, which another storage is about to use."""
        self.settle()
        self._void_newest()

    def stage(self, lengths: Lengths) -> None:
        """Let :attr:`keys` and :attr:`values` hold every token."""
        self._stage(lengths.length)

    def _stage(self, length: int) -> None:
        self.settle()
        self._enter()
        staged = self._memory.staged
        if length == 0 or (staged is not None and staged[0]() is self and staged[1] >= length):
            return
        self._memory.transfers.protect_stored()
        self._memory.staged = None

        def copy_in() -> None:
            for target, source in zip((self.keys, self.values), self._host, strict=True):
                for row in range(self._shape.batch):
                    for head in range(self._shape.kv_heads):
                        target[row, head, :length].copy_(source[row, head, :length], non_blocking=True)

        num_bytes = 2 * length * self._shape.batch * self._token_bytes
        self.wait(self._memory.transfers.load(copy_in, self.traffic, num_bytes))
        self._memory.staged = weakref.ref(self), length

    def visible(self, lengths: Lengths, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the staged tokens."""
        self.stage(lengths)
        return super().visible(lengths, num_new)

    def planned_length(self, lengths: Lengths) -> int:
        """Return the largest integer, so that decode steps always select: no step reads whole rows."""
        return sys.maxsize

    def cut(self, length: int) -> None:
        """Drop blocks with removed tokens, and copy the host buffers if another storage needs what will change."""
        if self._blocks is None or (length >= self._end and not self._is_open):
            return
        self.settle()
        self._void_newest()
        self._end = min(self._end, length)
        self._memory.unstage(self)
        if self._starts:
            whole = np.maximum(length - np.array(self._starts), 0) // self._size
            self._memory.pool.forget(self._table, whole.repeat(self._shape.kv_heads))
        if length < self.shared_tokens:
            self._copy_host()

    def _copy_host(self) -> None:
        self._memory.transfers.finish()
        copies = self._host_buffers(self._capacity)
        with lasting_tensors():
            for new, old in zip(copies, self._host, strict=True):
                new.copy_(old)
        self._host, self.shared_tokens = copies, 0

    def replace_all(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to the rows of host buffers and metadata. Blocks in the pool go to a row's first copy."""
        self.settle()
        self._void_newest()
        self._memory.unstage(self)
        self._memory.transfers.finish()
        order = change(torch.arange(self._shape.batch)).numpy()
        keeps_batch = len(order) == self._shape.batch
        with lasting_tensors():
            self._shape = self._shape._replace(batch=len(order))
            if self.shared_tokens or not keeps_batch:
                old, self._host = self._host, self._host_buffers(self._capacity)
            else:
                old = self._host
            for target, source in zip(self._host, old, strict=True):
                target.copy_(change(source))
            self.shared_tokens = 0
            self.metadata = {name: change(tensor) for name, tensor in self.metadata.items()}
        if keeps_batch and self._memory.shape == self._shape and self._starts:
            heads = self._shape.kv_heads
            self._memory.pool.reorder(self._table, (order[:, None] * heads + np.arange(heads)).reshape(-1))
        self._starts = tuple(self._starts[row] for row in order) if self._starts else ()
        self._enter()

    def exchange(self, change: Exchange, tokens: int) -> None:
        """Replace the metadata: keys and values lie on the host."""
        self.exchange_metadata(change)

    def leave_device(self) -> None:
        """Free the memory that the layers of the cache and its forks share, which then lose blocks, but no tokens."""
        self._memory.release()
        self._staging = None
        self.keys, self.values = (torch.empty_like(tensor, device="meta") for tensor in (self.keys, self.values))

    def enter_device(self) -> None:
        """Allocate that memory again."""
        self._enter()

    def fork(self, tokens: int, size: SelectionSize | None = None) -> Storage:
        """Return a storage over the same host buffers, without metadata and with no block in the pool."""
        self.settle()
        fork = super().fork(tokens)
        assert isinstance(fork, OffloadStorage)
        fork.traffic = Traffic()
        fork._void_newest()
        if fork._blocks is not None:
            fork._starts = ()
            fork._add_table()
        return fork

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadStorage:
        """Return a storage with host buffers and metadata of its own, which shares the device's memory."""
        twin = self.fork(0)
        assert isinstance(twin, OffloadStorage)
        memo[id(self)] = twin
        twin.traffic = copy.deepcopy(self.traffic, memo)
        twin.metadata = copy.deepcopy(self.metadata, memo)
        if twin._blocks is not None:
            twin._copy_host()
        return twin
