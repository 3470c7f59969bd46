"""Triton kernel that reduces estimates over the query heads of a group and keeps candidates, in one launch."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from .candidates import SAMPLED_TOGETHER, bound_by_sample, keep_span, load_tile, sample_tokens
from .search import row_of_pair, span_of
from .softmax import load_lse, reduce_heads


@triton.jit
def load_estimates(estimates_ptr, first, scored, GROUP: tl.constexpr, REDUCED: tl.constexpr):
    """Load the estimates of REDUCED tokens of a span, [REDUCED * GROUP], so that a thread has 16 bytes at once."""
    lanes = tl.arange(0, REDUCED * GROUP)
    at = estimates_ptr + (first * GROUP + lanes)
    return tl.load(at, mask=lanes < (scored - first) * GROUP, other=0.0)


@triton.jit
def reduce_span(
    estimates_ptr,  # of the span
    scores_ptr,
    estimates,  # its first tile
    lse,
    scored,  # tokens of the span that have estimates
    stop,  # tokens up to which scores are written
    GROUP: tl.constexpr,
    REDUCED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the scores of a span, -inf for tokens without estimates."""
    # A thread that loads two tokens stores two: wider stores would have threads exchange scores first.
    IN_THREAD: tl.constexpr = 8 // GROUP if GROUP < 8 else 1
    places = tl.max_contiguous(tl.arange(0, REDUCED), IN_THREAD)
    for first in range(0, stop, REDUCED):
        ahead = load_estimates(estimates_ptr, first + REDUCED, scored, GROUP, REDUCED)
        scores = reduce_heads(tl.reshape(estimates, (REDUCED, GROUP)), lse, INTERPRETED)
        scores = tl.where(places < scored - first, scores, float("-inf"))
        tl.store(scores_ptr + (first + places), scores, mask=places < stop - first)
        estimates = ahead


@triton.jit
def reduce_and_keep_kernel(
    estimates_ptr,  # as for `reduce_estimates_kernel`, like the next
    program_lse_ptr,
    scores_ptr,  # float16 [pairs, num_tokens], written up to each row's length
    candidates_ptr,  # as for `keep_candidates_kernel`, like the next
    found_ptr,
    start_ptr,
    end_ptr,
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    lse_programs,
    tokens_per_program,  # of the scan
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DEVIATIONS: tl.constexpr,
    PITCH: tl.constexpr,
    TILE: tl.constexpr,
    REDUCED: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PADDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce the estimates of a span, and keep its candidates as `keep_candidates_kernel` does; grid (programs, pairs).

    A program knows the scores of its own span alone, so it also reduces the estimates of the whole sample.
    """
    # The kernel before, the scan, has waited for those before it: the bounds of rows are final.
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    programs = tl.num_programs(0)
    span = span_of(length, programs)
    begin = tl.program_id(0) * span
    newest_page = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    scanning = tl.cdiv(newest_page, tokens_per_program)  # programs that found estimates
    tokens, sampled, groups = sample_tokens(newest_page, sink_tokens, SAMPLED)
    wait_for_previous_kernel(PDL)
    found_ptr += pair * (programs + 1)
    kept = 0
    if begin < length:
        stop = tl.minimum(length - begin, span)
        readable = (stop + 15) // 16 * 16 if PADDED else stop
        scored = newest_page - begin
        estimates_ptr += pair * num_tokens * GROUP
        scores_ptr += pair * num_tokens + begin
        candidates_ptr += (pair * programs + tl.program_id(0)) * PITCH
        program_lse_ptr += pair * lse_programs * GROUP
        # Asked for before the first wait; without a barrier the compiler would do so later.
        is_sampled = (tl.arange(0, SAMPLED) < sampled)[:, None]
        columns = tl.arange(0, SAMPLED_TOGETHER * GROUP)[None, :]
        at = estimates_ptr + (tokens * GROUP)[:, None] + columns
        of_sample = tl.load(at, mask=is_sampled, other=float("-inf"))
        estimates_ptr += begin * GROUP
        estimates = load_estimates(estimates_ptr, 0, scored, GROUP, REDUCED)
        tl.debug_barrier()
        lse = load_lse(program_lse_ptr, scanning, HEADS, GROUP, BLOCK_P)

        of_sample = tl.reshape(of_sample, (SAMPLED * SAMPLED_TOGETHER, GROUP))
        sample = reduce_heads(of_sample, lse, INTERPRETED)
        reduce_span(estimates_ptr, scores_ptr, estimates, lse, scored, readable, GROUP, REDUCED, INTERPRETED)
        tl.debug_barrier()  # all scores of the span are written before any is read
        scores = load_tile(scores_ptr, 0, readable, TILE)  # asked for before the bound is known
        bound = bound_by_sample(
            sample, sampled, groups, length, newest_page, sink_tokens, max_tokens, DEVIATIONS, SAMPLED
        )
        if tl.program_id(0) == 0:
            tl.store(found_ptr + programs, bound)
        kept = keep_span(
            scores_ptr, candidates_ptr, scores, bound, begin, stop, readable, newest_page, sink_tokens, TILE
        )
    tl.store(found_ptr + tl.program_id(0), kept)
