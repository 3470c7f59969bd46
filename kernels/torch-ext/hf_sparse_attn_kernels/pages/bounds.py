"""Triton kernels of `page_bounds`: bounds of the keys of a page, in their dtype or in 8 bits."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._triton import cdiv, next_power_of_2
from .levels import channel_exponent_for, to_levels
from .summaries import summarize_page, summary_options

TOKENS_PER_PROGRAM = 256


@triton.jit
def largest_keys_kernel(
    keys_ptr,
    start_ptr,
    end_ptr,
    largest_ptr,  # int32 [batch * kv_heads, head_dim]: the bits of a non-negative float32, which order as it does
    kv_heads,
    num_new,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Reduce the largest |k| of each channel over TOKENS of a row's new tokens; grid (token chunks, pairs)."""
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    start = tl.load(start_ptr + row)
    length = tl.load(end_ptr + row) - start
    first = tl.maximum(length - num_new, 0) + tl.program_id(0) * TOKENS
    if first < length:
        dims = tl.arange(0, BLOCK_D)
        base = keys_ptr + row * keys_stride_b + (pair % kv_heads) * keys_stride_h
        largest = tl.zeros((BLOCK_D,), tl.float32)
        for chunk in range(0, TOKENS, BLOCK_N):
            offsets = first + chunk + tl.arange(0, BLOCK_N)
            positions = (start + offsets).to(tl.int64)
            mask = (offsets < length)[:, None] & (dims < HEAD_DIM)[None, :]
            tile = tl.load(base + positions[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(tile.to(tl.float32)), axis=0))
        tl.atomic_max(largest_ptr + pair * HEAD_DIM + dims, largest.to(tl.int32, bitcast=True), mask=dims < HEAD_DIM)


