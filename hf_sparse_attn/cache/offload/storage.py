"""A layer's keys and values in host memory; the device has its newest blocks, and the blocks read lately in a pool."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from hf_sparse_attn_kernels import load_blocks

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.offload.blocks import DeviceBlocks, KeysAndValues, Shape, SharedBlocks, newest_blocks
from hf_sparse_attn.cache.offload.pool import ABSENT, NOTHING, Found, Ints
from hf_sparse_attn.cache.offload.reads import Located, ReadAhead
from hf_sparse_attn.cache.storage import GrowingStorage, Present, Rows, Storage, enlarged, grown_capacity
from hf_sparse_attn.cache.traffic import Traffic

if TYPE_CHECKING:
    from hf_sparse_attn.methods.base import Selection
    from hf_sparse_attn.stats import LayerCounter


class OffloadStorage(GrowingStorage):
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
    traffic: Traffic

    def __init__(self, shared: SharedBlocks, initial_capacity: int = 0, max_tokens: int | None = None) -> None:
        super().__init__(initial_capacity, max_tokens)
        self.traffic = Traffic()
        self._shared = shared
        self._index = shared.add_layer()
        self._blocks: DeviceBlocks | None = None
        self._staging: KeysAndValues | None = None
        self._is_lent = False  # whether a fork reads the host buffers
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._end = 0  # tokens written, on the host or in the newest blocks
        self._starts: tuple[int, ...] = ()  # the rows' first tokens when blocks were last counted from them
        self._void_newest()

    def _void_newest(self) -> None:
        self._is_newest_valid = False  # whether the newest blocks hold their tokens before `_end`
        self._is_unsaved = False  # whether the host lacks some of them
        self._is_open = False  # whether a token may have been written at `_end` that is not counted yet

    @property
    def _memory(self) -> DeviceBlocks:
        assert self._blocks is not None
        return self._blocks

    @property
    def _size(self) -> int:
        return self._shared.offload.block_size

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self._shape.kv_heads

    def held(self, lengths: Lengths) -> Ints:
        """Return the number of tokens of each row, [batch]."""
        held: Ints = np.maximum(lengths.length - np.array(lengths.starts), 0)
        return held

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

    def _host_buffers(self, capacity: int) -> KeysAndValues:
        size = (self._shape.batch, self._shape.kv_heads, capacity, self._shape.head_dim)
        transfers = self._memory.transfers
        keys, values = (transfers.host_empty(size, self._shape.dtype) for _ in range(2))
        self._device_reads_host = transfers.reads_host
        return keys, values

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
        self._capacity = max(length, grown_capacity(self.capacity))
        with lasting_tensors():
            keys, values = self._host_buffers(self._capacity)
            self._host = enlarged(self._host[0], keys), enlarged(self._host[1], values)
            self.shared_tokens = 0
            self._enter()
            metadata = make(self)
            self.metadata = {name: enlarged(old, metadata[name]) for name, old in self.metadata.items()}

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

    def _keep_full(self, held: Ints) -> None:
        """Copy newest blocks that are full, of rows of ``held`` tokens, to the pool: they need not come back."""
        memory, heads = self._memory, np.arange(self.kv_heads)
        rows = np.flatnonzero((held > 0) & (held % self._size == 0))
        if not len(rows) or len(rows) * self.kv_heads > memory.pool.slots:
            return
        pairs = (rows[:, None] * self.kv_heads + heads).reshape(-1)
        try:
            slots = memory.pool.take(self._table, pairs, newest_blocks(held, self._size)[pairs // self.kv_heads]).slots
            self.wait(int(memory.filled_by[slots].max()))  # a load of another block may still be on its way there
            at, source = memory.transfers.send(np.stack((slots + memory.first_slot, pairs)))
            for target, newest in zip(memory.memory, memory.newest(self._index), strict=True):
                target.index_copy_(0, at, newest.flatten(0, 1).index_select(0, source))
        except BaseException:
            memory.forget_all()
            raise

    def newest(self, lengths: Lengths) -> Rows:
        """Return the newest blocks, as the part of the rows that begins where they do."""
        self._open(lengths)
        bounds = self._memory.bounds(lengths)
        return Rows(*self._memory.newest(self._index), bounds.newest_start, bounds.newest_end)

    def present(self, selection: Selection, lengths: Lengths, counter: LayerCounter) -> Iterator[Present]:
        """Load the selected blocks that the pool lacks; yield those that are there, then, once they are, the others."""
        self._open(lengths)
        chosen = self.read(selection.block_indices).astype(np.int64)  # [batch, kv_heads or 1, n]
        chosen = np.broadcast_to(chosen, (self._shape.batch, self.kv_heads, chosen.shape[2]))
        located = self.locate(chosen.reshape(self._shape.pairs, -1), lengths)
        counter.count_read(self.count_reads(located, lengths), int(self.held(lengths).sum()) * self.kv_heads)
        parts = located.parts(self._memory.transfers.arrived)
        # One array of the indices of all parts, then their counts.
        indices = np.stack([part.indices for part in parts])
        sent = self._memory.transfers.send(
            np.concatenate((indices.reshape(-1), (indices >= 0).sum(axis=2).reshape(-1))).astype(np.int32)
        )
        all_indices = sent[: indices.size].view(len(parts), self._shape.batch, self.kv_heads, -1)
        all_counts = sent[indices.size :].view(len(parts), self._shape.batch, self.kv_heads)
        bounds = self._memory.bounds(lengths)
        for part, block_indices, block_counts in zip(parts, all_indices, all_counts, strict=True):
            self.wait(int(part.loads.max(initial=0)))
            yield Present(
                *self._memory.buffers(self._index),
                block_indices,
                block_counts,
                bounds.pool_start,
                bounds.pool_ends[self._index],
                counter=None,
            )

    def read_ahead(
        self, block_order: torch.Tensor, microbatch: int, lengths: Lengths, counter: LayerCounter
    ) -> ReadAhead:
        """Return the microbatches of a decode step; ``block_order`` is int32 [batch, kv_heads, n], best first."""
        self._open(lengths)
        order = self.read(block_order).reshape(self._shape.pairs, -1)
        return ReadAhead(self, order, microbatch, lengths, counter)

    def locate(self, blocks: Ints, lengths: Lengths, keep: Ints = NOTHING) -> Located:
        """Return where blocks of the layer will be, and begin to load those that are nowhere.

        Parameters
        ----------
        blocks
            [batch * kv_heads, n]: blocks counted from the rows' first tokens, without duplicates; -1 for none.
        lengths
            The row lengths.
        keep
            Slots of blocks that must stay.
        """
        memory = self._memory
        is_newest = blocks == newest_blocks(self.held(lengths), self._size).repeat(self.kv_heads)[:, None]
        is_pooled = (blocks >= 0) & ~is_newest
        pairs = is_pooled.nonzero()[0]
        found = self._load(pairs, blocks[is_pooled], keep)
        indices, slots = np.full_like(blocks, ABSENT), np.full_like(blocks, ABSENT)
        was_there, loads = np.zeros_like(is_pooled), np.zeros_like(blocks)
        indices[is_newest] = memory.newest_index(self._index)
        indices[is_pooled] = memory.first_slot + found.slots - pairs
        slots[is_pooled] = found.slots
        was_there[is_pooled] = ~found.is_missing
        loads[is_pooled] = memory.filled_by[found.slots]
        return Located(indices, slots, was_there, loads)

    def _load(self, pairs: Ints, blocks: Ints, keep: Ints) -> Found:
        """Return the slots of complete blocks, and begin to load those that are missing."""
        memory = self._memory
        try:
            found = memory.pool.take(self._table, pairs, blocks, keep)
            if found.is_missing.any():
                slots = found.slots[found.is_missing]
                memory.filled_by[slots] = self._fill(slots, pairs[found.is_missing], blocks[found.is_missing])
        except BaseException:
            memory.forget_all()  # slots that were promised may not have been filled
            raise
        return found

    def _fill(self, slots: Ints, pairs: Ints, blocks: Ints) -> int:
        """Begin to copy blocks from the host to their slots; return the number of the load."""
        size = self._size
        in_row = np.array(self._starts)[pairs // self.kv_heads] + blocks * size
        first_tokens = pairs * self._capacity + in_row
        prepare = self._copy_by_kernel if self._device_reads_host else self._copy_by_host
        num_bytes = 2 * len(blocks) * size * self._shape.head_dim * self._shape.dtype.itemsize
        return self._memory.transfers.load(
            prepare(slots + self._memory.first_slot, first_tokens), self.traffic, num_bytes
        )

    def _copy_by_kernel(self, targets: Ints, first_tokens: Ints) -> Callable[[], None]:
        """Let a kernel read the blocks in host memory, whatever the ops' ``impl``: a copy does not round."""
        memory = self._memory
        host_keys, host_values = (buffer.view(-1, self._shape.head_dim) for buffer in self._host)

        def copy_in() -> None:
            keys, values = memory.memory
            at, first = memory.transfers.send(np.stack((targets, first_tokens)))
            load_blocks(keys, values, host_keys, host_values, at, first, impl="triton")

        return copy_in

    def _copy_by_host(self, targets: Ints, first_tokens: Ints) -> Callable[[], None]:
        """Gather the blocks on the host, to copy them in one piece."""
        memory, shape, size = self._memory, self._shape, self._size
        memory.transfers.finish_stores()
        lines = torch.from_numpy((first_tokens[:, None] + np.arange(size)).reshape(-1))
        gathered = memory.transfers.landing((2, len(lines), shape.head_dim), shape.dtype)
        for buffer, part in zip(self._host, gathered, strict=True):
            torch.index_select(buffer.view(-1, shape.head_dim), 0, lines, out=part)

        def copy_in() -> None:
            arrived = gathered.to(memory.device, non_blocking=True).view(2, len(targets), size, shape.head_dim)
            at = memory.transfers.send(targets)
            for target, part in zip(memory.memory, arrived, strict=True):
                target.index_copy_(0, at, part)

        return copy_in

    def wait(self, load: int) -> None:
        """Let the device's later work wait for a load, and count how long it does."""
        self._memory.transfers.wait(load, self.traffic)

    def read(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Return a device tensor's contents on the host, once the device has computed it."""
        return self._memory.transfers.read(tensor)

    def count_reads(self, located: Located, lengths: Lengths) -> int:
        """Count blocks that a step reads, and return how many tokens they hold."""
        is_pooled, held = located.slots >= 0, self.held(lengths)
        pooled = int(is_pooled.sum())
        self.traffic.blocks_read += pooled
        self.traffic.blocks_hit += int(located.was_there.sum())
        reads_newest = ((located.indices >= 0) & ~is_pooled).any(axis=1)
        in_newest = (held - newest_blocks(held, self._size) * self._size).repeat(self.kv_heads)
        return pooled * self._size + int((reads_newest * in_newest).sum())

    def as_rows(self, indices: Ints, lengths: Lengths) -> tuple[torch.Tensor, ...]:
        """Return the fields of :class:`Microbatch` on the device for the blocks at ``indices``, [pairs, n]."""
        memory, (batch, kv_heads), number = self._memory, self._shape[:2], indices.shape[1]
        single = indices.reshape(batch, kv_heads, number).transpose(0, 2, 1).reshape(-1)
        start = np.arange(batch) * (kv_heads * self._size)
        held = self.held(lengths)
        end = start + (memory.newest_index(self._index) - newest_blocks(held, self._size)) * self._size + held
        bounds = np.stack((start, end)).repeat(number, axis=1)
        sent = memory.transfers.send(np.concatenate((single, single >= 0, bounds.reshape(-1))).astype(np.int32))
        block_indices, block_counts = sent[: 2 * single.size].view(2, batch * number, kv_heads)
        seq_start, seq_end = sent[2 * single.size :].view(2, batch * number)
        buffers = memory.block_rows(self._index, number)
        return (*buffers, block_indices.unsqueeze(2), block_counts, seq_start, seq_end)

    def _open(self, lengths: Lengths) -> None:
        """Let the newest blocks hold the last block of each row, up to the last token written."""
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
            if self.shared_tokens or self._is_lent or not keeps_batch:
                old, self._host = self._host, self._host_buffers(self._capacity)
            else:
                old = self._host
            for target, source in zip(self._host, old, strict=True):
                target.copy_(change(source))
            self.shared_tokens, self._is_lent = 0, False
            self.metadata = {name: change(tensor) for name, tensor in self.metadata.items()}
        if keeps_batch and self._memory.shape == self._shape and self._starts:
            heads = self._shape.kv_heads
            self._memory.pool.reorder(self._table, (order[:, None] * heads + np.arange(heads)).reshape(-1))
        self._starts = tuple(self._starts[row] for row in order) if self._starts else ()
        self._enter()

    def fork(self, tokens: int) -> Storage:
        """Return a storage over the same host buffers, without metadata and with no block in the pool."""
        self.settle()
        fork = super().fork(tokens)
        assert isinstance(fork, OffloadStorage)
        fork.traffic = Traffic()
        fork._void_newest()
        if fork._blocks is not None:
            self._is_lent, fork._starts = True, ()
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
