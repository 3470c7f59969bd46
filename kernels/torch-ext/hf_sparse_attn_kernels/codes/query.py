"""Triton kernel that prepares a query for the scan of the codes: its parts of 8 bits, and its scores of the centres."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from . import UNITS

MOST_UNITS = tl.constexpr(UNITS)
ROTATED_AT_ONCE = tl.constexpr(32)  # channels of the query


@triton.jit
def to_units(x, unit):
    """Round to whole numbers of units; return them, and their high and low parts with x = 128 * high + low."""
    whole = tl.floor(x / unit + 0.5)
    high = tl.floor((whole + 64.0) * 0.0078125)
    return whole, high, whole - 128.0 * high


@triton.jit
def rotate_head(
    query_ptr,  # of the row and query head
    query_centre_ptr,  # of the pair
    rotation_ptr,
    parts_ptr,  # of the head: high, then low
    slope_ptr,  # of the head
    level_ptr,
    scale,
    query_stride_d,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate one query, less its centre, and store its parts, and the line from products of bits to scores."""
    dims = tl.arange(0, BLOCK_D)
    rotated = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.static_range(0, BLOCK_D, ROTATED_AT_ONCE):
        source = first + tl.arange(0, ROTATED_AT_ONCE)
        query = tl.load(query_ptr + source * query_stride_d, mask=source < HEAD_DIM, other=0.0).to(tl.float32)
        if OFFSETS:
            query -= tl.load(query_centre_ptr + source, mask=source < HEAD_DIM, other=0.0)
        mask = (dims < HEAD_DIM)[:, None] & (source < HEAD_DIM)[None, :]
        matrix = tl.load(rotation_ptr + dims[:, None] * HEAD_DIM + source[None, :], mask=mask, other=0.0)
        rotated += tl.sum(matrix * query[None, :], axis=1)
    unit = tl.maximum(tl.max(tl.abs(rotated)), 1e-30) / MOST_UNITS
    whole, high, low = to_units(rotated, unit)
    # Channel i * (HEAD_DIM // 8) + j meets bit i of byte j. The scan has BLOCK_B bytes, of which absent ones are 0.
    BYTES: tl.constexpr = HEAD_DIM // 8
    at = parts_ptr + dims // BYTES * BLOCK_B + dims % BYTES
    tl.store(at, high.to(tl.int8), mask=dims < HEAD_DIM)
    tl.store(at + 8 * BLOCK_B, low.to(tl.int8), mask=dims < HEAD_DIM)
    # With values v, the symbols are s = 2 v - (2 ** BITS - 1).
    tl.store(slope_ptr, 2.0 * unit * scale)
    tl.store(level_ptr, tl.sum(whole) * ((2**BITS - 1) * unit * scale))


