"""Statistics of the keys of a page other than minimum and maximum.

Sums over tokens and channels are pairwise, whatever the layout, so they agree with the reference to the bit.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from typing import Any

import triton
import triton.language as tl

from . import REPRESENTATIVES, SUMMED_AS_TREE

NUM_CHOSEN = tl.constexpr(REPRESENTATIVES)
MAX_HALVINGS = tl.constexpr(8)  # of 32 tokens or 256 channels


def summary_options(statistic: str, page_size: int) -> dict[str, Any]:
    """Return the launch arguments of a kernel that calls `summarize_page`, or that bounds keys exactly."""
    options: dict[str, Any] = {"STATISTIC": statistic, "SUMMED": min(page_size, SUMMED_AS_TREE)}
    if statistic == "representative":
        options["enable_fp_fusion"] = False  # products are rounded before they are added, as in the reference
    return options


@triton.jit
def sum_tokens(x):
    """Sum `x` [tokens, channels] over the tokens, first half and second half, again and again: [channels]."""
    for _ in tl.static_range(MAX_HALVINGS):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), axis=0)
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def sum_channels(x):
    """Sum `x` [tokens, channels] over the channels in the same way: [tokens]."""
    for _ in tl.static_range(MAX_HALVINGS):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), axis=1)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def load_keys(page_ptr, first, count, keys_stride_n, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr, DIMS: tl.constexpr):
    """Load TOKENS keys of a page from its token `first` on, float32 [TOKENS, DIMS], 0 from token `count` on."""
    tokens = (first + tl.arange(0, TOKENS))[:, None]
    dims = tl.arange(0, DIMS)[None, :]
    mask = (tokens < count) & (dims < HEAD_DIM)
    return tl.load(page_ptr + tokens.to(tl.int64) * keys_stride_n + dims, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def cuboid_mean(
    page_ptr,
    count,
    keys_stride_n,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return c - delta and c + delta: c halfway between minimum and maximum, delta the mean of |c - k|."""
    lanes = tl.arange(0, SUMMED)[:, None]
    lower = tl.full((BLOCK_D,), float("inf"), tl.float32)
    upper = tl.full((BLOCK_D,), float("-inf"), tl.float32)
    for first in range(0, PAGE_SIZE, SUMMED):
        keys = load_keys(page_ptr, first, count, keys_stride_n, HEAD_DIM, SUMMED, BLOCK_D)
        lower = tl.minimum(lower, tl.min(tl.where(first + lanes < count, keys, float("inf")), axis=0))
        upper = tl.maximum(upper, tl.max(tl.where(first + lanes < count, keys, float("-inf")), axis=0))
    centre = lower * 0.5 + upper * 0.5
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, PAGE_SIZE, SUMMED):
        keys = load_keys(page_ptr, first, count, keys_stride_n, HEAD_DIM, SUMMED, BLOCK_D)
        total += sum_tokens(tl.where(first + lanes < count, tl.abs(centre[None, :] - keys), 0.0))
    deviation = tl.div_rn(total, count.to(tl.float32))
    return centre - deviation, centre + deviation


@triton.jit
def representative(
    page_ptr,
    count,
    keys_stride_n,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the mean of the keys with the greatest k.m, m the mean of the page's keys."""
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, PAGE_SIZE, SUMMED):
        total += sum_tokens(load_keys(page_ptr, first, count, keys_stride_n, HEAD_DIM, SUMMED, BLOCK_D))
    mean = tl.div_rn(total, count.to(tl.float32))
    firsts = tl.arange(0, PAGE_SIZE // SUMMED)[:, None] * SUMMED
    tokens = firsts + tl.arange(0, SUMMED)[None, :]  # [PAGE_SIZE / SUMMED, SUMMED]
    products = tl.full((PAGE_SIZE // SUMMED, SUMMED), float("-inf"), tl.float32)
    for first in range(0, PAGE_SIZE, SUMMED):
        keys = load_keys(page_ptr, first, count, keys_stride_n, HEAD_DIM, SUMMED, BLOCK_D)
        products = tl.where(firsts == first, sum_channels(keys * mean[None, :])[None, :], products)
    products = tl.where(products == products, products, float("-inf"))
    is_left = tokens < count
    total = tl.zeros((BLOCK_D,), tl.float32)
    for _ in tl.static_range(NUM_CHOSEN):
        best = tl.max(tl.where(is_left, products, float("-inf")))
        token = tl.min(tl.where(is_left & (products == best), tokens, PAGE_SIZE))  # PAGE_SIZE: none is left
        key_ptr = page_ptr + token.to(tl.int64) * keys_stride_n + dims
        total += tl.load(key_ptr, mask=dims < tl.where(token < PAGE_SIZE, HEAD_DIM, 0), other=0.0).to(tl.float32)
        is_left = is_left & (tokens != token)
    return tl.div_rn(total, tl.minimum(count, NUM_CHOSEN).to(tl.float32))


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round float32 `x` to the nearest value of DTYPE, as float32."""
    if tl.bfloat16 == DTYPE:  # by its bits: Triton's interpreter would round to zero
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & -65536).to(tl.float32, bitcast=True)
    else:
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def summarize_page(
    page_ptr,  # of the page's first token
    count,  # number of its tokens, at least 1; more than PAGE_SIZE for a full page
    keys_stride_n,
    BOUNDS_DTYPE: tl.constexpr,
    STATISTIC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return lower and upper bounds, float32 [BLOCK_D] each, rounded to their dtype unless that is int8."""
    count = tl.minimum(count, PAGE_SIZE)
    if STATISTIC == "cuboid_mean":
        lower, upper = cuboid_mean(page_ptr, count, keys_stride_n, HEAD_DIM, PAGE_SIZE, SUMMED, BLOCK_D)
    else:
        lower = representative(page_ptr, count, keys_stride_n, HEAD_DIM, PAGE_SIZE, SUMMED, BLOCK_D)
        upper = lower
    if tl.int8 != BOUNDS_DTYPE:
        lower = rounded(lower, BOUNDS_DTYPE)
        upper = rounded(upper, BOUNDS_DTYPE)
    return lower, upper
