"""Triton kernel that scans the codes, whose bits stay packed until they are operands of a product."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from . import MOST_HALF

LN_2 = tl.constexpr(0.6931471805599453)
LIMIT = tl.constexpr(MOST_HALF)
SLICE = tl.constexpr(16)  # tokens that lie in one page


@triton.jit
def bit_of_bytes(codes, BIT: tl.constexpr, PLANE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return bit BIT of every byte as int8: 0 or 2 ** PLANE."""
    if INTERPRETED:
        return (((codes >> BIT) & 1) << PLANE).to(tl.int8)
    # Four bytes at a time. The mask removes what the rotation moves from one byte to the next.
    mask: tl.constexpr = "0x01010101" if PLANE == 0 else "0x02020202"
    asm: tl.constexpr = f"{{ .reg .b32 t; shf.r.wrap.b32 t, $1, $1, {(BIT - PLANE) % 32}; and.b32 $0, t, {mask}; }}"
    return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def fast_exp2(x, INTERPRETED: tl.constexpr):
    """Return 2 ** x within 2 units in the last place, 0 below 2 ** -126: one instruction."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fast_log2(x, INTERPRETED: tl.constexpr):
    """Return the logarithm of x >= 1 within 2 ** -22: one instruction."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def estimate_tile(
    codes_ptr,  # of the pair, like all below
    factors_ptr,
    page_scores_ptr,
    parts,  # tuple of int8 [TOKENS * BLOCK_B, TOKENS * 2 * GROUP]: the query's parts, by the bit that they meet
    slope,  # [1, GROUP]
    level,  # [1, GROUP]
    offset_scale,
    first,
    end,
    capacity,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Estimate the scaled scores of BLOCK_T tokens, [BLOCK_T, GROUP]; -inf from `end` on, and for absent heads."""
    tokens = first + tl.arange(0, BLOCK_T)
    # A line holds the bytes of TOKENS tokens, DEPTH in all, as deep as a product of bytes must be.
    DEPTH: tl.constexpr = TOKENS * BLOCK_B
    lines = first // TOKENS + tl.arange(0, BLOCK_T // TOKENS)[:, None]
    columns = tl.arange(0, DEPTH)[None, :]
    products = tl.zeros((BLOCK_T // TOKENS, TOKENS * 2 * GROUP), tl.int32)
    for bit_plane in tl.static_range(BITS):
        mask = lines * TOKENS < capacity
        if (BITS == 1) & (BYTES == BLOCK_B):
            at = codes_ptr + lines.to(tl.int64) * DEPTH + columns
        else:
            token_of_line = columns // BLOCK_B
            at = codes_ptr + (lines.to(tl.int64) * TOKENS + token_of_line) * (BITS * BYTES) + bit_plane * BYTES
            at += columns % BLOCK_B
            if BYTES < BLOCK_B:
                mask = mask & (columns % BLOCK_B < BYTES)
        codes = tl.load(at, mask=mask, other=0)
        for bit in tl.static_range(8):
            bits = bit_of_bytes(codes, bit, bit_plane, INTERPRETED)
            products = tl.dot(bits, parts[bit], products, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(products, (BLOCK_T, GROUP, 2)))
    sums = (high * 128 + low).to(tl.float32) * slope - level
    # A page that is not coded yet may hold anything.
    words = tl.load(factors_ptr + tokens, mask=tokens < end, other=0)
    if OFFSETS:
        factor = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        estimates = sums * factor[:, None] + (offset * offset_scale)[:, None]
    else:
        estimates = sums * words.to(tl.float32)[:, None]
    first_tokens = first + tl.arange(0, BLOCK_T // SLICE) * SLICE
    at = page_scores_ptr + (first_tokens // PAGE_SIZE * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    of_pages = tl.load(at, mask=(first_tokens < end)[:, None], other=float("-inf"))
    estimates = tl.reshape(estimates, (BLOCK_T // SLICE, SLICE, GROUP)) + of_pages[:, None, :]
    return tl.reshape(estimates, (BLOCK_T, GROUP))


@triton.jit
def load_lse(
    program_lse_ptr,  # of the pair
    programs,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Return the log-sum-exp of every head over all programs [1, GROUP], base 2."""
    program = tl.arange(0, BLOCK_P)[:, None]
    heads = tl.arange(0, GROUP)[None, :]
    mask = (program < programs) & (heads < HEADS)
    lse = tl.load(program_lse_ptr + program * GROUP + heads, mask=mask, other=-1e30)
    greatest = tl.max(lse, axis=0)
    return (greatest + tl.log2(tl.sum(tl.exp2(lse - greatest[None, :]), axis=0)))[None, :]


