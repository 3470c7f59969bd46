"""Triton kernels of `encode_keys`: one program codes a page."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._triton import launch_options, next_power_of_2, sum_of_products, wait_for_previous_kernel
from . import LEAST_HALF, MOST_HALF, STEP
from .rotation import rotation

LEAST_SCALE = tl.constexpr(LEAST_HALF)
LIMIT = tl.constexpr(MOST_HALF)
STEP_OF_2_BITS = tl.constexpr(STEP)
ROTATED_AT_ONCE = 32  # channels of the keys


@triton.jit
def store_centre(
    keys_ptr,  # of the page's first token
    keys_stride_n,
    levels_ptr,  # of the page, like the next
    scale_ptr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the levels and the scale of a page's mean; return the scale as the kernels read it."""
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.static_range(0, PAGE_SIZE, BLOCK_T):
        tokens = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
        at = keys_ptr + tokens[:, None] * keys_stride_n + dims[None, :]
        total += tl.sum(tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0).to(tl.float32), axis=0)
    mean = total / PAGE_SIZE
    scale = tl.minimum(tl.maximum(tl.max(tl.abs(mean)) / 127.0, LEAST_SCALE), LIMIT).to(tl.float16)
    tl.store(scale_ptr, scale)
    scale = scale.to(tl.float32)
    levels = tl.minimum(tl.maximum(tl.floor(mean / scale + 0.5), -127.0), 127.0)
    tl.store(levels_ptr + dims, levels.to(tl.int8), mask=dims < HEAD_DIM)
    return scale


