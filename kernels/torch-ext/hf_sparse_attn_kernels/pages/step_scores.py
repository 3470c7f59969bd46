"""First kernel of `append_and_select`: appends the token and scores all pages."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from .levels import power_of_two
from .step_append import append_and_summarize, append_token
from .tiles import split_query, store_scores


@triton.jit
def score_page(
    query_ptr,  # of the row and its first query head in the group
    lower,
    upper,
    exponent,
    page_exponent,
    page,
    scale,
    out_ptr,  # as for `store_scores`, like all below
    lse_ptr,
    lse_stride,
    group,
    num_pages,
    query_stride_h,
    query_stride_d,
    HEAD_DIM: tl.constexpr,
    REDUCE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the score of the one page whose bounds were returned with its new token."""
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    in_group = heads < group
    mask = (dims < HEAD_DIM)[:, None] & in_group[None, :]
    at = query_ptr + dims[:, None] * query_stride_d + heads[None, :] * query_stride_h
    q = tl.load(at, mask=mask, other=0.0).to(tl.float32) * power_of_two(exponent)[:, None]
    scores = tl.sum(tl.maximum(q * lower[:, None], q * upper[:, None]), axis=0) * (scale * power_of_two(page_exponent))
    if REDUCE == "softmax":
        tl.store(out_ptr + heads * num_pages + page, scores, mask=in_group)
        tl.store(lse_ptr + heads * lse_stride, scores, mask=in_group)
    elif REDUCE == "mean":
        tl.store(out_ptr + page, tl.sum(tl.where(in_group, scores, 0.0)) / group)
    else:
        tl.store(out_ptr + page, tl.max(tl.where(in_group, scores, float("-inf"))))


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
    STATISTIC: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score `pages_per_program` pages of a row and KV head, or append its token; grid (programs, pairs).

    Program 0 appends the token and scores its page; the others score the pages before that one.
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
                new_key_ptr += row * new_key_stride_b + head * new_key_stride_h
                new_value_ptr += row * new_value_stride_b + head * new_value_stride_h
                key_out_ptr = keys_ptr + row * keys_stride_b + head * keys_stride_h + position * keys_stride_n
                value_out_ptr = values_ptr + row * values_stride_b + head * values_stride_h + position * values_stride_n
                if STATISTIC == "minmax":
                    lower, upper, exponent, page_exponent = append_token(
                        new_key_ptr,
                        new_value_ptr,
                        key_out_ptr,
                        value_out_ptr,
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
                else:
                    lower, upper, exponent, page_exponent = append_and_summarize(
                        new_key_ptr,
                        new_value_ptr,
                        key_out_ptr,
                        value_out_ptr,
                        min_ptr + page * min_stride_p,
                        max_ptr + page * max_stride_p,
                        page_exponent_ptr + page,
                        channel_exponent_ptr,
                        length - 1,
                        keys_stride_n,
                        STATISTIC,
                        PAGE_SIZE,
                        SUMMED,
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
