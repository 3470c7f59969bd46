"""How a decode step appends its token: key and value, and the bounds of the token's page."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .levels import channel_exponent_for, lower_level, page_exponent_for, power_of_two, to_levels, upper_level
from .summaries import summarize_page


@triton.jit
def channel_exponents(
    channel_exponent_ptr,  # of the row and KV head
    new_key_ptr,
    key,  # float32 [BLOCK_D], as at `new_key_ptr`
    offset,  # of the token in its row
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the exponents of the channels, which a row's first token sets."""
    dims = tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    exponent = tl.load(channel_exponent_ptr + dims, mask=mask, other=0).to(tl.int32)
    if offset == 0:
        partner = tl.load(new_key_ptr + (dims + HEAD_DIM // 2) % HEAD_DIM, mask=mask, other=0.0)
        exponent = channel_exponent_for(tl.maximum(tl.abs(key), tl.abs(partner.to(tl.float32))))
        tl.store(channel_exponent_ptr + dims, exponent.to(tl.int8), mask=mask)
    return exponent


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
    """Write one token's key and value, and widen its page's minimum and maximum to include the key.

    Returns the bounds in levels, float32 [BLOCK_D] each, and the exponents of page and channels.
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
        exponent = channel_exponents(channel_exponent_ptr, new_key_ptr, lower, offset, HEAD_DIM, BLOCK_D)
        scaled = lower * power_of_two(-exponent)
        page_exponent = tl.maximum(page_exponent_for(tl.max(tl.abs(scaled))), old_page_exponent)
        tl.store(page_exponent_ptr, page_exponent.to(tl.int8))
        lower = lower_level(scaled * power_of_two(-page_exponent))
        upper = upper_level(scaled * power_of_two(-page_exponent))
        # Rounding outwards twice equals rounding once, so the bounds equal those of all keys at once.
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
def append_and_summarize(
    new_key_ptr,  # as for `append_token`, like all pointers here
    new_value_ptr,
    key_out_ptr,
    value_out_ptr,
    min_ptr,
    max_ptr,
    page_exponent_ptr,
    channel_exponent_ptr,
    offset,
    keys_stride_n,
    STATISTIC: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one token's key and value, and compute its page's bounds again from all of its keys.

    Returns the same as `append_token`.
    """
    dims = tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    key = tl.load(new_key_ptr + dims, mask=mask, other=0.0)
    tl.store(key_out_ptr + dims, key, mask=mask)
    tl.store(value_out_ptr + dims, tl.load(new_value_ptr + dims, mask=mask, other=0.0), mask=mask)
    tl.debug_barrier()  # all of the key is written before any of it is read
    before = offset % PAGE_SIZE  # tokens of the page before this one
    lower, upper = summarize_page(
        key_out_ptr - before.to(tl.int64) * keys_stride_n,
        before + 1,
        keys_stride_n,
        min_ptr.dtype.element_ty,
        STATISTIC,
        HEAD_DIM,
        PAGE_SIZE,
        SUMMED,
        BLOCK_D,
    )
    exponent = tl.zeros((BLOCK_D,), tl.int32)
    page_exponent = tl.zeros((), tl.int32)
    if QUANTIZED:
        key = key.to(tl.float32)
        exponent = channel_exponents(channel_exponent_ptr, new_key_ptr, key, offset, HEAD_DIM, BLOCK_D)
        lower, upper, page_exponent = to_levels(lower, upper, exponent)
        tl.store(page_exponent_ptr, page_exponent.to(tl.int8))
    tl.store(min_ptr + dims, lower.to(min_ptr.dtype.element_ty), mask=mask)
    tl.store(max_ptr + dims, upper.to(max_ptr.dtype.element_ty), mask=mask)
    return lower, upper, exponent, page_exponent