@triton.jit
def rotate_residuals(
    keys_ptr,  # of the page's first token
    keys_stride_n,
    levels_ptr,
    first_token,
    scale,
    rotation_ptr,
    query_centre_ptr,  # of the pair
    HEAD_DIM: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the rotated residuals [BLOCK_T, 8 * BLOCK_B], and each residual's square and product with the centre.

    Column i * BLOCK_B + j is channel i * (HEAD_DIM // 8) + j; columns without a channel are 0.
    """
    BYTES: tl.constexpr = HEAD_DIM // 8
    tokens = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    columns = tl.arange(0, 8 * BLOCK_B)[None, :]
    channels = columns // BLOCK_B * BYTES + columns % BLOCK_B
    exists = columns % BLOCK_B < BYTES
    rotated = tl.zeros((BLOCK_T, 8 * BLOCK_B), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    offsets = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_K):
        dims = first + tl.arange(0, BLOCK_K)
        is_dim = dims < HEAD_DIM
        centre = tl.load(levels_ptr + dims, mask=is_dim, other=0).to(tl.float32) * scale
        at = keys_ptr + tokens * keys_stride_n + dims[None, :]
        residual = tl.load(at, mask=is_dim[None, :], other=0.0).to(tl.float32) - centre[None, :]
        squares += sum_of_products(residual, residual, 1)
        if OFFSETS:
            query_centre = tl.load(query_centre_ptr + dims, mask=is_dim, other=0.0)
            offsets += sum_of_products(residual, query_centre[None, :], 1)
        at = rotation_ptr + channels * HEAD_DIM + dims[:, None]
        matrix = tl.load(at, mask=exists & is_dim[:, None], other=0.0)
        rotated = tl.dot(residual, matrix, rotated, input_precision="tf32x3")
    return rotated, squares, offsets


@triton.jit
def store_codes(
    rotated,
    squares,
    codes_ptr,  # of the first token
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Store the codes of BLOCK_T tokens; return u.s and s.s, with their rotated residuals u and symbols s."""
    BYTES: tl.constexpr = HEAD_DIM // 8
    if BITS == 1:
        value = (rotated >= 0.0).to(tl.int32)
    else:
        unit = tl.maximum(tl.sqrt(squares / HEAD_DIM) * STEP_OF_2_BITS, 1e-30)
        steps = tl.floor(rotated / unit[:, None]) + 2.0
        value = tl.minimum(tl.maximum(steps, 0.0), 3.0).to(tl.int32)
    symbols = (2 * value - (2**BITS - 1)).to(tl.float32)
    bits = tl.arange(0, 8)[None, :, None]
    columns = tl.arange(0, BLOCK_B)[None, :]
    tokens = tl.arange(0, BLOCK_T)[:, None]
    by_bit = tl.reshape(value, (BLOCK_T, 8, BLOCK_B))
    for plane in tl.static_range(BITS):
        packed = tl.sum(((by_bit >> plane) & 1) << bits, axis=1)
        at = codes_ptr + (tokens * BITS + plane) * BYTES + columns
        tl.store(at, packed.to(tl.uint8), mask=columns < BYTES)
    if BITS == 1:
        symbol_squares = tl.full((BLOCK_T,), HEAD_DIM, tl.float32)
    else:
        exists = tl.arange(0, 8 * BLOCK_B)[None, :] % BLOCK_B < BYTES
        symbol_squares = tl.sum(tl.where(exists, symbols * symbols, 0.0), axis=1)
    return sum_of_products(rotated, symbols, 1), symbol_squares


@triton.jit
def encode_page(
    keys_ptr,  # of the page's first token
    keys_stride_n,
    codes_ptr,  # uint8 [pairs, pages * PAGE_SIZE, BITS, HEAD_DIM // 8]
    factors_ptr,  # float16 [pairs, pages * PAGE_SIZE, 1 + OFFSETS]
    centres_ptr,  # int8 [pairs, pages, HEAD_DIM], or 1 for pages if SHARED_CENTRE, like the next
    centre_scale_ptr,  # float16 [pairs, pages]
    query_centre_ptr,  # of the pair
    rotation_ptr,  # [HEAD_DIM, HEAD_DIM]
    pair,
    page,  # of all pairs' pages, an int64
    offset_scale,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SHARED_CENTRE: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Code one full page."""
    if SHARED_CENTRE:
        centres_ptr += pair * HEAD_DIM
        scale = tl.load(centre_scale_ptr + pair).to(tl.float32)
    else:
        centres_ptr += page * HEAD_DIM
        scale = store_centre(
            keys_ptr, keys_stride_n, centres_ptr, centre_scale_ptr + page, HEAD_DIM, PAGE_SIZE, BLOCK_T, BLOCK_D
        )
        tl.debug_barrier()  # other threads of this program read the levels that were just written
    for first in range(0, PAGE_SIZE, BLOCK_T):
        rotated, squares, offsets = rotate_residuals(
            keys_ptr,
            keys_stride_n,
            centres_ptr,
            first,
            scale,
            rotation_ptr,
            query_centre_ptr,
            HEAD_DIM,
            OFFSETS,
            BLOCK_T,
            BLOCK_B,
            BLOCK_K,
        )
        token = page * PAGE_SIZE + first
        along, symbol_squares = store_codes(
            rotated, squares, codes_ptr + token * (BITS * HEAD_DIM // 8), HEAD_DIM, BITS, BLOCK_T, BLOCK_B
        )
        factor = along / symbol_squares if LEAST_SQUARES else squares / tl.where(along > 0.0, along, 1.0)
        factor = tl.where(along > 0.0, tl.minimum(factor, LIMIT), 0.0)
        at = factors_ptr + (token + tl.arange(0, BLOCK_T)) * (1 + OFFSETS)
        tl.store(at, factor.to(tl.float16))
        if OFFSETS:
            offset = tl.minimum(tl.maximum(offsets * offset_scale, -LIMIT), LIMIT)
            tl.store(at + 1, offset.to(tl.float16))


@triton.jit
def encode_pages_kernel(
    keys_ptr,
    codes_ptr,  # as for `encode_page`, like the next three
    factors_ptr,
    centres_ptr,
    centre_scale_ptr,
    coded_ptr,  # int32 [pairs]
    query_centre_ptr,  # [pairs, HEAD_DIM]
    rotation_ptr,
    start_ptr,
    end_ptr,
    kv_heads,
    pages,
    offset_scale,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SHARED_CENTRE: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Code one page that has filled, if there is one; grid (most pages to code, pairs)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    start = tl.load(start_ptr + row)
    full_pages = tl.minimum(tl.maximum(tl.load(end_ptr + row) - start, 0) // PAGE_SIZE, pages)
    coded = tl.load(coded_ptr + pair)
    page = coded + tl.program_id(0)
    if page < full_pages:
        first_key = (start + page * PAGE_SIZE).to(tl.int64)
        encode_page(
            keys_ptr + row * keys_stride_b + pair % kv_heads * keys_stride_h + first_key * keys_stride_n,
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
            SHARED_CENTRE,
            LEAST_SQUARES,
            BLOCK_T,
            BLOCK_B,
            BLOCK_D,
            BLOCK_K,
        )
        if ONE_PAGE:
            tl.store(coded_ptr + pair, coded + 1)
    elif ONE_PAGE:
        tl.store(coded_ptr + pair, full_pages)


@triton.jit
def count_coded_kernel(
    coded_ptr,  # int32 [pairs]
    start_ptr,
    end_ptr,
    kv_heads,
    pages,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the pages that are coded now; grid (pairs,)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    full_pages = tl.minimum(tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0) // PAGE_SIZE, pages)
    tl.store(coded_ptr + pair, tl.minimum(full_pages, tl.load(coded_ptr + pair) + max_pages))


def encode_options(head_dim: int, page_size: int, max_pages: int) -> dict[str, int]:
    """Return the tiles of `encode_page` and the warps for them.

    In a decode step, with one page to code, the program is small: it nearly always has nothing to do, and must not take
    the room of others.
    """
    block_b = max(4, next_power_of_2(head_dim // 8))
    most = min(64, 1024 // block_b) if max_pages > 1 else 16
    return {
        "BLOCK_T": min(page_size & -page_size, most),  # divides the page
        "BLOCK_B": block_b,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_K": ROTATED_AT_ONCE,
        "num_warps": 4 if block_b <= 16 else 8,
        "num_stages": 2 if max_pages > 1 else 1,
    }


def encode_keys(
    keys: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    bits: int,
    correction: str,
    query_centre: torch.Tensor | None,
    shared_centre: bool,
    max_pages: int | None,
) -> None:
    """Launch `encode_pages_kernel`, and for more than one page a row the kernel that counts them."""
    check_triton("keys", keys)
    batch, kv_heads, _, head_dim = keys.shape
    pages = codes.shape[2] // page_size
    max_pages = pages if max_pages is None else min(max_pages, pages)
    pairs = batch * kv_heads
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    options = launch_options(keys.device)
    encode_pages_kernel[(max_pages, pairs)](
        keys,
        codes,
        factors,
        centres,
        centre_scale,
        coded,
        coded if query_centre is None else query_centre,
        rotation(head_dim, keys.device),
        *row_bounds,
        kv_heads,
        pages,
        head_dim**-0.5,
        *keys.stride()[:3],
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BITS=bits,
        OFFSETS=query_centre is not None,
        SHARED_CENTRE=shared_centre,
        LEAST_SQUARES=correction == "least_squares",
        ONE_PAGE=max_pages == 1,
        **encode_options(head_dim, page_size, max_pages),
        **options,
    )
    if max_pages > 1:
        count_coded_kernel[(pairs,)](
            coded, *row_bounds, kv_heads, pages, max_pages, PAGE_SIZE=page_size, num_warps=1, **options
        )