@triton.jit
def channel_exponents_kernel(
    largest_ptr,  # [batch * kv_heads, head_dim]
    channel_exponent_ptr,  # [batch * kv_heads, head_dim]
    raised_ptr,  # int32 [batch * kv_heads]: whether existing pages must be quantized again
    start_ptr,
    end_ptr,
    kv_heads,
    num_new,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Set the exponents of entirely new rows, raise those of other rows; grid (pairs,)."""
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    length = tl.load(end_ptr + row) - tl.load(start_ptr + row)
    if length > 0:
        dims = tl.arange(0, BLOCK_D)
        mask = dims < HEAD_DIM
        largest_ptr += pair * HEAD_DIM
        channel_exponent_ptr += pair * HEAD_DIM
        own = tl.load(largest_ptr + dims, mask=mask, other=0)
        partner = tl.load(largest_ptr + (dims + HEAD_DIM // 2) % HEAD_DIM, mask=mask, other=0)
        needed = channel_exponent_for(tl.maximum(own, partner).to(tl.float32, bitcast=True))
        old = tl.load(channel_exponent_ptr + dims, mask=mask, other=127).to(tl.int32)
        has_older = length > num_new
        exponent = tl.where(has_older, tl.maximum(old, needed), needed)
        tl.store(channel_exponent_ptr + dims, exponent.to(tl.int8), mask=mask)
        raised = has_older & (tl.max(tl.where(mask & (exponent > old), 1, 0)) > 0)
        tl.store(raised_ptr + pair, raised.to(tl.int32))


@triton.jit
def page_bounds_kernel(
    keys_ptr,
    min_ptr,
    max_ptr,
    page_exponent_ptr,  # [batch * kv_heads, max_pages], for QUANTIZED only, like the two below
    channel_exponent_ptr,  # [batch * kv_heads, head_dim]
    raised_ptr,  # [batch * kv_heads]
    start_ptr,
    end_ptr,
    kv_heads,
    num_new,
    max_pages,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    min_stride_b,
    min_stride_h,
    min_stride_p,
    max_stride_b,
    max_stride_h,
    max_stride_p,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ONE_NEW: tl.constexpr,
    STATISTIC: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Update one page of a row and KV head: a touched one, or any if exponents were raised; grid (pages, pairs)."""
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    start = tl.load(start_ptr + row)
    length = tl.load(end_ptr + row) - start
    first_page = tl.maximum(length - num_new, 0) // PAGE_SIZE
    if QUANTIZED and not ONE_NEW:
        first_page = tl.where(tl.load(raised_ptr + pair) != 0, 0, first_page)
    page = first_page + tl.program_id(0)
    if (page * PAGE_SIZE < length) & (page < max_pages):
        dims = tl.arange(0, BLOCK_D)
        dim_mask = dims < HEAD_DIM
        base = keys_ptr + row * keys_stride_b + head * keys_stride_h
        if STATISTIC == "minmax":
            lower = tl.full((BLOCK_D,), float("inf"), tl.float32)
            upper = tl.full((BLOCK_D,), float("-inf"), tl.float32)
            for chunk in range(0, PAGE_SIZE, BLOCK_N):
                offsets = page * PAGE_SIZE + chunk + tl.arange(0, BLOCK_N)
                positions = (start + offsets).to(tl.int64)
                mask = (offsets < length)[:, None] & dim_mask[None, :]
                tile = tl.load(base + positions[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
                tile = tile.to(tl.float32)  # [BLOCK_N, BLOCK_D]
                lower = tl.minimum(lower, tl.min(tl.where(mask, tile, float("inf")), axis=0))
                upper = tl.maximum(upper, tl.max(tl.where(mask, tile, float("-inf")), axis=0))
        else:
            first = page * PAGE_SIZE
            lower, upper = summarize_page(
                base + (start + first).to(tl.int64) * keys_stride_n,
                length - first,
                keys_stride_n,
                min_ptr.dtype.element_ty,
                STATISTIC,
                HEAD_DIM,
                PAGE_SIZE,
                SUMMED,
                BLOCK_D,
            )
        if QUANTIZED:
            channel = channel_exponent_ptr + pair * HEAD_DIM + dims
            exponent = tl.load(channel, mask=dim_mask, other=0).to(tl.int32)
            if ONE_NEW and length == 1:  # a row's first token, which equals its bounds, sets the exponents
                partner_at = base + start.to(tl.int64) * keys_stride_n + (dims + HEAD_DIM // 2) % HEAD_DIM
                partner = tl.load(partner_at, mask=dim_mask, other=0.0).to(tl.float32)
                exponent = channel_exponent_for(tl.maximum(tl.abs(lower), tl.abs(partner)))
                tl.store(channel, exponent.to(tl.int8), mask=dim_mask)
            lower = tl.where(dim_mask, lower, 0.0)
            upper = tl.where(dim_mask, upper, 0.0)
            lower, upper, page_exponent = to_levels(lower, upper, exponent)
            tl.store(page_exponent_ptr + pair * max_pages + page, page_exponent.to(tl.int8))
        page64 = page.to(tl.int64)
        min_out = min_ptr + row * min_stride_b + head * min_stride_h + page64 * min_stride_p + dims
        max_out = max_ptr + row * max_stride_b + head * max_stride_h + page64 * max_stride_p + dims
        tl.store(min_out, lower.to(min_ptr.dtype.element_ty), mask=dim_mask)
        tl.store(max_out, upper.to(max_ptr.dtype.element_ty), mask=dim_mask)


def page_bounds(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    num_new: int,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    statistic: str,
) -> None:
    """Launch `page_bounds_kernel`, after the two exponent kernels for several new tokens in 8 bits."""
    check_triton("keys", keys)
    if num_new == 0:
        return
    batch, kv_heads, capacity, head_dim = keys.shape
    pairs = batch * kv_heads
    max_pages = page_min.shape[2]
    num_new = min(num_new, capacity)
    # The maximum number of pages that num_new consecutive tokens can touch.
    pages = min((num_new + page_size - 2) // page_size + 1, max_pages)
    block_d = max(16, next_power_of_2(head_dim))
    block_n = min(page_size, max(1, 8192 // block_d))
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()
    raised = seq_start
    if channel_exponent is not None and num_new > 1:
        pages = max_pages  # needed if exponents are raised; otherwise the other programs exit at once
        scratch = torch.zeros((pairs, head_dim + 1), dtype=torch.int32, device=keys.device)
        largest, raised = scratch.view(-1)[:-pairs].view(pairs, head_dim), scratch.view(-1)[-pairs:]
        largest_keys_kernel[(cdiv(num_new, TOKENS_PER_PROGRAM), pairs)](
            keys,
            seq_start,
            seq_end,
            largest,
            kv_heads,
            num_new,
            *keys.stride()[:3],
            HEAD_DIM=head_dim,
            TOKENS=TOKENS_PER_PROGRAM,
            BLOCK_N=max(1, min(64, 8192 // block_d)),
            BLOCK_D=block_d,
            num_warps=4,
        )
        channel_exponents_kernel[(pairs,)](
            largest,
            channel_exponent,
            raised,
            seq_start,
            seq_end,
            kv_heads,
            num_new,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            num_warps=1,
        )
    page_bounds_kernel[(pages, pairs)](
        keys,
        page_min,
        page_max,
        page_min if page_exponent is None else page_exponent,
        page_min if channel_exponent is None else channel_exponent,
        raised,
        seq_start,
        seq_end,
        kv_heads,
        num_new,
        max_pages,
        *keys.stride()[:3],
        *page_min.stride()[:3],
        *page_max.stride()[:3],
        HEAD_DIM=head_dim,
        QUANTIZED=channel_exponent is not None,
        ONE_NEW=num_new == 1,
        PAGE_SIZE=page_size,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=4,
        **summary_options(statistic, page_size),
    )
