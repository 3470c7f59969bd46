"""Triton kernel and launcher of `append_and_select_tokens`: one launch appends, codes and prepares the query."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._triton import launch_options, next_power_of_2, wait_for_previous_kernel
from .encode import encode_options, encode_page
from .prepared import PAGES_AT_ONCE
from .query import prepare_query
from .rotation import rotation, rotation_levels
from .scores import LEAST_DEPTH, plan, scan, scoring_programs
from .select import choose

MOST_REGISTERS = 112
"""Of a thread: enough for all that a step nearly always does. Coding a page spills a few."""


@triton.jit
def append_and_prepare_kernel(
    query_ptr,
    new_key_ptr,
    new_value_ptr,
    keys_ptr,
    values_ptr,
    codes_ptr,  # as for `encode_page`, like the next three
    factors_ptr,
    centres_ptr,
    centre_scale_ptr,
    coded_ptr,  # int32 [pairs]
    start_ptr,
    end_ptr,
    query_centre_ptr,  # [pairs, HEAD_DIM]
    rotation_ptr,  # [HEAD_DIM, HEAD_DIM], like the next
    levels_ptr,  # int8: in units
    parts_ptr,  # as for `prepare_query`, like the next three
    slopes_ptr,
    page_scores_ptr,
    counter_ptr,
    kv_heads,
    num_tokens,
    pages,
    scale,
    rotation_unit,
    offset_scale,
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    COUNT: tl.constexpr,
    CODED_T: tl.constexpr,
    CODED_B: tl.constexpr,
    CODED_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Append a token and code the page that it fills, or prepare the query.

    The grid is (1 + programs that rotate + programs that score, pairs). Program 0 appends. No other reads what it
    writes: the page of the newest token is no candidate, full or not.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    program = tl.program_id(0)
    start = tl.load(start_ptr + row)
    length = tl.load(end_ptr + row) - start
    if program == 0:
        if length > 0:
            dims = tl.arange(0, BLOCK_D)
            mask = dims < HEAD_DIM
            key_at = new_key_ptr + row * new_key_stride_b + head * new_key_stride_h + dims
            value_at = new_value_ptr + row * new_value_stride_b + head * new_value_stride_h + dims
            position = (start + length - 1).to(tl.int64)
            keys_ptr += row * keys_stride_b + head * keys_stride_h
            values_ptr += row * values_stride_b + head * values_stride_h
            tl.store(keys_ptr + position * keys_stride_n + dims, tl.load(key_at, mask=mask), mask=mask)
            tl.store(values_ptr + position * values_stride_n + dims, tl.load(value_at, mask=mask), mask=mask)
            page = length // PAGE_SIZE - 1
            is_due = (length % PAGE_SIZE == 0) & (page < pages)
            if is_due & (tl.load(coded_ptr + pair, mask=is_due, other=0) <= page):
                tl.debug_barrier()  # all of the key is written before any of it is read
                encode_page(
                    keys_ptr + (position - (PAGE_SIZE - 1)) * keys_stride_n,
                    keys_stride_n,
                    codes_ptr,
                    factors_ptr,
                    centres_ptr,
                    centre_scale_ptr,
                    query_centre_ptr + pair * HEAD_DIM,
                    rotation_ptr,
                    pair,
                    pair * pages + page,
                    offset_scale,
                    HEAD_DIM,
                    PAGE_SIZE,
                    BITS,
                    OFFSETS,
                    False,
                    LEAST_SQUARES,
                    CODED_T,
                    CODED_B,
                    BLOCK_D,
                    CODED_K,
                )
                tl.store(coded_ptr + pair, page + 1)
    else:
        prepare_query(
            program - 1,
            tl.num_programs(0) - 1,
            pair,
            tl.maximum(tl.minimum(length, num_tokens) - 1, 0) // PAGE_SIZE,
            query_ptr + row * query_stride_b + head * HEADS * query_stride_h,
            query_centre_ptr,
            levels_ptr,
            centres_ptr,
            centre_scale_ptr,
            parts_ptr,
            slopes_ptr,
            page_scores_ptr,
            counter_ptr,
            pages,
            0,
            scale,
            rotation_unit,
            query_stride_h,
            query_stride_d,
            HEADS,
            GROUP,
            HEAD_DIM,
            PAGE_SIZE,
            BITS,
            OFFSETS,
            False,
            COUNT,
            BLOCK_N,
            BLOCK_B,
            BLOCK_D,
        )


def append_and_select_tokens(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    sink_tokens: int,
    bits: int,
    correction: str,
    query_centre: torch.Tensor | None,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
    counter: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    check_triton("query", query)
    head_dim = query.shape[2]
    num_tokens = codes.shape[2] if num_tokens is None else num_tokens
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    prepared = plan(query, codes, query_centre, page_size=page_size, bits=bits, scale=scale, group_reduce=group_reduce)
    pairs, pages, _ = prepared.page_scores.shape
    coding = encode_options(head_dim, page_size, max_pages=1)
    levels, rotation_unit = rotation_levels(head_dim, query.device)
    append_and_prepare_kernel[(1 + prepared.programs + scoring_programs(prepared, num_tokens), pairs)](
        query,
        new_key,
        new_value,
        keys,
        values,
        codes,
        factors,
        centres,
        centre_scale,
        coded,
        *row_bounds,
        prepared.slopes if query_centre is None else query_centre,
        rotation(head_dim, query.device),
        levels,
        *prepared[:3],
        prepared.slopes if counter is None else counter,
        codes.shape[1],
        num_tokens,
        pages,
        prepared.scale,
        rotation_unit,
        head_dim**-0.5,
        *query.stride(),
        *new_key.stride()[:2],
        *new_value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        HEAD_DIM=head_dim,
        LEAST_SQUARES=correction == "least_squares",
        COUNT=counter is not None,
        CODED_T=coding["BLOCK_T"],
        CODED_B=coding["BLOCK_B"],
        CODED_K=coding["BLOCK_K"],
        BLOCK_N=PAGES_AT_ONCE,
        BLOCK_D=max(LEAST_DEPTH, next_power_of_2(head_dim)),
        num_warps=coding["num_warps"],
        maxnreg=MOST_REGISTERS,
        num_stages=coding["num_stages"],
        **prepared.sizes,
        **launch_options(query.device),
    )
    scanned = scan(prepared, codes, factors, row_bounds, num_tokens)
    return choose(scanned, row_bounds, max_tokens=max_tokens, sink_tokens=sink_tokens, page_size=page_size)
