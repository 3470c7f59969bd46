"""Scores of tiles of pages, and their reduction over the query heads of a group."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import sum_of_products
from .levels import exponent_for, levels_to_half, power_of_two


@triton.jit
def split_query(
    query_ptr,  # of the row and its first query head in the group
    channel_exponent_ptr,  # of the row and KV head
    group,
    query_stride_h,
    query_stride_d,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Split the queries into positive and negative parts, [BLOCK_G, BLOCK_D], in the units of the bounds.

    The third result is a factor for the scores.
    """
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < group)[:, None] & (dims < HEAD_DIM)[None, :]
    at = query_ptr + heads[:, None] * query_stride_h + dims[None, :] * query_stride_d
    q = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    unit = 1.0
    if QUANTIZED:
        exponent = tl.load(channel_exponent_ptr + dims, mask=dims < HEAD_DIM, other=0).to(tl.int32)
        q = q * power_of_two(exponent)[None, :]
        if tl.float16 == DOT_DTYPE:
            # Half precision has few exponents: scale the largest to 1, which loses only negligible values.
            shift = tl.minimum(tl.maximum(exponent_for(tl.max(tl.abs(q)), 0) + 6, -126), 126)
            q = q * power_of_two(-shift)
            unit = power_of_two(shift)
    return tl.maximum(q, 0.0).to(DOT_DTYPE), tl.minimum(q, 0.0).to(DOT_DTYPE), unit


@triton.jit
def store_scores(
    above,  # [BLOCK_G, BLOCK_D], the queries' positive part
    below,  # [BLOCK_G, BLOCK_D], their negative part
    min_ptr,  # of the row and KV head, like all pointers here
    max_ptr,
    page_exponent_ptr,
    first_page,
    last_page,
    min_stride_p,
    max_stride_p,
    factor,
    out_ptr,  # [num_pages]; for "softmax" [group, num_pages]
    lse_ptr,  # the log-sum-exp over these pages, one for each `lse_stride`, for "softmax" only
    lse_stride,
    group,
    num_pages,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    REDUCE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Store the scores of the pages from `first_page` to `last_page`, BLOCK_P at a time.

    A score is factor * sum_i max(q_i m_i, q_i M_i) = factor * (max(q, 0).M + min(q, 0).m). For "softmax" each head's
    scores and their log-sum-exp are stored, else the scores reduced over the group.
    """
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    in_group = heads < group
    # For every lane of the tiles, merged after the last tile.
    top = tl.full((BLOCK_G, BLOCK_P), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G, BLOCK_P), tl.float32)
    if QUANTIZED:
        # Loaded one tile ahead. Tiles are prefetched through shared memory, several ahead, but single bytes cannot be.
        pages = first_page + tl.arange(0, BLOCK_P)
        exponent = tl.load(page_exponent_ptr + pages, mask=pages < last_page, other=0).to(tl.int32)
    for first in range(first_page, last_page, BLOCK_P):
        pages = first + tl.arange(0, BLOCK_P)
        exists = pages < last_page
        if QUANTIZED:
            page_unit = power_of_two(exponent)
            exponent = tl.load(page_exponent_ptr + BLOCK_P + pages, mask=pages < last_page - BLOCK_P, other=0).to(
                tl.int32
            )
        mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
        pages64 = pages.to(tl.int64)[:, None]
        upper = tl.load(max_ptr + pages64 * max_stride_p + dims[None, :], mask=mask, other=0)
        lower = tl.load(min_ptr + pages64 * min_stride_p + dims[None, :], mask=mask, other=0)
        if QUANTIZED and tl.float16 == DOT_DTYPE:
            upper = levels_to_half(upper, INTERPRET)
            lower = levels_to_half(lower, INTERPRET)
        scores = tl.dot(above, tl.trans(upper.to(DOT_DTYPE)), input_precision="ieee")
        scores = tl.dot(below, tl.trans(lower.to(DOT_DTYPE)), scores, input_precision="ieee")  # [BLOCK_G, BLOCK_P]
        if QUANTIZED:
            scores = scores * page_unit[None, :]
        scores = scores * factor
        if REDUCE == "softmax":
            at = out_ptr + heads[:, None] * num_pages + pages[None, :]
            tl.store(at, scores, mask=in_group[:, None] & exists[None, :])
            new_top = tl.where(exists[None, :], tl.maximum(top, scores), top)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - shift) + tl.where(exists[None, :], tl.exp(scores - shift), 0.0)
            top = new_top
        elif REDUCE == "mean":
            reduced = tl.sum(tl.where(in_group[:, None], scores, 0.0), axis=0) / group
            tl.store(out_ptr + pages, reduced, mask=exists)
        else:
            reduced = tl.max(tl.where(in_group[:, None], scores, float("-inf")), axis=0)
            tl.store(out_ptr + pages, reduced, mask=exists)
    if REDUCE == "softmax":
        best = tl.max(top, axis=1)
        shift = tl.where(best == float("-inf"), 0.0, best)
        sums = sum_of_products(total, tl.exp(top - shift[:, None]), 1)
        lse = tl.where(sums > 0, shift + tl.log(tl.where(sums > 0, sums, 1.0)), float("-inf"))
        tl.store(lse_ptr + heads * lse_stride, lse, mask=in_group)


@triton.jit
def group_softmax(
    head_scores_ptr,  # of the row and KV head: [group, num_pages]
    lse_ptr,  # of the row and KV head: [group, lse_stride], the log-sum-exp over each part of the pages
    pages,  # [BLOCK_P]
    last_page,
    num_pages,
    parts,
    lse_stride,
    GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute log sum_h exp(s_h(p) - lse_h), [BLOCK_P], with lse_h over all parts; -inf from `last_page` on.

    Logarithms keep pages far below the best from underflowing and tying.
    """
    lanes = tl.arange(0, BLOCK_T)
    # The mask changes only at multiples of 16, which keeps the loads vectorized; scores are padded to that.
    mask = pages < (last_page + 15) // 16 * 16
    best = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_P,), tl.float32)
    for head in tl.static_range(GROUP):
        scores = tl.load(head_scores_ptr + head * num_pages + pages, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(
            lse_ptr + head * lse_stride + lanes, mask=lanes < parts, other=float("-inf"), cache_modifier=".cg"
        )
        top = tl.max(part)
        top = tl.where(top == float("-inf"), 0.0, top)
        scores -= top + tl.log(tl.maximum(tl.sum(tl.exp(part - top)), 1e-30))
        new_best = tl.maximum(best, scores)
        total = total * tl.exp(best - new_best) + tl.exp(scores - new_best)
        best = new_best
    return tl.where(pages < last_page, best + tl.log(total), float("-inf"))
