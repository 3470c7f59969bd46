"""Triton kernel that reduces estimates over the query heads of a group, each normalised over its row."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from .estimate import fast_exp2, to_finite_half

LN_2 = tl.constexpr(0.6931471805599453)


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
    """Return the log-sum-exp of every head over all programs [1, GROUP], base 2; 0 for absent heads."""
    heads = tl.arange(0, GROUP)[None, :]
    most = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)[:, None]
        lse = tl.load(program_lse_ptr + program * GROUP + heads, mask=program < programs, other=-1e30)
        greatest = tl.maximum(most, tl.max(lse, axis=0))
        total = total * tl.exp2(most - greatest) + tl.sum(tl.exp2(lse - greatest[None, :]), axis=0)
        most = greatest
    # Gathered, it has no say in how the compiler lays out what meets it: estimates stay in the threads that load them.
    lse = tl.gather(most + tl.log2(tl.maximum(total, 1.0)), tl.arange(0, GROUP), 0)
    return tl.where(heads < HEADS, lse[None, :], 0.0)


@triton.jit
def reduce_heads(estimates, lse, INTERPRETED: tl.constexpr):
    """Add up the weights of tokens over the heads, [tokens, GROUP]; return the natural logarithms, float16 [tokens]."""
    z = estimates.to(tl.float32) - lse
    greatest = tl.maximum(tl.max(z, axis=1), -1e30)  # not -inf
    total = tl.sum(fast_exp2(z - greatest[:, None], INTERPRETED), axis=1)
    # A total below 1 is that of a token without a weight.
    reduced = (greatest + fast_log2(tl.maximum(total, 1.0), INTERPRETED)) * LN_2
    return to_finite_half(reduced, INTERPRETED)


@triton.jit
def reduce_estimates_kernel(
    estimates_ptr,  # float16 [pairs, num_tokens, GROUP], base 2
    program_lse_ptr,  # [pairs, lse_programs, GROUP], base 2
    start_ptr,
    end_ptr,
    scores_ptr,  # float16 [pairs, num_tokens], written
    kv_heads,
    num_tokens,
    first_page,
    lse_programs,
    tokens_per_program,  # of the scan
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the weights of BLOCK_T tokens over the heads, and store the logarithms; grid (tiles, pairs)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.minimum(tl.load(end_ptr + row) - tl.load(start_ptr + row), num_tokens)
    end = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = estimates_ptr + (pair * num_tokens + tokens[:, None]) * GROUP + tl.arange(0, GROUP)[None, :]
    estimates = tl.load(at, mask=(tokens < end)[:, None], other=0.0)
    program_lse_ptr += pair * lse_programs * GROUP
    lse = load_lse(program_lse_ptr, tl.cdiv(end, tokens_per_program), HEADS, GROUP, BLOCK_P)
    is_candidate = (tokens >= first_page * PAGE_SIZE) & (tokens < end)
    scores = tl.where(is_candidate, reduce_heads(estimates, lse, INTERPRETED), float("-inf"))
    tl.store(scores_ptr + pair * num_tokens + tokens, scores, mask=tokens < num_tokens)