@triton.jit
def scan_codes_kernel(
    codes_ptr,  # uint8 [pairs, capacity, BITS, BYTES]
    factors_ptr,  # [pairs, capacity]: int32 words of factor and offset, or float16 factors
    parts_ptr,  # int8 [pairs, 2 * GROUP, 8 * BLOCK_B]
    lines_ptr,  # [pairs, 2, GROUP]: slope and level
    page_scores_ptr,  # [pairs, capacity / PAGE_SIZE, GROUP], -inf for absent heads
    program_lse_ptr,  # [pairs, programs, GROUP], base 2; written for "lse", read for "softmax"
    start_ptr,
    end_ptr,
    scores_ptr,  # float16 [pairs, num_tokens], not for "lse"
    kv_heads,
    num_tokens,
    capacity,
    tokens_per_program,
    offset_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    OFFSETS: tl.constexpr,
    RESULT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Estimate `tokens_per_program` tokens of a row and KV head; grid (programs, pairs).

    RESULT is "max", or "lse" and then "softmax": for each head the log-sum-exp of the program's estimates, then the
    estimates reduced with all of them.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.minimum(tl.load(end_ptr + row) - tl.load(start_ptr + row), num_tokens)
    end = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    begin = tl.program_id(0) * tokens_per_program
    stop = tl.minimum(begin + tokens_per_program, num_tokens)
    codes_ptr += pair * capacity * (BITS * BYTES)
    factors_ptr += pair * capacity
    page_scores_ptr += pair * (capacity // PAGE_SIZE * GROUP)
    program_lse_ptr += pair * tl.num_programs(0) * GROUP
    scores_ptr += pair * num_tokens
    heads = tl.arange(0, GROUP)
    # One block for each token of a line, so that each meets its own bytes.
    depth = tl.arange(0, TOKENS * BLOCK_B)[:, None]
    columns = tl.arange(0, TOKENS * 2 * GROUP)[None, :]
    at = parts_ptr + pair * (2 * GROUP * 8 * BLOCK_B) + columns % (2 * GROUP) * (8 * BLOCK_B) + depth % BLOCK_B
    parts = ()
    for bit in tl.static_range(8):
        is_own = depth // BLOCK_B == columns // (2 * GROUP)
        parts += (tl.load(at + bit * BLOCK_B, mask=is_own, other=0),)  # type: ignore[assignment]
    lines_ptr += pair * (2 * GROUP)
    slope = tl.load(lines_ptr + heads, mask=heads < HEADS, other=0.0)[None, :]
    level = tl.load(lines_ptr + GROUP + heads, mask=heads < HEADS, other=0.0)[None, :]
    if RESULT == "lse":
        most = tl.full((BLOCK_T, GROUP), -1e30, tl.float32)
        total = tl.zeros((BLOCK_T, GROUP), tl.float32)
        for first in range(begin, tl.minimum(stop, end), BLOCK_T):
            z = estimate_tile(
                codes_ptr,
                factors_ptr,
                page_scores_ptr,
                parts,
                slope,
                level,
                offset_scale,
                first,
                end,
                capacity,
                PAGE_SIZE,
                GROUP,
                BITS,
                BYTES,
                OFFSETS,
                BLOCK_T,
                BLOCK_B,
                TOKENS,
                INTERPRETED,
            )
            # One of the two exponentials of a running sum is always 1.
            ratio = fast_exp2(-tl.abs(z - most), INTERPRETED)
            total = tl.where(z > most, total * ratio + 1.0, total + ratio)
            most = tl.maximum(most, z)
        if begin < end:
            greatest = tl.max(most, axis=0)
            sums = tl.sum(total * tl.exp2(most - greatest[None, :]), axis=0)
            program_lse = greatest + tl.log2(tl.maximum(sums, 1e-30))  # absent heads have a sum of 0
            tl.store(program_lse_ptr + tl.program_id(0) * GROUP + heads, program_lse)
    else:
        if RESULT == "softmax":
            lse = load_lse(program_lse_ptr, tl.cdiv(end, tokens_per_program), HEADS, GROUP, BLOCK_P)
        for first in range(begin, stop, BLOCK_T):
            z = estimate_tile(
                codes_ptr,
                factors_ptr,
                page_scores_ptr,
                parts,
                slope,
                level,
                offset_scale,
                first,
                end,
                capacity,
                PAGE_SIZE,
                GROUP,
                BITS,
                BYTES,
                OFFSETS,
                BLOCK_T,
                BLOCK_B,
                TOKENS,
                INTERPRETED,
            )
            if RESULT == "softmax":
                z -= lse
                reduced = tl.maximum(tl.max(z, axis=1), -1e30)  # not -inf, from `end` on
                total = tl.sum(fast_exp2(z - reduced[:, None], INTERPRETED), axis=1)
                reduced = (reduced + fast_log2(total, INTERPRETED)) * LN_2
            else:
                reduced = tl.max(z, axis=1)
            tokens = first + tl.arange(0, BLOCK_T)
            # -inf for all heads: before the first page, or from `end` on.
            reduced = tl.where(reduced > float("-inf"), tl.minimum(tl.maximum(reduced, -LIMIT), LIMIT), float("-inf"))
            tl.store(scores_ptr + tokens, reduced.to(tl.float16), mask=tokens < stop)
