"""Triton launcher of `append_and_select`: one launch appends and scores, another selects."""

import math
from typing import NamedTuple

import torch

from .._check import check_triton
from .._triton import INTERPRET, cdiv, launch_options, multiprocessors, next_power_of_2, score_dtype
from .._tuning import choice
from .step_scores import append_and_score_kernel
from .step_select import select_pages_kernel
from .summaries import summary_options

ONE_TILE_LIMIT = 16384  # keys that the selecting program keeps in registers


def append_and_select(
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
    max_blocks: int,
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
    statistic: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and score in one launch, select in another."""
    q_heads, head_dim = query.shape[1:]
    kv_heads, max_pages = page_min.shape[1:3]
    group = q_heads // kv_heads
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    num_pages = max_pages if num_pages is None else num_pages
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
    return _select_pages(
        scored,
        row_bounds,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages,
        max_blocks=max_blocks,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
        finished=finished,
    )


class PageScores(NamedTuple):
    """Results of the first launch, read by the second."""

    scores: torch.Tensor
    """float32 [batch * kv_heads, num_pages rounded up to 16]: reduced over the group, except by softmax."""
    head_scores: torch.Tensor
    """float32 [batch * kv_heads, group, num_pages rounded up to 16]: each head's, for a reduction by softmax."""
    program_lse: torch.Tensor
    """float32 [batch * kv_heads, group, programs]: log-sum-exp over each program's pages, for a softmax."""
    pages_per_program: int
    """Pages of every program except the first, which scores the page of the new token."""
    group_reduce: str
    """Reduction over the group that the scores have had, or for "softmax" still need."""


def score_pages(
    query: torch.Tensor,
    token: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor],
    bounds: tuple[torch.Tensor, torch.Tensor],
    exponents: tuple[torch.Tensor, torch.Tensor] | None,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    page_size: int,
    num_pages: int,
    scale: float,
    group_reduce: str,
    counter: torch.Tensor | None,
    statistic: str,
) -> PageScores:
    """Launch `append_and_score_kernel`."""
    check_triton("query", query)
    batch, q_heads, head_dim = query.shape
    kv_heads, max_pages = bounds[0].shape[1:3]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    if group == 1:
        group_reduce = "max"  # all three keep the order of a single head
    block_d = max(16, next_power_of_2(head_dim))
    config = choice("score", query.device, pairs=pairs, group=group, head_dim=head_dim, tokens=num_pages * page_size)
    # Two tiles of bounds take at most 64 KiB together.
    block_p = max(16, min(config["block_p"], 32768 // (block_d * bounds[0].element_size())))
    # As few pages per program as keep every multiprocessor busy, in whole tiles.
    per_program = cdiv(num_pages * pairs, multiprocessors(query.device) * config["per_multiprocessor"])
    pages_per_program = block_p * max(1, round(per_program / block_p))
    programs = 1 + cdiv(num_pages, pages_per_program)

    padded_pages = cdiv(num_pages, 16) * 16
    scores = query.new_empty((pairs, padded_pages), dtype=torch.float32)
    head_scores, program_lse = scores, scores
    if group_reduce == "softmax":
        head_scores = query.new_empty((pairs, group, padded_pages), dtype=torch.float32)
        program_lse = query.new_empty((pairs, group, programs), dtype=torch.float32)
    append_and_score_kernel[(programs, pairs)](
        query,
        *token,
        *buffers,
        *bounds,
        *(bounds if exponents is None else exponents),
        *row_bounds,
        scores,
        head_scores,
        program_lse,
        scores if counter is None else counter,
        kv_heads,
        num_pages,
        max_pages,
        pages_per_program,
        scale,
        *query.stride(),
        *(stride for tensor in token for stride in tensor.stride()[:2]),
        *(stride for tensor in buffers for stride in tensor.stride()[:3]),
        *(stride for tensor in bounds for stride in tensor.stride()[:3]),
        GROUP=group,
        HEAD_DIM=head_dim,
        QUANTIZED=exponents is not None,
        REDUCE=group_reduce,
        PAGE_SIZE=page_size,
        COUNT=counter is not None,
        BLOCK_P=block_p,
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_D=block_d,
        DOT_DTYPE=score_dtype(query, exponents is not None),
        INTERPRETED=INTERPRET,
        num_warps=config["warps"],
        num_stages=3,
        **summary_options(statistic, page_size),
        **launch_options(query.device),
    )
    return PageScores(scores, head_scores, program_lse, pages_per_program, group_reduce)


def _select_pages(
    scored: PageScores,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    num_pages: int,
    max_blocks: int,
    sink_blocks: int,
    recent_blocks: int,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `select_pages_kernel`."""
    device = scored.scores.device
    pairs = scored.scores.shape[0]
    programs_before = scored.program_lse.shape[-1]
    config = choice("select", device, pairs=pairs, group=group, head_dim=head_dim, tokens=num_pages * page_size)
    # Two levels of about the same size: num_pages / span spans, which one tile must hold, then max_blocks * span pages.
    span = next_power_of_2(max(2, math.isqrt(num_pages // max_blocks), cdiv(num_pages, ONE_TILE_LIMIT)))
    block_c = max(128, next_power_of_2(max_blocks) * span)
    two_levels = num_pages >= config["two_levels_from"] and 2 * block_c <= num_pages
    one_program = not two_levels and scored.group_reduce != "softmax"
    program_p = max(config["reduced"], span)
    programs = 1 if one_program else cdiv(num_pages, program_p)
    keys = cdiv(num_pages, span) if two_levels else num_pages
    block_n = min(ONE_TILE_LIMIT, max(128, next_power_of_2(keys)))

    indices = torch.empty((pairs // kv_heads, kv_heads, max_blocks), dtype=torch.int32, device=device)
    counts = torch.empty((pairs // kv_heads, kv_heads), dtype=torch.int32, device=device)
    maxima = spans = indices
    if two_levels:
        maxima = torch.empty((pairs, programs * program_p // span), dtype=torch.int32, device=device)
        spans = torch.empty((pairs, max_blocks), dtype=torch.int32, device=device)
    if finished is None and not one_program:
        finished = torch.zeros((pairs,), dtype=torch.int32, device=device)
    select_pages_kernel[(programs, pairs)](
        scored.scores,
        scored.head_scores,
        scored.program_lse,
        maxima,
        spans,
        *row_bounds,
        counts if finished is None else finished,
        indices,
        counts,
        kv_heads,
        num_pages,
        max_blocks,
        sink_blocks,
        recent_blocks,
        programs_before,
        scored.pages_per_program,
        GROUP=group,
        REDUCE=scored.group_reduce,
        PAGE_SIZE=page_size,
        PROGRAM_P=program_p,
        ONE_PROGRAM=one_program,
        TWO_LEVELS=two_levels,
        SPAN=span,
        BLOCK_T=next_power_of_2(programs_before),
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        ONE_TILE=keys <= ONE_TILE_LIMIT,
        num_warps=config["warps"] if block_n <= 2048 else 16,
        **launch_options(device),
    )
    return indices, counts
