"""Program 0 of a decode step's first launch: the new token, its page's bounds, and that page's score."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .levels import channel_exponent_for, lower_level, page_exponent_for, power_of_two, upper_level


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
