"""First launch of `append_and_select`: the new token, and the scores of all pages."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._triton import (
    INTERPRET,
    cdiv,
    launch_options,
    multiprocessors,
    next_power_of_2,
    score_dtype,
    wait_for_previous_kernel,
)
from .._tuning import choice
from .step_append import append_token, score_page
from .tiles import split_query, store_scores


class PageScores(NamedTuple):
    """Results of the first launch that the second reads."""

    scores: torch.Tensor
    """float32 [batch * kv_heads, num_pages rounded up to 16]: reduced over the group, unless that is by softmax."""
    head_scores: torch.Tensor
    """float32 [batch * kv_heads, group, the same]: each head's, for a reduction by softmax."""
    program_lse: torch.Tensor
    """float32 [batch * kv_heads, group, programs]: log-sum-exp over the pages of each program, likewise."""
    pages_per_program: int
    """Pages of every program but the first, which has the page with the new token."""


@triton.jit
def append_and_score_kernel(
    query_ptr,
    new_key_ptr,
    new_value_ptr,
    keys_ptr,
    values_ptr,
    min_ptr,
    max_ptr,
    page_exponent_ptr,  # [batch * kv_heads, max_pages]
    channel_exponent_ptr,  # [batch * kv_heads, head_dim]
    start_ptr,
    end_ptr,
    scores_ptr,  # [batch * kv_heads, num_pages rounded up to 16], reduced over the group
    head_scores_ptr,  # [batch * kv_heads, group, the same], for "softmax" only, like the next
    program_lse_ptr,  # [batch * kv_heads, group, programs]
    counter_ptr,
    kv_heads,
    num_pages,
    max_pages,
    pages_per_program,
    scale,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    new_key_stride_b,
    new_key_stride_h,
    new_value_stride_b,
    new_value_stride_h,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    min_stride_b,
    min_stride_h,
    min_stride_p,
    max_stride_b,
    max_stride_h,
    max_stride_p,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    REDUCE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The scores of `pages_per_program` pages of one row and KV head, or its new token; grid (programs, pairs).

    Program 0 appends the token and scores the page that it is in, the others score the pages before that.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    start = tl.load(start_ptr + row)
    length = tl.maximum(tl.load(end_ptr + row) - start, 0)
    row_pages = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    full_pages = tl.maximum(row_pages - 1, 0)
    programs = 1 + tl.cdiv(full_pages, pages_per_program)
    program = tl.program_id(0)
    if program < programs:
        query_ptr += row * query_stride_b + head * GROUP * query_stride_h
        min_ptr += row * min_stride_b + head * min_stride_h
        max_ptr += row * max_stride_b + head * max_stride_h
        page_exponent_ptr += pair * max_pages
        channel_exponent_ptr += pair * HEAD_DIM
        # Rows of scores are a multiple of 16 long.
        padded_pages = (num_pages + 15) // 16 * 16
        scores_ptr += pair * padded_pages
        head_scores_ptr += pair * GROUP * padded_pages
        program_lse_ptr += pair * tl.num_programs(0) * GROUP
        out_ptr = head_scores_ptr if REDUCE == "softmax" else scores_ptr
        if program == 0:
            if length > 0:
                position = (start + length - 1).to(tl.int64)
                page = full_pages.to(tl.int64)
                lower, upper, exponent, page_exponent = append_token(
                    new_key_ptr + row * new_key_stride_b + head * new_key_stride_h,
                    new_value_ptr + row * new_value_stride_b + head * new_value_stride_h,
                    keys_ptr + row * keys_stride_b + head * keys_stride_h + position * keys_stride_n,
                    values_ptr + row * values_stride_b + head * values_stride_h + position * values_stride_n,
                    min_ptr + page * min_stride_p,
                    max_ptr + page * max_stride_p,
                    page_exponent_ptr + page,
                    channel_exponent_ptr,
                    length - 1,
                    PAGE_SIZE,
                    HEAD_DIM,
                    QUANTIZED,
                    BLOCK_D,
                )
                score_page(
                    query_ptr,
                    lower,
                    upper,
                    exponent,
                    page_exponent,
                    page,
                    scale,
                    out_ptr,
                    program_lse_ptr,
                    tl.num_programs(0),
                    GROUP,
                    padded_pages,
                    query_stride_h,
                    query_stride_d,
                    HEAD_DIM,
                    REDUCE,
                    BLOCK_G,
                    BLOCK_D,
                )
        else:
            above, below, unit = split_query(
                query_ptr,
                channel_exponent_ptr,
                GROUP,
                query_stride_h,
                query_stride_d,
                HEAD_DIM,
                QUANTIZED,
                BLOCK_G,
                BLOCK_D,
                DOT_DTYPE,
            )
            store_scores(
                above,
                below,
                min_ptr,
                max_ptr,
                page_exponent_ptr,
                (program - 1) * pages_per_program,
                tl.minimum(program * pages_per_program, full_pages),
                min_stride_p,
                max_stride_p,
                scale * unit,
                out_ptr,
                program_lse_ptr + program,
                tl.num_programs(0),
                GROUP,
                padded_pages,
                HEAD_DIM,
                QUANTIZED,
                REDUCE,
                BLOCK_P,
                BLOCK_G,
                BLOCK_D,
                DOT_DTYPE,
                INTERPRETED,
            )
        if COUNT & (program == 0):
            page_bytes = 2 * HEAD_DIM * (min_ptr.dtype.element_ty.primitive_bitwidth // 8)
            row_bytes = row_pages.to(tl.int64) * page_bytes
            if QUANTIZED:
                row_bytes += tl.where(row_pages > 0, row_pages + HEAD_DIM, 0)
            tl.atomic_add(counter_ptr + 2, row_bytes, sem="relaxed")


def score_pages(
    query: torch.Tensor,
    token: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor],
    bounds: tuple[torch.Tensor, torch.Tensor],
    exponents: tuple[torch.Tensor, torch.Tensor] | None,
    rows: tuple[torch.Tensor, torch.Tensor],
    *,
    page_size: int,
    num_pages: int,
    scale: float,
    group_reduce: str,
    counter: torch.Tensor | None,
) -> PageScores:
    """Launch `append_and_score_kernel`."""
    batch, q_heads, head_dim = query.shape
    kv_heads, max_pages = bounds[0].shape[1:3]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    block_d = max(16, next_power_of_2(head_dim))
    config = choice("score", query.device, pairs=pairs, group=group, head_dim=head_dim, tokens=num_pages * page_size)
    # Two tiles of bounds at most 64 KiB together.
    block_p = max(16, min(config["block_p"], 32768 // (block_d * bounds[0].element_size())))
    # As few pages for each program as keep every multiprocessor busy, in whole tiles.
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
        *rows,
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
        **launch_options(query.device),
    )
    return PageScores(scores, head_scores, program_lse, pages_per_program)