@triton.jit
def score_centres(
    query_ptr,  # of the row and its first query head in the group
    centres_ptr,  # int8 [pairs, pages, HEAD_DIM], or 1 for pages if SHARED_CENTRE, like the next
    centre_scale_ptr,  # float16 [pairs, pages]
    page_scores_ptr,  # [pairs, pages, GROUP], -inf for absent heads and before the first page; written
    pair,
    page,  # [BLOCK_N], of the pair
    first_page,
    end,
    pages,
    scale,
    query_stride_h,
    query_stride_d,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARED_CENTRE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the scaled products of a group's queries with the centres of the pages before `end`."""
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, 2 * GROUP)  # high and low parts of each head
    mask = (dims < HEAD_DIM)[:, None] & (columns < 2 * HEADS)[None, :]
    at = query_ptr + columns[None, :] // 2 * query_stride_h + dims[:, None] * query_stride_d
    query = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(query), axis=0), 1e-30) / MOST_UNITS  # [2 * GROUP]
    _, high, low = to_units(query, unit[None, :])
    parts = tl.where((columns % 2 == 0)[None, :], high, low).to(tl.int8)
    centre = pair + page * 0 if SHARED_CENTRE else pair * pages + page
    at = centres_ptr + centre[:, None] * HEAD_DIM + dims[None, :]
    levels = tl.load(at, mask=(page < end)[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    products = tl.dot(levels, parts, out_dtype=tl.int32)
    high_product, low_product = tl.split(tl.reshape(products, (BLOCK_N, GROUP, 2)))
    unit, _ = tl.split(tl.reshape(unit, (GROUP, 2)))
    centre_scale = tl.load(centre_scale_ptr + centre, mask=page < end, other=0.0).to(tl.float32)
    scores = (high_product * 128 + low_product).to(tl.float32) * (unit * scale)[None, :] * centre_scale[:, None]
    heads = tl.arange(0, GROUP)
    scores = tl.where((page >= first_page)[:, None] & (heads < HEADS)[None, :], scores, float("-inf"))
    at = page_scores_ptr + (pair * pages + page)[:, None] * GROUP + heads[None, :]
    tl.store(at, scores, mask=(page < end)[:, None])


@triton.jit
def prepare_query(
    program,
    pair,
    scored,  # pages of the row before that of its newest token
    query_ptr,  # of the row and its first query head in the group
    query_centre_ptr,  # [pairs, HEAD_DIM]
    rotation_ptr,  # [HEAD_DIM, HEAD_DIM]
    centres_ptr,  # as for `score_centres`, like the next
    centre_scale_ptr,
    parts_ptr,  # int8 [pairs, 2 * GROUP, 8 * BLOCK_B], written like all below
    lines_ptr,  # [pairs, 2, GROUP]: slope and level
    page_scores_ptr,  # as for `score_centres`
    counter_ptr,
    pages,
    first_page,
    scale,
    query_stride_h,
    query_stride_d,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SHARED_CENTRE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Prepare a query head, the first HEADS programs of a pair, or score the centres of BLOCK_N pages, the others."""
    if program < HEADS:
        rotate_head(
            query_ptr + program * query_stride_h,
            query_centre_ptr + pair * HEAD_DIM,
            rotation_ptr,
            parts_ptr + (pair * GROUP + program) * (2 * 8 * BLOCK_B),
            lines_ptr + pair * (2 * GROUP) + program,
            lines_ptr + pair * (2 * GROUP) + GROUP + program,
            scale,
            query_stride_d,
            HEAD_DIM,
            BITS,
            OFFSETS,
            BLOCK_B,
            BLOCK_D,
        )
        if COUNT & (program == 0):
            PAGE_BYTES: tl.constexpr = PAGE_SIZE * (BITS * HEAD_DIM // 8 + 2 + 2 * OFFSETS)
            candidates = tl.maximum(scored - first_page, 0).to(tl.int64)
            centres = tl.minimum(candidates, 1) if SHARED_CENTRE else candidates
            tl.atomic_add(counter_ptr + 2, candidates * PAGE_BYTES + centres * (HEAD_DIM + 2), sem="relaxed")
    elif (program - HEADS) * BLOCK_N < scored:
        score_centres(
            query_ptr,
            centres_ptr,
            centre_scale_ptr,
            page_scores_ptr,
            pair,
            (program - HEADS) * BLOCK_N + tl.arange(0, BLOCK_N),
            first_page,
            scored,
            pages,
            scale,
            query_stride_h,
            query_stride_d,
            HEADS,
            GROUP,
            HEAD_DIM,
            SHARED_CENTRE,
            BLOCK_N,
            BLOCK_D,
        )


@triton.jit
def prepare_query_kernel(
    query_ptr,
    query_centre_ptr,  # as for `prepare_query`, like the next three
    rotation_ptr,
    centres_ptr,
    centre_scale_ptr,
    start_ptr,
    end_ptr,
    parts_ptr,  # as for `prepare_query`, like the next three
    lines_ptr,
    page_scores_ptr,
    counter_ptr,
    kv_heads,
    num_tokens,
    pages,
    first_page,
    scale,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SHARED_CENTRE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prepare the queries; grid (HEADS + tiles of pages, pairs)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.minimum(tl.load(end_ptr + row) - tl.load(start_ptr + row), num_tokens)
    prepare_query(
        tl.program_id(0),
        pair,
        tl.maximum(length - 1, 0) // PAGE_SIZE,
        query_ptr + row * query_stride_b + pair % kv_heads * HEADS * query_stride_h,
        query_centre_ptr,
        rotation_ptr,
        centres_ptr,
        centre_scale_ptr,
        parts_ptr,
        lines_ptr,
        page_scores_ptr,
        counter_ptr,
        pages,
        first_page,
        scale,
        query_stride_h,
        query_stride_d,
        HEADS,
        GROUP,
        HEAD_DIM,
        PAGE_SIZE,
        BITS,
        OFFSETS,
        SHARED_CENTRE,
        COUNT,
        BLOCK_N,
        BLOCK_B,
        BLOCK_D,
    )
