"""Triton kernel that scans the codes, whose bits stay packed until they are operands of a product."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import prefetch, wait_for_previous_kernel
from . import MOST_HALF

LN_2 = tl.constexpr(0.6931471805599453)
LIMIT = tl.constexpr(MOST_HALF)
SLICE = tl.constexpr(16)  # tokens that lie in one page
PLACE = tl.constexpr(6)  # of a bit in its byte: of a value's highest bit, the highest place without a sign


@triton.jit
def bit_of_bytes(codes, BIT: tl.constexpr, PLACE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return bit BIT of every byte as int8: 0 or 2 ** PLACE."""
    if INTERPRETED:
        return (((codes >> BIT) & 1) << PLACE).to(tl.int8)
    # Four bytes at a time. The mask removes what the shift moves from one byte to the next. The compiler may take a
    # product for a shift to the left, so that not all work falls to one of the two kinds of units.
    shift: tl.constexpr = f"shl.b32 t, $1, {PLACE - BIT};" if PLACE >= BIT else f"shr.b32 t, $1, {BIT - PLACE};"
    asm: tl.constexpr = f"{{ .reg .b32 t; {shift} and.b32 $0, t, {(1 << PLACE) * 0x01010101}; }}"
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
def to_finite_half(x, INTERPRETED: tl.constexpr):
    """Round to float16, limited to its finite range, two numbers at a time."""
    if INTERPRETED:
        return tl.minimum(tl.maximum(x, -LIMIT), LIMIT).to(tl.float16)
    asm: tl.constexpr = "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def estimate_tile(
    codes_ptr,  # of the pair, like all below
    factors_ptr,
    page_scores_ptr,
    high_parts,  # tuple of int8 [TOKENS * BLOCK_B, TOKENS * GROUP]: the query's parts, by the bit that they meet
    low_parts,
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
    WHOLE: tl.constexpr,
    ABSENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Estimate the scaled scores of BLOCK_T tokens, [BLOCK_T, GROUP]; -inf for absent heads, ABSENT from `end` on."""
    tokens = first + tl.arange(0, BLOCK_T)
    # A line holds the bytes of TOKENS tokens, DEPTH in all, as deep as a product of bytes must be.
    DEPTH: tl.constexpr = TOKENS * BLOCK_B
    lines = first // TOKENS + tl.arange(0, BLOCK_T // TOKENS)[:, None]
    columns = tl.arange(0, DEPTH)[None, :]
    high = tl.zeros((BLOCK_T // TOKENS, TOKENS * GROUP), tl.int32)
    low = tl.zeros((BLOCK_T // TOKENS, TOKENS * GROUP), tl.int32)
    for bit_plane in tl.static_range(BITS):
        token_of_line = columns // BLOCK_B
        at = codes_ptr + (lines.to(tl.int64) * TOKENS + token_of_line) * (BITS * BYTES) + bit_plane * BYTES
        at += columns % BLOCK_B
        if (BITS == 1) & (BYTES == BLOCK_B):
            at = codes_ptr + lines.to(tl.int64) * DEPTH + columns
        if WHOLE & (BYTES == BLOCK_B):
            codes = tl.load(at)
        else:
            codes = tl.load(at, mask=(lines * TOKENS < capacity) & (columns % BLOCK_B < BYTES), other=0)
        for bit in tl.static_range(8):
            bits = bit_of_bytes(codes, bit, PLACE - BITS + 1 + bit_plane, INTERPRETED)
            high = tl.dot(bits, high_parts[bit], high, out_dtype=tl.int32)
            low = tl.dot(bits, low_parts[bit], low, out_dtype=tl.int32)
    sums = tl.reshape((high * 128 + low).to(tl.float32), (BLOCK_T, GROUP)) * slope - level
    # A page that is not coded yet may hold anything: results that mix tokens must not read it, others may.
    last = end if ABSENT != 0.0 else capacity
    if OFFSETS:
        pairs = tl.arange(0, 2 * BLOCK_T)
        at = factors_ptr + first * 2 + pairs
        both = tl.load(at) if WHOLE & (ABSENT == 0.0) else tl.load(at, mask=first + pairs // 2 < last, other=0.0)
        factor, offset = tl.split(tl.reshape(both, (BLOCK_T, 2)))
        added = (offset.to(tl.float32) * offset_scale)[:, None]
    else:
        factor = tl.load(factors_ptr + tokens, mask=tokens < last, other=0.0)
        added = tl.zeros((BLOCK_T, 1), tl.float32)
    first_tokens = first + tl.arange(0, BLOCK_T // SLICE) * SLICE
    at = page_scores_ptr + (first_tokens // PAGE_SIZE * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    if WHOLE & (ABSENT == 0.0):
        of_pages = tl.load(at)
    else:
        of_pages = tl.load(at, mask=(first_tokens < last)[:, None], other=ABSENT)
    of_pages = tl.reshape(tl.broadcast_to(of_pages[:, None, :], (BLOCK_T // SLICE, SLICE, GROUP)), (BLOCK_T, GROUP))
    return (added + of_pages) + sums * factor.to(tl.float32)[:, None]


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
    factors_ptr,  # float16 [pairs, capacity, 1 + OFFSETS]
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
    first_page,
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
    WHOLE: tl.constexpr,
    CODE_LINES: tl.constexpr,
    FACTOR_LINES: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Estimate `tokens_per_program` tokens of a row and KV head; grid (programs, pairs).

    RESULT is "max", or "lse" and then "softmax": for each head the log-sum-exp of the program's estimates, then the
    estimates reduced with all of them.
    """
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    begin = tl.program_id(0) * tokens_per_program
    stop = tl.minimum(begin + tokens_per_program, num_tokens)
    codes_ptr += pair * capacity * (BITS * BYTES)
    factors_ptr += pair * capacity * (1 + OFFSETS)
    if PDL and RESULT != "softmax":
        # The kernel before prepares the query, and has waited for those before it: bounds, codes and factors are final.
        length = tl.minimum(tl.load(end_ptr + row) - tl.load(start_ptr + row), num_tokens)
        last = tl.maximum(tl.minimum(stop, length) - 1, begin).to(tl.int64)
        at = begin.to(tl.int64) * (BITS * BYTES) + tl.arange(0, CODE_LINES) * 128
        prefetch(codes_ptr + tl.minimum(at, last * (BITS * BYTES)))
        at = begin.to(tl.int64) * (1 + OFFSETS) + tl.arange(0, FACTOR_LINES) * 64
        prefetch(factors_ptr + tl.minimum(at, last * (1 + OFFSETS)))
    wait_for_previous_kernel(PDL)
    length = tl.minimum(tl.load(end_ptr + row) - tl.load(start_ptr + row), num_tokens)
    end = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    page_scores_ptr += pair * (capacity // PAGE_SIZE * GROUP)
    program_lse_ptr += pair * tl.num_programs(0) * GROUP
    scores_ptr += pair * num_tokens
    heads = tl.arange(0, GROUP)
    # One block for each token of a line, so that each meets its own bytes.
    depth = tl.arange(0, TOKENS * BLOCK_B)[:, None]
    columns = tl.arange(0, TOKENS * GROUP)[None, :]
    is_own = depth // BLOCK_B == columns // GROUP
    at = parts_ptr + (pair * GROUP + columns % GROUP) * (2 * 8 * BLOCK_B) + depth % BLOCK_B
    high_parts = ()
    low_parts = ()
    for bit in tl.static_range(8):
        high_parts += (tl.load(at + bit * BLOCK_B, mask=is_own, other=0),)  # type: ignore[assignment]
        low_parts += (tl.load(at + (8 + bit) * BLOCK_B, mask=is_own, other=0),)  # type: ignore[assignment]
    lines_ptr += pair * (2 * GROUP)
    # A value's unit is at place 6, or 5 if it has two bits.
    unit: tl.constexpr = 1.0 / 2 ** (PLACE - BITS + 1)
    slope = tl.load(lines_ptr + heads, mask=heads < HEADS, other=0.0)[None, :] * unit
    level = tl.load(lines_ptr + GROUP + heads, mask=heads < HEADS, other=0.0)[None, :]
    if RESULT == "lse":
        most = tl.full((BLOCK_T, GROUP), -1e30, tl.float32)
        total = tl.zeros((BLOCK_T, GROUP), tl.float32)
        for first in tl.range(begin, tl.minimum(stop, end), BLOCK_T, num_stages=STAGES):
            z = estimate_tile(
                codes_ptr,
                factors_ptr,
                page_scores_ptr,
                high_parts,
                low_parts,
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
                WHOLE,
                float("-inf") if RESULT == "lse" else 0.0,
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
        for first in tl.range(begin, stop, BLOCK_T, num_stages=STAGES):
            z = estimate_tile(
                codes_ptr,
                factors_ptr,
                page_scores_ptr,
                high_parts,
                low_parts,
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
                WHOLE,
                float("-inf") if RESULT == "lse" else 0.0,
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
            is_candidate = (tokens >= first_page * PAGE_SIZE) & (tokens < end)
            tl.store(scores_ptr + tokens, to_finite_half(reduced, INTERPRETED), mask=is_candidate & (tokens < stop))
            absent = tl.full((BLOCK_T,), float("-inf"), tl.float16)
            tl.store(scores_ptr + tokens, absent, mask=(is_candidate == 0) & (tokens < stop))
