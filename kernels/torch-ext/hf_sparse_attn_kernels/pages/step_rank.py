"""Triton launcher of `append_and_rank`: one launch appends and scores, another sorts; a third merges long rows."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._rank import Ranking, count_blocks, rank_keys, write_span
from .._triton import next_power_of_2, wait_for_previous_kernel
from .._tuning import choice
from .step import score_pages
from .tiles import group_softmax


@triton.jit
def rank_pages_kernel(
    scores_ptr,  # [batch * kv_heads, num_pages rounded up to 16], reduced over the group; not for "softmax"
    head_scores_ptr,  # [batch * kv_heads, group, the same], for "softmax" only, like the next
    program_lse_ptr,  # [batch * kv_heads, group, score_programs]
    start_ptr,
    end_ptr,
    sorted_ptr,  # int64 [batch * kv_heads, spans, SPAN]; not for ONE_SPAN
    order_ptr,  # [batch * kv_heads, max_blocks], for ONE_SPAN only
    counts_ptr,  # [batch * kv_heads]
    kv_heads,
    num_pages,
    max_blocks,
    sink_blocks,
    recent_blocks,
    score_programs,
    scored_per_program,
    GROUP: tl.constexpr,
    REDUCE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPAN: tl.constexpr,
    LOG_SPAN: tl.constexpr,
    LOW_BITS: tl.constexpr,
    ONE_SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce SPAN pages of a row and KV head over the group, and sort them; grid (spans, batch * kv_heads)."""
    wait_for_previous_kernel(PDL)
    span = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    row_pages = count_blocks(start_ptr, end_ptr, pair // kv_heads, num_pages, PAGE_SIZE)
    count = tl.minimum(row_pages, max_blocks)
    if span == 0:
        tl.store(counts_ptr + pair, count)
    if (span == 0) | (span * SPAN < row_pages):
        padded_pages = (num_pages + 15) // 16 * 16
        # Without wider loads a thread's entries are spread over the tile, as the sort wants them.
        pages = tl.max_contiguous(span * SPAN + tl.arange(0, SPAN), 1)
        if REDUCE == "softmax":
            scores = group_softmax(
                head_scores_ptr + pair * GROUP * padded_pages,
                program_lse_ptr + pair * score_programs * GROUP,
                pages,
                row_pages,
                padded_pages,
                1 + tl.cdiv(tl.maximum(row_pages - 1, 0), scored_per_program),
                score_programs,
                GROUP,
                SPAN,
                BLOCK_T,
            )
        else:
            scores = tl.load(scores_ptr + pair * padded_pages + pages, mask=pages < row_pages, other=0.0)
        write_span(
            rank_keys(scores, pages, row_pages, sink_blocks, recent_blocks),
            sorted_ptr + (pair * tl.num_programs(0) + span) * SPAN,
            order_ptr + pair * max_blocks,
            count,
            max_blocks,
            SPAN,
            LOG_SPAN,
            LOW_BITS,
            ONE_SPAN,
        )


def append_and_rank(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_blocks: int | None,
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    counter: torch.Tensor | None,
    statistic: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and score in one launch, sort in another, and merge in a third if a row has several spans."""
    batch, q_heads, head_dim = query.shape
    kv_heads, max_pages = page_min.shape[1:3]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    num_pages = max_pages if num_pages is None else num_pages
    max_blocks = num_pages if max_blocks is None else max_blocks
    scored = score_pages(
        query,
        (new_key, new_value),
        (keys, values),
        (page_min, page_max),
        None if page_exponent is None or channel_exponent is None else (page_exponent, channel_exponent),
        row_bounds,
        page_size=page_size,
        num_pages=num_pages,
        scale=head_dim**-0.5 if scale is None else scale,
        group_reduce=group_reduce,
        counter=counter,
        statistic=statistic,
    )
    config = choice("rank", query.device, pairs=pairs, group=group, head_dim=head_dim, tokens=num_pages * page_size)
    ranking = Ranking.allocate(query.device, batch, kv_heads, num_pages, max_blocks, config)
    score_programs = scored.program_lse.shape[-1]
    rank_pages_kernel[(ranking.spans, pairs)](
        scored.scores,
        scored.head_scores,
        scored.program_lse,
        *row_bounds,
        ranking.sorted_keys,
        ranking.order,
        ranking.counts,
        kv_heads,
        num_pages,
        max_blocks,
        sink_blocks,
        recent_blocks,
        score_programs,
        scored.pages_per_program,
        GROUP=group,
        REDUCE=scored.group_reduce,
        PAGE_SIZE=page_size,
        BLOCK_T=next_power_of_2(score_programs),
        **ranking.options(),
    )
    return ranking.merge(row_bounds, num_pages, page_size)
