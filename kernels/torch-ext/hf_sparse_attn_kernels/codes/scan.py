"""Triton kernel that scans the codes."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import prefetch, wait_for_previous_kernel
from .estimate import estimate_tile, fast_exp2, level_of_products, to_estimate, to_finite_half


@triton.jit
def scan_codes_kernel(
    codes_ptr,  # uint8 [pairs, capacity, BITS, BYTES]
    factors_ptr,  # float16 [pairs, capacity, 1 + OFFSETS]
    parts_ptr,  # int8 [pairs, GROUP, BITS, 8 * BLOCK_B]
    slopes_ptr,  # [pairs, GROUP]
    page_scores_ptr,  # [pairs, capacity / PAGE_SIZE, GROUP], -inf for absent heads
    estimates_ptr,  # float16 [pairs, num_tokens, GROUP], only for SOFTMAX, like the next; written
    program_lse_ptr,  # [pairs, programs, GROUP], base 2; written
    start_ptr,
    end_ptr,
    scores_ptr,  # float16 [pairs, num_tokens], not for SOFTMAX; written
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
    SOFTMAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
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

    Stores the greatest of a token's estimates, or for SOFTMAX, in base 2, all of them, and for each head the
    log-sum-exp of the program's.
    """
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    begin = tl.program_id(0) * tokens_per_program
    stop = tl.minimum(begin + tokens_per_program, num_tokens)
    codes_ptr += pair * capacity * (BITS * BYTES)
    factors_ptr += pair * capacity * (1 + OFFSETS)
    if PDL:
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
    if SOFTMAX:
        estimates_ptr += pair * num_tokens * GROUP
        stop_at = tl.minimum(stop, end)
        most = tl.full((GROUP,), -1e30, tl.float32)
        total = tl.zeros((BLOCK_T, GROUP), tl.float32)
    else:
        scores_ptr += pair * num_tokens
        stop_at = stop
    for first in tl.range(begin, stop_at, BLOCK_T, num_stages=STAGES):
        z, offset = estimate_tile(
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
            float("-inf") if SOFTMAX else 0.0,
            INTERPRETED,
        )
        tokens = first + tl.arange(0, BLOCK_T)
        if SOFTMAX:
            estimates = to_estimate(z + offset[:, None], INTERPRETED)
            places = tl.arange(0, BLOCK_T)[:, None] * GROUP + heads[None, :]
            tl.store(
                estimates_ptr + (tl.full((), 0, tl.int64) + first) * GROUP + places,
                estimates,
                mask=(tokens < stop)[:, None],
            )
            # What the reduction will read.
            z = estimates.to(tl.float32)
            before = most
            most = tl.maximum(most, tl.max(z, axis=0))
            total *= fast_exp2(before - most, INTERPRETED)[None, :]
            total += fast_exp2(z - most[None, :], INTERPRETED)
        else:
            reduced = tl.max(z, axis=1) + offset
            is_candidate = (tokens >= first_page * PAGE_SIZE) & (tokens < end)
            tl.store(scores_ptr + tokens, to_finite_half(reduced, INTERPRETED), mask=is_candidate & (tokens < stop))
            absent = tl.full((BLOCK_T,), float("-inf"), tl.float16)
            tl.store(scores_ptr + tokens, absent, mask=(is_candidate == 0) & (tokens < stop))
    if SOFTMAX and begin < end:
        sums = tl.maximum(tl.sum(total, axis=0), 1e-30)  # of absent heads 0
        program_lse_ptr += (pair * tl.num_programs(0) + tl.program_id(0)) * GROUP
        tl.store(program_lse_ptr + heads, most + tl.log2(sums))
