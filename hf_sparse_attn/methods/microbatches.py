"""Progressive attention over blocks that are loaded from host memory, microbatch by microbatch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from hf_sparse_attn_kernels import sparse_decode

from hf_sparse_attn.methods.base import Selection

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


def attend_in_microbatches(
    query: torch.Tensor,
    layer: SparseLayer,
    block_order: torch.Tensor,
    block_counts: torch.Tensor,
    *,
    block_size: int,
    microbatch: int,
    threshold: float,
    scale: float,
    rest: str,
    forced_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as ``progressive_decode`` does, to blocks that the host loads as far as they are read.

    The host learns which rows and KV heads go on from the blocks of their next microbatch, which those that have read
    enough leave empty. The weights are merged by their log-sum-exp, so the output may differ from that of
    ``progressive_decode`` by rounding.

    Parameters
    ----------
    query
        [batch, q_heads, head_dim].
    layer
        An offloaded layer, which holds the query's token already. Its counter counts the step.
    block_order, block_counts
        As ``rank_blocks`` returns them, int32 [batch, kv_heads, n] and [batch, kv_heads].
    block_size, microbatch, threshold, scale, rest, forced_blocks
        As for ``progressive_decode``.

    Returns
    -------
    tuple of torch.Tensor
        The output [batch, q_heads, head_dim], and the blocks read, int32 [batch, kv_heads].
    """
    batch, kv_heads, listed = block_order.shape
    sums_of = (batch, kv_heads, query.shape[1] // kv_heads)
    dtype = torch.promote_types(query.dtype, torch.float32)
    lengths = layer.row_lengths()[:, None, None]  # [batch, 1, 1]
    num_blocks = (lengths + block_size - 1) // block_size
    log_odds = math.log(threshold) - math.log1p(-threshold) if threshold < 1 else math.inf
    total = query.new_full(sums_of, -math.inf, dtype=dtype)
    least = query.new_full(sums_of, math.inf, dtype=dtype)
    output = query.new_zeros((*sums_of, query.shape[2]), dtype=dtype)
    read_counts = torch.zeros_like(block_counts)
    goes_on = block_counts > 0
    for first in range(0, listed, microbatch):
        blocks = block_order[..., first : first + microbatch]
        counts = (block_counts - first).clamp(0, blocks.shape[2]) * goes_on
        blocks = blocks.masked_fill(torch.arange(blocks.shape[2], device=query.device) >= counts[..., None], -1)
        present = layer.present(Selection(blocks, counts, block_size), continues=first > 0)
        if present.is_empty:
            break
        parts = [
            sparse_decode(
                query,
                present.keys,
                present.values,
                present.block_indices[..., place : place + 1],
                (counts > place).int(),
                present.seq_start,
                present.seq_end,
                block_size=block_size,
                scale=scale,
                finished=layer.finished,
            )
            for place in range(blocks.shape[2])
        ]
        sums = torch.stack([lse.view(sums_of) for _, lse in parts], dim=3)  # [batch, kv_heads, group, blocks]
        outputs = torch.stack([out.view(output.shape) for out, _ in parts], dim=3)
        former, total = total, torch.logaddexp(total, sums.logsumexp(dim=3))
        weights = (sums - total[..., None]).exp()
        output = output * (former - total).exp()[..., None] + (weights[..., None] * outputs).sum(dim=3)
        is_left_out = ((blocks + 1) * block_size > lengths) | (blocks < 0)
        if rest == "last":
            is_left_out |= torch.arange(first, first + blocks.shape[2], device=query.device) < forced_blocks
        least = torch.minimum(least, _estimate_of_rest(sums, is_left_out[:, :, None], rest))
        read_counts = read_counts + counts
        left = (num_blocks - read_counts[..., None]).clamp_min(0).to(dtype).log()
        has_enough = (total > log_odds + least + left).all(dim=2)
        goes_on = goes_on & ~has_enough & (read_counts < block_counts)
    output = output.masked_fill(read_counts[:, :, None, None] == 0, 0.0)  # NaN in a row without tokens
    return output.view(query.shape).to(query.dtype), read_counts


def _estimate_of_rest(sums: torch.Tensor, is_left_out: torch.Tensor, rest: str) -> torch.Tensor:
    """Return the least, or the mean, of blocks of log-sum-exp ``sums`` [..., blocks]; infinite if all are left out."""
    if rest == "least":
        return sums.masked_fill(is_left_out, math.inf).amin(dim=3)
    counted = (~is_left_out).sum(dim=3)
    mean = sums.masked_fill(is_left_out, -math.inf).logsumexp(dim=3) - counted.to(sums.dtype).log()
    return mean.masked_fill(counted == 0, math.inf)
