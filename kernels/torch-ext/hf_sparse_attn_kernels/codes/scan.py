"""Triton kernel that scans the codes."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import prefetch, wait_for_previous_kernel
from .estimate import estimate_tile, level_of_products, to_finite_half

LN_2 = tl.constexpr(0.6931471805599453)


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
    parts_ptr,  # int8 [pairs, GROUP, BITS, 8 * BLOCK_B]
    slopes_ptr,  # [pairs, GROUP]
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
    LEAST_LINES: tl.constexpr,
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
    is_own = (depth // BLOCK_B == columns // GROUP) & (depth % BLOCK_B < BYTES)
    at = parts_ptr + (pair * GROUP + columns % GROUP) * (BITS * 8 * BLOCK_B) + depth % BLOCK_B
    parts = ()
    for bit in tl.static_range(8 * BITS):
        parts += (tl.load(at + bit * BLOCK_B, mask=is_own, other=0),)  # type: ignore[assignment]
    level = level_of_products(parts, BITS, LEAST_LINES)
    slope = tl.load(slopes_ptr + pair * GROUP + heads, mask=heads < HEADS, other=0.0)[None, :]
    if RESULT == "lse":
        most = tl.full((BLOCK_T, GROUP), -1e30, tl.float32)
        total = tl.zeros((BLOCK_T, GROUP), tl.float32)
        for first in tl.range(begin, tl.minimum(stop, end), BLOCK_T, num_stages=STAGES):
            z = estimate_tile(
                codes_ptr,
                factors_ptr,
                page_scores_ptr,
                parts,
                level,
                slope,
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
                parts,
                level,
                slope,
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
