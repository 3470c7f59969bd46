"""The blocks that a decode step reads: where they are on the device, and which loads it must wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.offload.pool import ABSENT, Ints
from hf_sparse_attn.cache.storage import Rows

if TYPE_CHECKING:
    from hf_sparse_attn.cache.offload.loading import BlockLoader
    from hf_sparse_attn.stats import LayerCounter

MOST_MICROBATCHES = 16
"""Of a round."""

Bools = npt.NDArray[np.bool_]


class Located(NamedTuple):
    """Places of blocks, [pairs, n] each: a line for each pair of a row and a KV head."""

    indices: Ints
    """Index in ``DeviceBlocks.buffers``, or -1: no block."""
    slots: Ints
    """Slot in the pool, or -1: no block, or the newest of the row, which has its own place."""
    was_there: Bools
    """Whether the block was in its slot before this step."""
    loads: Ints
    """Number of the load that brings it; 0 if none does."""

    def only(self, is_wanted: Bools) -> Located:
        """Return the blocks at the places, [pairs, n] or [pairs, 1], that are wanted."""
        return Located(
            np.where(is_wanted, self.indices, ABSENT),
            np.where(is_wanted, self.slots, ABSENT),
            self.was_there & is_wanted,
            self.loads * is_wanted,
        )

    def parts(self, arrived: int) -> list[tuple[Ints, int]]:
        """Separate the blocks that can be read at once from those of loads after number ``arrived``.

        Returns the indices of each part, valid ones first, and the load to wait for. One part if nothing must be waited
        for, or if nothing of the pool can be read before: attention to the newest blocks alone would not be worth a
        launch.
        """
        last = int(self.loads.max(initial=0))
        if last <= arrived:
            return [(self.indices, last)]
        must_wait = self.loads > arrived
        if not ((self.slots >= 0) & ~must_wait).any():
            return [(self.indices, last)]
        is_ready = (self.indices >= 0) & ~must_wait
        return [(self._chosen(is_ready), arrived), (self._chosen(must_wait), last)]

    def _chosen(self, is_chosen: Bools) -> Ints:
        """Return the chosen indices at the front of their lines, in their order, then -1."""
        order = np.argsort(~is_chosen, axis=1, kind="stable")
        indices: Ints = np.take_along_axis(np.where(is_chosen, self.indices, ABSENT), order, axis=1)
        return indices


class Round(NamedTuple):
    """Blocks for an op that attends to each of them apart: a row for each block of each row of the batch."""

    blocks: Ints
    """[batch * kv_heads, n], on the host: the blocks, counted from the row's first token, then -1."""
    rows: Rows
    """Buffers [batch * n, kv_heads, tokens, head_dim], and row bounds int32 [batch * n]."""
    block_indices: torch.Tensor
    """int32 [batch * n, kv_heads, 1]: the block, counted from the row's start in these buffers, or -1."""
    block_counts: torch.Tensor
    """int32 [batch * n, kv_heads]: 1, or 0 for no block."""


class ReadAhead:
    """Iterates over a step's blocks in their order, in rounds of one or several microbatches.

    Each round costs the host a wait for the device. So the first has, for each pair, as many microbatches as the pair
    read in the step before, and one more, within a limit. Where that is not known, or was too little, a round is one
    microbatch, and the next is loaded while it is attended to. Either way blocks may be loaded that are not read. The
    step is counted at the end.

    Parameters
    ----------
    storage
        The layer's storage, which holds the step's token.
    order
        [batch * kv_heads, n]: for each pair of a row and a KV head, the blocks in the order in which to read them,
        then -1.
    microbatch
        Number of blocks of a microbatch.
    lengths
        The row lengths, the token included.
    counter
        The layer's counter.
    """

    def __init__(
        self, storage: BlockLoader, order: npt.NDArray[Any], microbatch: int, lengths: Lengths, counter: LayerCounter
    ) -> None:
        self._storage, self._order, self._size = storage, order, microbatch
        self._lengths, self._counter = lengths, counter
        self._read: Ints = np.zeros(len(order), np.int64)
        self._goes_on: Bools = np.ones(len(order), np.bool_)
        self._expected: Ints = np.zeros_like(self._read)
        last = storage.last_read
        if last is not None and len(last) == len(order):
            self._expected = (-(-last // microbatch) + 1) * microbatch
        self.row_lengths = storage.held(lengths).repeat(storage.kv_heads)
        """[batch * kv_heads]: tokens of the pairs' rows."""

    def __iter__(self) -> Iterator[Round]:
        """Yield rounds until no pair goes on. The caller notes what it has read of each, see :meth:`note`."""
        storage, tokens_read = self._storage, 0
        begin = np.zeros_like(self._read)
        end = begin + self._sizes(begin)
        blocks = self._blocks(begin, end)
        located = storage.locate(blocks, self._lengths)
        while (blocks >= 0).any():
            sizes = self._sizes(end)
            following, ahead = self._blocks(end, end + sizes), None
            if (end > self._expected).all():  # not while the round may be large, and holds one more than is expected
                ahead = storage.locate(following, self._lengths, keep=located.slots[located.slots >= 0])
            storage.wait(int(located.loads.max()))
            rows = storage.block_rows(blocks.shape[1], self._lengths)
            read_before = self._read.copy()
            yield Round(blocks, rows, *storage.single_blocks(located.indices))
            was_read = np.arange(blocks.shape[1]) < (self._read - read_before)[:, None]
            tokens_read += storage.count_reads(located.only(was_read), self._lengths)
            blocks = np.where(self._goes_on[:, None], following, ABSENT)
            located = storage.locate(blocks, self._lengths) if ahead is None else ahead.only(blocks >= 0)
            end = end + sizes
        storage.last_read = self._read
        self._counter.count_read(tokens_read, int(self.row_lengths.sum()))

    def note(self, read: Ints, goes_on: Bools) -> None:
        """Note how many blocks of the round each pair has read, and which pairs read on, both [batch * kv_heads]."""
        self._read += read
        self._goes_on &= goes_on

    def _sizes(self, done: Ints) -> Ints:
        """Return the sizes of the pairs' next rounds, [pairs], after ``done`` blocks: as expected, or a microbatch."""
        most = min(MOST_MICROBATCHES, max(1, self._storage.most_blocks() // self._size)) * self._size
        sizes: Ints = np.clip(self._expected - done, self._size, most)
        return sizes

    def _blocks(self, begin: Ints, end: Ints) -> Ints:
        """Return the blocks from place ``begin`` of the order until ``end``, both [pairs], of the pairs that go on."""
        places = begin[:, None] + np.arange(min(int((end - begin).max()), self._order.shape[1]))
        is_wanted = (places < np.minimum(end, self._order.shape[1])[:, None]) & self._goes_on[:, None]
        blocks: Ints = np.full(places.shape, ABSENT, np.int64)
        pairs, columns = is_wanted.nonzero()
        blocks[pairs, columns] = self._order[pairs, places[pairs, columns]]
        return blocks

    def read(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Return a device tensor's contents on the host, once the device has computed it."""
        return self._storage.read(tensor)

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a device tensor with the contents of a host array."""
        return self._storage.send(array)
