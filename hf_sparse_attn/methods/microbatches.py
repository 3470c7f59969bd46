"""Progressive attention over blocks that are loaded from host memory, microbatch by microbatch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from hf_sparse_attn_kernels import sparse_decode

from hf_sparse_attn.methods.merge import merge_attention

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

MOST_PARTS = 16
"""Rounds whose outputs are kept before they are merged: few launches, and memory that has a bound."""

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def attend_in_microbatches(
    query: torch.Tensor,
    layer: SparseLayer,
    block_order: torch.Tensor,
    *,
    block_size: int,
    microbatch: int,
    threshold: float,
    scale: float,
    rest: str = "least",
    forced_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as ``progressive_decode`` does, to blocks that the host loads as far as they are read.

    Each block is a row of its own for ``sparse_decode``, so that one launch gives the log-sum-exp of every block of a
    round, one or several microbatches. The host reads them, and decides which rows and KV heads have read enough, and
    after which microbatch. The outputs are merged by their log-sum-exp, so the result may differ from that of
    ``progressive_decode`` by rounding.

    Parameters
    ----------
    query
        [batch, q_heads, head_dim].
    layer
        An offloaded layer, which holds the query's token already. Its counter counts the step.
    block_order
        As ``rank_blocks`` returns it, int32 [batch, kv_heads, n].
    block_size, microbatch, threshold, scale
        As for ``progressive_decode``.
    rest, forced_blocks
        As for :class:`StopRule`.

    Returns
    -------
    tuple of torch.Tensor
        The output [batch, q_heads, head_dim], and the blocks read, int32 [batch, kv_heads].
    """
    batch, kv_heads, _ = block_order.shape
    group = query.shape[1] // kv_heads
    reads = layer.read_ahead(block_order, microbatch)
    rule = StopRule(reads.row_lengths, group, block_size, threshold, rest, forced_blocks)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in reads:
        of_blocks = (batch, part.blocks.shape[1], *query.shape[1:])
        out, lse = sparse_decode(
            query[:, None].expand(of_blocks).reshape(-1, *query.shape[1:]),
            part.rows.keys,
            part.rows.values,
            part.block_indices,
            part.block_counts,
            part.rows.seq_start,
            part.rows.seq_end,
            block_size=block_size,
            scale=scale,
        )
        sums = reads.read(lse).reshape(*of_blocks[:2], kv_heads, group).transpose(0, 2, 1, 3)
        read, goes_on = rule.add(part.blocks, sums.reshape(len(part.blocks), -1, group), microbatch)
        reads.note(read, goes_on)
        is_unread = (part.blocks >= 0) & (np.arange(of_blocks[1]) >= read[:, None])
        lse = lse.view(*of_blocks[:2], kv_heads, group)
        if is_unread.any():
            unread = reads.send(is_unread.reshape(batch, kv_heads, -1).transpose(0, 2, 1))
            lse = lse.masked_fill(unread.unsqueeze(3), -math.inf)
        parts.append((out.view(of_blocks), lse.flatten(2)))
        if len(parts) == MOST_PARTS:
            parts = [_merged(parts)]
    read_counts = torch.from_numpy(rule.read_counts.reshape(batch, kv_heads)).to(query.device, torch.int32)
    if not parts:
        layer.take_sinks()  # which change nothing of zeros
        return torch.zeros_like(query), read_counts
    output, total = merge_attention(parts)
    return layer.with_sinks(output, total).to(query.dtype), read_counts


def _merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    output, total = merge_attention(parts)
    return output.unsqueeze(1), total.unsqueeze(1)


