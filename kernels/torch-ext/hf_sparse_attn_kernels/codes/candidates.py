"""Triton kernel that leaves few of a row's tokens as candidates, by a bound that comes from a sample of its scores."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from .search import (
    INFINITE,
    NEIGHBOURS,
    TOGETHER,
    count_four,
    raise_or_lower,
    ranks_in_groups,
    row_of_pair,
    score_of_key,
    span_of,
    store_groups,
)

SAMPLED_TOGETHER = tl.constexpr(2)  # tokens of a group of the sample
KEY_OF_2 = tl.constexpr(0x4000)
KEY_OF_32 = tl.constexpr(0x5000)


@triton.jit
def sample_places(groups, SAMPLED: tl.constexpr):
    """Choose a group from each of SAMPLED equal parts of the row, or all `groups` if they are fewer; int32 [SAMPLED].

    Which one of its part is a fixed function of the part that has no period, as scores might.
    """
    parts = tl.arange(0, SAMPLED)
    mixed = parts.to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    shift = ((mixed >> 22).to(tl.int64) * groups) >> 10  # below `groups`
    chosen = (parts.to(tl.int64) * groups + shift) // SAMPLED
    return tl.where(groups <= SAMPLED, parts, chosen.to(tl.int32))


@triton.jit
def sample_tokens(newest_page, sink_tokens, SAMPLED: tl.constexpr):
    """Choose groups of tokens, none of which is always chosen.

    Returns the first token of each group [SAMPLED], how many of them are in the sample, and of how many groups.
    """
    first_group = tl.cdiv(sink_tokens, SAMPLED_TOGETHER)
    groups = tl.maximum(newest_page // SAMPLED_TOGETHER - first_group, 0)
    tokens = (first_group + sample_places(groups, SAMPLED)) * SAMPLED_TOGETHER
    return tokens, tl.minimum(groups, SAMPLED), groups


@triton.jit
def bound_by_sample(
    sample,  # float16, in any shape; the least score where there is none
    sampled,  # groups in the sample, and
    groups,  # groups that it stands for
    length,
    newest_page,
    sink_tokens,
    max_tokens,
    DEVIATIONS: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """Return the key of a score that at least as many tokens reach as are to be chosen, as the sample says."""
    sinks = tl.minimum(sink_tokens, length)
    wanted = tl.minimum(length, max_tokens) - sinks - (length - tl.maximum(newest_page, sinks))
    # If the tokens of a group are equal, SAMPLED_TOGETHER * expected is the variance of the number of wanted ones.
    expected = tl.maximum(wanted, 0).to(tl.float32) * sampled.to(tl.float32) / tl.maximum(groups, 1).to(tl.float32)
    rank = (expected + tl.sqrt(expected * SAMPLED_TOGETHER) * DEVIATIONS).to(tl.int32) + SAMPLED_TOGETHER
    rank = tl.where(groups <= SAMPLED, tl.maximum(wanted, 1), rank)
    enough = rank + rank // 4

    low = -INFINITE
    high = INFINITE + 1
    reach_low = sampled * SAMPLED_TOGETHER
    # Logarithms of weights mostly lie between -32 and -2, and other scores between -32 and 32.
    one = tl.full((), -KEY_OF_32, tl.int32)
    two = tl.full((), -KEY_OF_2, tl.int32)
    three = tl.full((), KEY_OF_2, tl.int32)
    four = tl.full((), KEY_OF_32, tl.int32)
    while (high - low > 1) & (reach_low > enough):
        reach_one, reach_two, reach_three, reach_four = count_four(sample, one, two, three, four)
        low, high, reach_low = raise_or_lower(low, high, reach_low, one, reach_one, rank)
        low, high, reach_low = raise_or_lower(low, high, reach_low, two, reach_two, rank)
        low, high, reach_low = raise_or_lower(low, high, reach_low, three, reach_three, rank)
        low, high, reach_low = raise_or_lower(low, high, reach_low, four, reach_four, rank)
        fifth = tl.maximum((high - low) // 5, 1)
        one = low + fifth
        two = one + fifth
        three = two + fifth
        four = three + fifth
    return low


@triton.jit
def load_tile(scores_ptr, first, readable, TILE: tl.constexpr):
    """Load a tile of scores in groups of neighbours, [TILE / NEIGHBOURS, NEIGHBOURS]."""
    lanes = tl.arange(0, TILE // NEIGHBOURS)[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
    return tl.load(scores_ptr + (first + lanes), mask=lanes < readable - first, other=0.0, cache_modifier=".cg")


@triton.jit
def keep_span(
    scores_ptr,  # of the span
    candidates_ptr,
    scores,  # its first tile
    bound,
    begin,
    stop,  # tokens of the span
    readable,
    newest_page,
    sink_tokens,
    TILE: tl.constexpr,
):
    """Keep the tokens of a span that reach the bound or are always chosen, and return how many.

    The neighbours of the last sink token are kept too, which spares the other tokens a comparison each.
    """
    groups = tl.arange(0, TILE // NEIGHBOURS) * NEIGHBOURS
    lanes = groups[:, None] + tl.arange(0, NEIGHBOURS)[None, :]
    least = score_of_key(bound)
    # Groups that are kept whole. NaN does not reach -inf, but ranks with it.
    sinks_end = sink_tokens - begin
    newest_begin = tl.where(bound == -INFINITE, 0, newest_page) - begin
    kept = 0
    for first in range(0, stop, TILE):
        ahead = load_tile(scores_ptr, first + TILE, readable, TILE)
        is_whole = (groups < sinks_end - first) | (groups >= newest_begin - first)
        is_kept = ((scores >= least) | is_whole[:, None]) & (lanes < stop - first)
        bits = scores.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        ranks, of_groups = ranks_in_groups(is_kept.to(tl.int32))
        store_groups(candidates_ptr, kept + ranks, ((first + lanes) << 16) | bits, is_kept)
        kept += tl.sum(of_groups)
        scores = ahead
    unused = kept + tl.arange(0, TOGETHER)
    absent = tl.full((TOGETHER,), -1, tl.int32)
    tl.store(candidates_ptr + unused, absent, mask=unused < tl.cdiv(kept, TOGETHER) * TOGETHER)
    return kept


@triton.jit
def keep_candidates_kernel(
    scores_ptr,  # float16 [pairs, num_tokens]
    candidates_ptr,  # int32 [pairs, programs, PITCH], written: a place in the span << 16 | the score's bits; or -1
    found_ptr,  # int32 [pairs, programs + 1], written: how many candidates each program kept; the bound's key
    start_ptr,
    end_ptr,
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    DEVIATIONS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PITCH: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLED: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keep the tokens of a span that reach the sample's bound or are always chosen; grid (programs, pairs).

    PADDED allows reading up to a multiple of 16 scores: a mask that changes only there keeps the loads vectorized.
    """
    wait_for_previous_kernel(PDL)
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    programs = tl.num_programs(0)
    span = span_of(length, programs)
    begin = tl.program_id(0) * span
    found_ptr += pair * (programs + 1)
    kept = 0
    if begin < length:
        scores_ptr += pair * num_tokens
        candidates_ptr += (pair * programs + tl.program_id(0)) * PITCH
        newest_page = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
        tokens, sampled, groups = sample_tokens(newest_page, sink_tokens, SAMPLED)
        at = scores_ptr + tokens[:, None] + tl.arange(0, SAMPLED_TOGETHER)[None, :]
        mask = (tl.arange(0, SAMPLED) < sampled)[:, None]
        sample = tl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        stop = tl.minimum(length - begin, span)
        readable = (stop + 15) // 16 * 16 if PADDED else stop
        # Asked for before the bound is known.
        scores = load_tile(scores_ptr + begin, 0, readable, TILE)
        bound = bound_by_sample(
            sample, sampled, groups, length, newest_page, sink_tokens, max_tokens, DEVIATIONS, SAMPLED
        )
        if tl.program_id(0) == 0:
            tl.store(found_ptr + programs, bound)
        kept = keep_span(
            scores_ptr + begin, candidates_ptr, scores, bound, begin, stop, readable, newest_page, sink_tokens, TILE
        )
    tl.store(found_ptr + tl.program_id(0), kept)
