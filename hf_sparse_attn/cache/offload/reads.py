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


class Microbatch(NamedTuple):
    """Blocks for an op that attends to each of them apart: a row for each block of each row of the batch."""

    blocks: Ints
    """[batch * kv_heads, n], on the host: the blocks, counted from the row's first token; -1 for none."""
    rows: Rows
    """Buffers [batch * n, kv_heads, tokens, head_dim], and row bounds int32 [batch * n]."""
    block_indices: torch.Tensor
    """int32 [batch * n, kv_heads, 1]: the block, counted from the row's start in these buffers, or -1."""
    block_counts: torch.Tensor
    """int32 [batch * n, kv_heads]: 1, or 0 for no block."""


class ReadAhead:
    """Iterates over microbatches of blocks in their order, each loaded while the one before it is attended to.

    So a microbatch may be loaded that is not read. The step is counted at the end.

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
        self.goes_on: Bools = np.ones(len(order), np.bool_)
        """[batch * kv_heads], for the caller to change: which pairs read on."""
        self.row_lengths = storage.held(lengths).repeat(storage.kv_heads)
        """[batch * kv_heads]: tokens of the pairs' rows."""

    def __iter__(self) -> Iterator[Microbatch]:
        """Yield microbatches until no pair goes on."""
        storage, tokens_read = self._storage, 0
        blocks = self._blocks(0)
        located = storage.locate(blocks, self._lengths)
        rows = storage.block_rows(self._size, self._lengths)
        for first in range(0, self._order.shape[1], self._size):
            blocks = np.where(self.goes_on[:, None], blocks, ABSENT)
            if (blocks < 0).all():
                break
            located = located.only(blocks >= 0)
            following = self._blocks(first + self._size)
            ahead = storage.locate(following, self._lengths, keep=located.slots[located.slots >= 0])
            tokens_read += storage.count_reads(located, self._lengths)
            storage.wait(int(located.loads.max()))
            yield Microbatch(blocks, rows, *storage.single_blocks(located.indices))
            blocks, located = following, ahead
        self._counter.count_read(tokens_read, int(self.row_lengths.sum()))

    def _blocks(self, first: int) -> Ints:
        """Return the microbatch that begins with block ``first`` of the order, for the pairs that go on."""
        part = self._order[:, first : first + self._size]
        blocks = np.full((len(part), self._size), ABSENT, np.int64)
        blocks[:, : part.shape[1]] = part
        blocks[~self.goes_on] = ABSENT
        return blocks

    def read(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Return a device tensor's contents on the host, once the device has computed it."""
        return self._storage.read(tensor)
