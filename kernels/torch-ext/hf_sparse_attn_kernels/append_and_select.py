"""Triton kernels of `append_and_select`: the new token and the page scores of a decode step, then its top-k."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from ._bounds import (
    channel_exponent_for,
    group_softmax,
    lower_level,
    page_exponent_for,
    power_of_two,
    split_query,
    store_scores,
    upper_level,
)
from ._topk import load_order_keys, order_keys, write_top_blocks
from ._triton import (
    INTERPRET,
    finished_last,
    launch_options,
    multiprocessors,
    score_dtype,
    wait_for_previous_kernel,
)

OVERRIDE = {}
ONE_TILE_LIMIT = 8192  # keys that the selecting program keeps in registers
DIRECT_LIMIT = 8192  # pages up to which the selection has one level
REDUCED_BY_PROGRAM = 512  # pages that a program of the selection reduces over the group


@triton.jit
def append_token(
    new_key_ptr,  # of the row and KV head, like all pointers here
    new_value_ptr,
    key_out_ptr,  # of the token's position
    value_out_ptr,
    min_ptr,  # of the token's page
    max_ptr,
    page_exponent_ptr,
    channel_exponent_ptr,
    offset,  # of the token in its row
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one token's key and value, and widen its page's bounds to hold the key.

    Returns the bounds, float32 [BLOCK_D] each, without the units of page and channel, and the exponents of both.
    """
    dims = tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    has_others = offset % PAGE_SIZE > 0
    key = tl.load(new_key_ptr + dims, mask=mask, other=0.0)
    value = tl.load(new_value_ptr + dims, mask=mask, other=0.0)
    old_lower = tl.load(min_ptr + dims, mask=mask, other=0).to(tl.float32)
    old_upper = tl.load(max_ptr + dims, mask=mask, other=0).to(tl.float32)
    lower = key.to(tl.float32)
    upper = lower
    exponent = tl.zeros((BLOCK_D,), tl.int32)
    page_exponent = tl.zeros((), tl.int32)
    if QUANTIZED:
        old_page_exponent = tl.where(has_others, tl.load(page_exponent_ptr).to(tl.int32), 0)
        exponent = tl.load(channel_exponent_ptr + dims, mask=mask, other=0).to(tl.int32)
        if offset == 0:  # a row's first token sets the unit of its channels
            partner = tl.load(new_key_ptr + (dims + HEAD_DIM // 2) % HEAD_DIM, mask=mask, other=0.0)
            exponent = channel_exponent_for(tl.maximum(tl.abs(lower), tl.abs(partner.to(tl.float32))))
            tl.store(channel_exponent_ptr + dims, exponent.to(tl.int8), mask=mask)
        scaled = lower * power_of_two(-exponent)
        page_exponent = tl.maximum(page_exponent_for(tl.max(tl.abs(scaled))), old_page_exponent)
        tl.store(page_exponent_ptr, page_exponent.to(tl.int8))
        lower = lower_level(scaled * power_of_two(-page_exponent))
        upper = upper_level(scaled * power_of_two(-page_exponent))
        # Rounding outwards twice is rounding once, so the page's bounds are those of all its keys at once.
        old_lower = lower_level(old_lower * power_of_two(old_page_exponent - page_exponent))
        old_upper = upper_level(old_upper * power_of_two(old_page_exponent - page_exponent))
    lower = tl.where(has_others, tl.minimum(lower, old_lower), lower)
    upper = tl.where(has_others, tl.maximum(upper, old_upper), upper)
    tl.store(key_out_ptr + dims, key, mask=mask)
    tl.store(value_out_ptr + dims, value, mask=mask)
    tl.store(min_ptr + dims, lower.to(min_ptr.dtype.element_ty), mask=mask)
    tl.store(max_ptr + dims, upper.to(max_ptr.dtype.element_ty), mask=mask)
    return lower, upper, exponent, page_exponent


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
    """Store the score of the one page whose bounds `append_token` returned."""
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
    PROGRAM_P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The scores of PROGRAM_P pages of one row and KV head, or its new token; grid (programs, pairs).

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
    programs = 1 + tl.cdiv(full_pages, PROGRAM_P)
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
                (program - 1) * PROGRAM_P,
                tl.minimum(program * PROGRAM_P, full_pages),
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


@triton.jit
def select_pages_kernel(
    scores_ptr,  # [batch * kv_heads, num_pages rounded up to 16], reduced over the group; written for "softmax"
    head_scores_ptr,  # [batch * kv_heads, group, the same], for "softmax" only, like the next
    program_lse_ptr,  # [batch * kv_heads, group, score_programs]
    maxima_ptr,  # int32 [batch * kv_heads, programs * PROGRAM_P / SPAN], for TWO_LEVELS only, like the next
    spans_ptr,  # int32 [batch * kv_heads, max_blocks]
    start_ptr,
    end_ptr,
    finished_ptr,  # int32 [batch * kv_heads], 0 before and after
    indices_ptr,  # [batch * kv_heads, max_blocks]
    counts_ptr,  # [batch * kv_heads]
    kv_heads,
    num_pages,
    max_blocks,
    sink_blocks,
    recent_blocks,
    score_programs,
    GROUP: tl.constexpr,
    REDUCE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_PROGRAM_P: tl.constexpr,
    PROGRAM_P: tl.constexpr,
    ONE_PROGRAM: tl.constexpr,
    TWO_LEVELS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """PROGRAM_P pages of one row and KV head: their reduction; the last to finish selects; grid (programs, pairs).

    With many pages the selection has two levels: of the spans of SPAN pages those with the highest maxima hold all
    pages that can be selected.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0)
    row_pages = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    programs = tl.maximum(tl.cdiv(row_pages, PROGRAM_P), 1)
    program = tl.program_id(0)
    if program < programs:
        padded_pages = (num_pages + 15) // 16 * 16
        scores_ptr += pair * padded_pages
        head_scores_ptr += pair * GROUP * padded_pages
        program_lse_ptr += pair * score_programs * GROUP
        maxima_ptr += pair * (tl.num_programs(0) * (PROGRAM_P // SPAN))
        spans_ptr += pair * max_blocks
        indices_ptr += pair * max_blocks
        if not ONE_PROGRAM:
            pages = program * PROGRAM_P + tl.arange(0, PROGRAM_P)
            if REDUCE == "softmax":
                scores = group_softmax(
                    head_scores_ptr,
                    program_lse_ptr,
                    pages,
                    row_pages,
                    padded_pages,
                    1 + tl.cdiv(tl.maximum(row_pages - 1, 0), SCORE_PROGRAM_P),
                    score_programs,
                    GROUP,
                    PROGRAM_P,
                    BLOCK_T,
                )
                tl.store(scores_ptr + pages, scores, mask=pages < padded_pages)
                keys = order_keys(scores, pages, row_pages, sink_blocks, recent_blocks)
            else:
                keys = load_order_keys(scores_ptr, pages, row_pages, sink_blocks, recent_blocks, True)
            if TWO_LEVELS:
                maxima = tl.max(tl.reshape(keys, (PROGRAM_P // SPAN, SPAN)), axis=1)
                spans = program * (PROGRAM_P // SPAN) + tl.arange(0, PROGRAM_P // SPAN)
                tl.store(maxima_ptr + spans, maxima)
        if ONE_PROGRAM or finished_last(finished_ptr + pair, programs):
            count = tl.minimum(row_pages, max_blocks)
            tl.store(counts_ptr + pair, count)
            lanes = tl.arange(0, BLOCK_N)
            if TWO_LEVELS:
                num_spans = tl.cdiv(row_pages, SPAN)
                span_keys = tl.load(maxima_ptr + lanes, mask=lanes < num_spans, other=-0x80000000, cache_modifier=".cg")
                kept_spans = tl.minimum(num_spans, max_blocks)
                # Where every kept span has a page that reaches this, `kept_spans` pages do.
                floor = write_top_blocks(
                    span_keys,
                    lanes,
                    -0x80000000,
                    scores_ptr,
                    spans_ptr,
                    num_spans,
                    kept_spans,
                    kept_spans,
                    0,
                    0,
                    BLOCK_N,
                    True,
                    True,
                )
                tl.debug_barrier()  # the other threads of this program read what was just written
                candidates = tl.arange(0, BLOCK_C)
                exists = candidates < kept_spans * SPAN
                span = tl.load(spans_ptr + candidates // SPAN, mask=exists, other=0)
                kept_pages = tl.where(exists, span * SPAN + candidates % SPAN, row_pages)
                page_keys = load_order_keys(scores_ptr, kept_pages, row_pages, sink_blocks, recent_blocks, False)
                num_candidates = tl.sum((kept_pages < row_pages).to(tl.int32))
                write_top_blocks(
                    page_keys,
                    kept_pages,
                    tl.where(kept_spans == count, floor, -0x80000000),
                    scores_ptr,
                    indices_ptr,
                    num_candidates,
                    count,
                    max_blocks,
                    sink_blocks,
                    recent_blocks,
                    BLOCK_C,
                    True,
                    False,
                )
            else:
                write_top_blocks(
                    load_order_keys(scores_ptr, lanes, row_pages, sink_blocks, recent_blocks, True),
                    lanes,
                    -0x80000000,
                    scores_ptr,
                    indices_ptr,
                    row_pages,
                    count,
                    max_blocks,
                    sink_blocks,
                    recent_blocks,
                    BLOCK_N,
                    ONE_TILE,
                    True,
                )


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
    sink_blocks: int = 0,
    recent_blocks: int = 1,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `append_and_score_kernel`, then `select_pages_kernel`; see `hf_sparse_attn_kernels.append_and_select`."""
    batch, q_heads, head_dim = query.shape
    kv_heads, max_pages = page_min.shape[1:3]
    pairs = batch * kv_heads
    group = q_heads // kv_heads
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()
    num_pages = max_pages if num_pages is None else num_pages
    if group == 1:
        group_reduce = "max"  # of one head all three keep the order
    softmax = group_reduce == "softmax"
    quantized = channel_exponent is not None
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_g = max(16, triton.next_power_of_2(group))
    # Two tiles of bounds at most 64 KiB together.
    block_p = max(16, min(OVERRIDE.get("block_p", 128), 32768 // (block_d * page_min.element_size())))
    # As few pages for each program as keep every multiprocessor busy, in whole tiles.
    per_program = triton.cdiv(num_pages * pairs, multiprocessors(query.device) * OVERRIDE.get("occupancy", 2))
    program_p = block_p * max(1, round(per_program / block_p))
    programs = 1 + triton.cdiv(num_pages, program_p)

    padded_pages = triton.cdiv(num_pages, 16) * 16
    scores = query.new_empty((pairs, padded_pages), dtype=torch.float32)
    head_scores, program_lse = scores, scores
    if softmax:
        head_scores = query.new_empty((pairs, group, padded_pages), dtype=torch.float32)
        program_lse = query.new_empty((pairs, group, programs), dtype=torch.float32)
    append_and_score_kernel[(programs, pairs)](
        query,
        new_key,
        new_value,
        keys,
        values,
        page_min,
        page_max,
        page_min if page_exponent is None else page_exponent,
        page_min if channel_exponent is None else channel_exponent,
        seq_start,
        seq_end,
        scores,
        head_scores,
        program_lse,
        scores if counter is None else counter,
        kv_heads,
        num_pages,
        max_pages,
        head_dim**-0.5 if scale is None else scale,
        *query.stride(),
        *new_key.stride()[:2],
        *new_value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *page_min.stride()[:3],
        *page_max.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        QUANTIZED=quantized,
        REDUCE=group_reduce,
        PAGE_SIZE=page_size,
        COUNT=counter is not None,
        PROGRAM_P=program_p,
        BLOCK_P=block_p,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        DOT_DTYPE=score_dtype(query, quantized),
        INTERPRETED=INTERPRET,
        num_warps=OVERRIDE.get("warps", 4),
        num_stages=OVERRIDE.get("stages", 3),
        **launch_options(query.device),
    )

    span = max(16, triton.next_power_of_2(triton.cdiv(num_pages, ONE_TILE_LIMIT)))
    block_c = triton.next_power_of_2(max_blocks) * span
    two_levels = num_pages > OVERRIDE.get("direct", DIRECT_LIMIT) and 2 * block_c <= num_pages
    select_p = max(REDUCED_BY_PROGRAM, span)
    select_programs = triton.cdiv(num_pages, select_p) if softmax or two_levels else 1
    block_n = max(128, triton.next_power_of_2(num_pages))
    if two_levels:
        block_n = max(128, triton.next_power_of_2(triton.cdiv(num_pages, span)))
    one_tile = block_n <= ONE_TILE_LIMIT
    if not one_tile:
        block_n = ONE_TILE_LIMIT
    indices = torch.empty((batch, kv_heads, max_blocks), dtype=torch.int32, device=query.device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=query.device)
    maxima = spans = indices
    if two_levels:
        maxima = torch.empty((pairs, select_programs * select_p // span), dtype=torch.int32, device=query.device)
        spans = torch.empty((pairs, max_blocks), dtype=torch.int32, device=query.device)
    if finished is None and (softmax or two_levels):
        finished = torch.zeros((batch, kv_heads), dtype=torch.int32, device=query.device)
    select_pages_kernel[(select_programs, pairs)](
        scores,
        head_scores,
        program_lse,
        maxima,
        spans,
        seq_start,
        seq_end,
        counts if finished is None else finished,
        indices,
        counts,
        kv_heads,
        num_pages,
        max_blocks,
        sink_blocks,
        recent_blocks,
        programs,
        GROUP=group,
        REDUCE=group_reduce,
        PAGE_SIZE=page_size,
        SCORE_PROGRAM_P=program_p,
        PROGRAM_P=select_p,
        ONE_PROGRAM=not (softmax or two_levels),
        TWO_LEVELS=two_levels,
        SPAN=span,
        BLOCK_T=triton.next_power_of_2(programs),
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        ONE_TILE=one_tile,
        num_warps=OVERRIDE.get("select_warps", 8 if block_n <= 2048 else 16),
        **launch_options(query.device),
    )
    return indices, counts
