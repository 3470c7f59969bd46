"""Triton kernel that prepares a query for the scan of the codes: rotates it, and scores the centres."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from .rotate import load_in_units, rotate_heads, whole_products

HEADS_AT_ONCE = 8
MOST_HEADS = tl.constexpr(HEADS_AT_ONCE)  # that a program rotates


@triton.jit
def score_centres(
    query_ptr,  # of the row and its first query head in the group
    centres_ptr,  # int8 [pairs, pages, HEAD_DIM], or 1 for pages if SHARED_CENTRE, like the next
    centre_scale_ptr,  # float16 [pairs, pages]
    page_scores_ptr,  # [pairs, pages, GROUP], -inf for absent heads and before the first page; written
    pair,
    first_tile,  # of BLOCK_N pages
    step,
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
    """Store the scaled products of a group's queries with the centres of each `step`-th tile of pages before `end`."""
    dims = tl.arange(0, BLOCK_D)
    heads = tl.arange(0, GROUP)
    parts, unit = load_in_units(
        query_ptr, query_ptr, query_stride_h, query_stride_d, HEADS, 2 * GROUP, HEAD_DIM, False, BLOCK_D
    )
    for tile in tl.range(first_tile, tl.cdiv(end, BLOCK_N), step):
        page = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        centre = pair + page * 0 if SHARED_CENTRE else pair * pages + page
        at = centres_ptr + centre[:, None] * HEAD_DIM + dims[None, :]
        levels = tl.load(at, mask=(page < end)[:, None] & (dims < HEAD_DIM)[None, :], other=0)
        centre_scale = tl.load(centre_scale_ptr + centre, mask=page < end, other=0.0).to(tl.float32)
        scores = whole_products(levels, parts) * (unit * scale)[None, :] * centre_scale[:, None]
        scores = tl.where((page >= first_page)[:, None] & (heads < HEADS)[None, :], scores, float("-inf"))
        at = page_scores_ptr + (pair * pages + page)[:, None] * GROUP + heads[None, :]
        tl.store(at, scores, mask=(page < end)[:, None])


@triton.jit
def prepare_query(
    program,
    programs,  # of the pair
    pair,
    scored,  # pages of the row before that of its newest token
    query_ptr,  # of the row and its first query head in the group
    query_centre_ptr,  # [pairs, HEAD_DIM]
    rotation_ptr,  # int8 [HEAD_DIM, HEAD_DIM]
    centres_ptr,  # as for `score_centres`, like the next
    centre_scale_ptr,
    parts_ptr,  # int8 [pairs, GROUP, BITS, 8 * BLOCK_B], written like all below
    slopes_ptr,  # [pairs, GROUP]
    page_scores_ptr,  # as for `score_centres`
    counter_ptr,
    pages,
    first_page,
    scale,
    rotation_unit,
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
    """Rotate query heads, the first programs of a pair, or score the centres of tiles of BLOCK_N pages, the others."""
    AT_ONCE: tl.constexpr = GROUP if GROUP < MOST_HEADS else MOST_HEADS
    ROTATING: tl.constexpr = GROUP // AT_ONCE
    if program < ROTATING:
        first_head = program * AT_ONCE
        rotate_heads(
            query_ptr + first_head * query_stride_h,
            query_centre_ptr + pair * HEAD_DIM,
            rotation_ptr,
            parts_ptr + (pair * GROUP + first_head) * (BITS * 8 * BLOCK_B),
            slopes_ptr + pair * GROUP + first_head,
            scale * rotation_unit,
            query_stride_h,
            query_stride_d,
            HEADS - first_head,
            AT_ONCE,
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
    else:
        score_centres(
            query_ptr,
            centres_ptr,
            centre_scale_ptr,
            page_scores_ptr,
            pair,
            program - ROTATING,
            programs - ROTATING,
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
    slopes_ptr,
    page_scores_ptr,
    counter_ptr,
    kv_heads,
    num_tokens,
    pages,
    first_page,
    scale,
    rotation_unit,
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
    """Prepare the queries; grid (programs that rotate + programs that score, pairs)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.minimum(tl.load(end_ptr + row) - tl.load(start_ptr + row), num_tokens)
    prepare_query(
        tl.program_id(0),
        tl.num_programs(0),
        pair,
        tl.maximum(length - 1, 0) // PAGE_SIZE,
        query_ptr + row * query_stride_b + pair % kv_heads * HEADS * query_stride_h,
        query_centre_ptr,
        rotation_ptr,
        centres_ptr,
        centre_scale_ptr,
        parts_ptr,
        slopes_ptr,
        page_scores_ptr,
        counter_ptr,
        pages,
        first_page,
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
        SHARED_CENTRE,
        COUNT,
        BLOCK_N,
        BLOCK_B,
        BLOCK_D,
    )