class StopRule:
    """Decides on the host which pairs of a row and a KV head have read enough (arXiv 2503.00392, section 4).

    Parameters
    ----------
    row_lengths
        [pairs]: tokens of the pair's row.
    group
        Number of query heads of a pair. A pair has read enough when all of them have.
    block_size, threshold
        As for ``progressive_decode``.
    rest
        What a block that is left is taken to weigh: ``"least"``, as the least of the complete blocks read, or
        ``"last"``, as the least mean of a microbatch's complete blocks.
    forced_blocks
        First blocks of the order, which are always read: left out of the means.
    """

    def __init__(
        self,
        row_lengths: Ints,
        group: int,
        block_size: int,
        threshold: float,
        rest: str = "least",
        forced_blocks: int = 0,
    ) -> None:
        self.read_counts: Ints = np.zeros(len(row_lengths), np.int64)
        """[pairs]: blocks read so far."""
        self._lengths, self._block_size = row_lengths[:, None], block_size
        self._takes_means, self._forced_blocks = rest == "last", forced_blocks
        self._num_blocks = -(-row_lengths // block_size)
        self._log_odds = math.log(threshold) - math.log1p(-threshold) if threshold < 1 else math.inf
        self._total: Floats = np.full((len(row_lengths), group), -np.inf)
        self._least: Floats = np.full((len(row_lengths), group), np.inf)

    def add(self, blocks: Ints, sums: npt.NDArray[Any], microbatch: int | None = None) -> tuple[Ints, Bools]:
        """Add microbatches one by one, for each pair until it has read enough.

        Parameters
        ----------
        blocks
            [pairs, n]: the blocks, counted from the row's first token, then -1.
        sums
            [pairs, n, group]: logarithm of the sum of exp(q.k) over each block; -inf for none.
        microbatch
            Blocks of a microbatch; None for all of them.

        Returns
        -------
        tuple of numpy.ndarray
            How many of the blocks each pair reads, and which pairs have not read enough, both [pairs].
        """
        pairs, number, group = sums.shape
        size = microbatch or number
        missing = -number % size
        blocks = np.pad(blocks, ((0, 0), (0, missing)), constant_values=-1).reshape(pairs, -1, size)
        padded = np.pad(sums.astype(np.float64), ((0, 0), (0, missing), (0, 0)), constant_values=-np.inf)
        sums = padded.reshape(*blocks.shape, group)
        is_complete = (blocks >= 0) & ((blocks + 1) * self._block_size <= self._lengths[:, :, None])
        # [pairs, microbatches, ...]: all that is known after each of them.
        parts = np.concatenate((self._total[:, None], np.logaddexp.reduce(sums, axis=2)), axis=1)
        total = np.logaddexp.accumulate(parts, axis=1)[:, 1:]
        weight = np.concatenate((self._least[:, None], self._weight_of_rest(sums, is_complete)), axis=1)
        least = np.minimum.accumulate(weight, axis=1)[:, 1:]
        added = (blocks >= 0).sum(axis=2).cumsum(axis=1)
        left = np.maximum(self._num_blocks[:, None] - self.read_counts[:, None] - added, 0)[:, :, None]
        with np.errstate(divide="ignore", invalid="ignore"):  # nothing is left, and no complete block was read
            has_enough = np.all(total > self._log_odds + least + np.log(left), axis=2)
        goes_on: Bools = ~has_enough.any(axis=1)
        last = np.where(goes_on, has_enough.shape[1] - 1, has_enough.argmax(axis=1))
        every = np.arange(pairs)
        self._total, self._least = total[every, last], least[every, last]
        read: Ints = added[every, last]
        self.read_counts = self.read_counts + read
        return read, goes_on

    def _weight_of_rest(self, sums: Floats, is_complete: Bools) -> Floats:
        """Return the weight of a block that each microbatch lets expect, [pairs, microbatches, group]; inf if none."""
        weight: Floats
        if not self._takes_means:
            weight = np.where(is_complete[..., None], sums, np.inf).min(axis=2)
            return weight
        places = self.read_counts[:, None, None] + np.arange(is_complete[0].size).reshape(is_complete.shape[1:])
        counts = is_complete & (places >= self._forced_blocks)
        number = counts.sum(axis=2)[..., None]
        total = np.logaddexp.reduce(np.where(counts[..., None], sums, -np.inf), axis=2)
        weight = np.where(number > 0, total - np.log(np.maximum(number, 1)), np.inf)
        return weight
