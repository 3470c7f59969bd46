"""Blocks that decode steps of an offloaded layer read: found on the device, or loaded from host memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from hf_sparse_attn_kernels import load_blocks

from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.offload.blocks import DeviceBlocks, KeysAndValues, Shape, SharedBlocks, newest_blocks
from hf_sparse_attn.cache.offload.pool import ABSENT, NOTHING, Found, Ints
from hf_sparse_attn.cache.offload.reads import Located, ReadAhead
from hf_sparse_attn.cache.storage import GrowingStorage, Present, Rows
from hf_sparse_attn.cache.traffic import Traffic

if TYPE_CHECKING:
    from hf_sparse_attn.methods.base import Selection
    from hf_sparse_attn.stats import LayerCounter


class BlockLoader(GrowingStorage):
    """The part of an offloaded storage that serves decode steps; the storage itself writes and changes tokens.

    Parameters
    ----------
    shared
        The memory of the cache's devices.
    initial_capacity
        Tokens to allocate room for at first.
    max_tokens
        Maximum number of tokens per row; None for no limit.
    """

    traffic: Traffic
    _table: int
    """Table of the pool that names the layer's blocks."""
    _shape: Shape
    _capacity: int
    _host: KeysAndValues
    """[batch, kv_heads, capacity, head_dim] each, in host memory."""
    _device_reads_host: bool
    """Whether a kernel can read :attr:`_host`."""
    _starts: tuple[int, ...]
    """The rows' first tokens when blocks were last counted from them."""

    def __init__(self, shared: SharedBlocks, initial_capacity: int, max_tokens: int | None) -> None:
        super().__init__(initial_capacity, max_tokens)
        self.traffic = Traffic()
        self._shared = shared
        self._index = shared.add_layer()
        self._blocks: DeviceBlocks | None = None
        self.last_read: Ints | None = None
        """[batch * kv_heads]: blocks that the last step read, if a :class:`ReadAhead` found out how many."""

    @abstractmethod
    def _open(self, lengths: Lengths) -> None:
        """Let the newest blocks hold the last block of each row, up to the last token written."""

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

    def _host_buffers(self, capacity: int) -> KeysAndValues:
        size = (self._shape.batch, self._shape.kv_heads, capacity, self._shape.head_dim)
        transfers = self._memory.transfers
        keys, values = (transfers.host_empty(size, self._shape.dtype) for _ in range(2))
        self._device_reads_host = transfers.reads_host
        return keys, values

    def present(self, selection: Selection, lengths: Lengths, counter: LayerCounter) -> Iterator[Present]:
        """Load the selected blocks that the pool lacks; yield those that are there, then, once they are, the others."""
        self._open(lengths)
        memory, (batch, kv_heads) = self._memory, self._shape[:2]
        chosen = self.read(selection.block_indices).astype(np.int64)  # [batch, kv_heads or 1, n]
        if chosen.shape[1] != kv_heads:
            chosen = chosen.repeat(kv_heads, axis=1)
        located = self.locate(chosen.reshape(self._shape.pairs, -1), lengths)
        counter.count_read(self.count_reads(located, lengths), int(self.held(lengths).sum()) * kv_heads)
        parts = located.parts(memory.transfers.arrived)
        # One array has the indices of all parts, then their counts.
        indices = np.stack([part for part, _ in parts], dtype=np.int32)
        sent = memory.transfers.send(np.concatenate((indices.reshape(-1), (indices >= 0).sum(2, np.int32).reshape(-1))))
        all_indices = sent[: indices.size].view(len(parts), batch, kv_heads, -1)
        all_counts = sent[indices.size :].view(len(parts), batch, kv_heads)
        keys, values = memory.buffers(self._index)
        bounds = memory.bounds(lengths)
        row_bounds = (bounds.pool_start, bounds.pool_ends[self._index])
        for number, (_, load) in enumerate(parts):
            self.wait(load)
            yield Present(keys, values, all_indices[number], all_counts[number], *row_bounds, counter=None)

    def read_ahead(
        self, block_order: torch.Tensor, microbatch: int, lengths: Lengths, counter: LayerCounter
    ) -> ReadAhead:
        """Return the rounds of a decode step; ``block_order`` is int32 [batch, kv_heads, n], best first."""
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
        self.traffic.step_bytes_loaded += num_bytes
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

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a device tensor with the contents of a host array."""
        return self._memory.transfers.send(array)

    def most_blocks(self) -> int:
        """Number of blocks that the pool can hold at once for each pair of a row and a KV head."""
        return self._memory.pool.slots // self._shape.pairs

    def count_reads(self, located: Located, lengths: Lengths) -> int:
        """Count blocks that a step reads, and return how many tokens they hold."""
        is_pooled, held = located.slots >= 0, self.held(lengths)
        pooled = int(np.count_nonzero(is_pooled))
        self.traffic.blocks_read += pooled
        self.traffic.blocks_hit += int(np.count_nonzero(located.was_there))
        reads_newest = ((located.indices >= 0) & ~is_pooled).any(axis=1)
        in_newest = (held - newest_blocks(held, self._size) * self._size).repeat(self.kv_heads)
        return pooled * self._size + int((reads_newest * in_newest).sum())

    def block_rows(self, blocks: int, lengths: Lengths) -> Rows:
        """Return the rows for an op that attends to single blocks: each row of the batch ``blocks`` times."""
        held, size = self.held(lengths), self._size
        start = np.arange(len(held)) * (self.kv_heads * size)
        end = start + (self._memory.newest_index(self._index) - newest_blocks(held, size)) * size + held
        bounds = np.stack((start, end)).repeat(blocks, axis=1)
        seq_start, seq_end = self._memory.transfers.send(bounds.astype(np.int32))
        return Rows(*self._memory.block_rows(self._index, blocks), seq_start, seq_end)

    def single_blocks(self, indices: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices, [pairs, n], as a selection of the rows of :meth:`block_rows`, one block for each."""
        batch, number = self._shape.batch, indices.shape[1]
        indices = indices.reshape(batch, self.kv_heads, number).transpose(0, 2, 1)
        selection = np.stack((indices, indices >= 0), dtype=np.int32)
        single, counts = self._memory.transfers.send(selection.reshape(2, batch * number, self.kv_heads))
        return single.unsqueeze(2), counts

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
