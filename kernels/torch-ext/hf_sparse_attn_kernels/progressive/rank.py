"""Triton launcher of `rank_blocks`: sorts spans of blocks, then merges them."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._rank import Ranking, count_blocks, rank_keys, write_span
from .._triton import wait_for_previous_kernel
from .._tuning import choice


@triton.jit
def rank_spans_kernel(
    scores_ptr,  # [batch * kv_heads, width]
    start_ptr,
    end_ptr,
    sorted_ptr,  # int64 [batch * kv_heads, spans, SPAN]; not for ONE_SPAN
    order_ptr,  # [batch * kv_heads, max_blocks], for ONE_SPAN only
    counts_ptr,  # [batch * kv_heads]
    kv_heads,
    width,
    max_blocks,
    sink_blocks,
    recent_blocks,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    LOG_SPAN: tl.constexpr,
    LOW_BITS: tl.constexpr,
    ONE_SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort SPAN blocks of a row and KV head; grid (spans, batch * kv_heads)."""
    wait_for_previous_kernel(PDL)
    span = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    num_blocks = count_blocks(start_ptr, end_ptr, pair // kv_heads, width, BLOCK_SIZE)
    count = tl.minimum(num_blocks, max_blocks)
    if span == 0:
        tl.store(counts_ptr + pair, count)
    if (span == 0) | (span * SPAN < num_blocks):
        # Without wider loads a thread's entries are spread over the tile, as the sort wants them.
        blocks = tl.max_contiguous(span * SPAN + tl.arange(0, SPAN), 1)
        scores = tl.load(scores_ptr + pair * width + blocks, mask=blocks < num_blocks, other=0.0)
        write_span(
            rank_keys(scores, blocks, num_blocks, sink_blocks, recent_blocks),
            sorted_ptr + (pair * tl.num_programs(0) + span) * SPAN,
            order_ptr + pair * max_blocks,
            count,
            max_blocks,
            SPAN,
            LOG_SPAN,
            LOW_BITS,
            ONE_SPAN,
        )


def rank_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int | None,
    sink_blocks: int,
    recent_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    check_triton_dtype("scores", scores, (torch.float32,))
    batch, kv_heads, width = scores.shape
    max_blocks = width if max_blocks is None else max_blocks
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    # The scores are reduced over a group and over head_dim already.
    config = choice("rank", scores.device, pairs=batch * kv_heads, group=1, head_dim=1, tokens=width * block_size)
    ranking = Ranking.allocate(scores.device, batch, kv_heads, width, max_blocks, config)
    rank_spans_kernel[(ranking.spans, batch * kv_heads)](
        scores.contiguous(),
        *row_bounds,
        ranking.sorted_keys,
        ranking.order,
        ranking.counts,
        kv_heads,
        width,
        max_blocks,
        sink_blocks,
        recent_blocks,
        BLOCK_SIZE=block_size,
        **ranking.options(),
    )
    return ranking.merge(row_bounds, width, block_size)
