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
    count_both,
    narrow,
    ranks_in_groups,
    row_of_pair,
    score_of_key,
    split_range,
    store_groups,
)


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
def bound_by_sample(
    scores_ptr,  # of the pair
    length,
    newest_page,
    sink_tokens,
    max_tokens,
    DEVIATIONS: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """Return the key of a score that at least as many tokens reach as are to be chosen, as the sample says.

    Tokens that are always chosen are not in the sample.
    """
    first_group = tl.cdiv(sink_tokens, NEIGHBOURS)
    groups = tl.maximum(newest_page // NEIGHBOURS - first_group, 0)
    sampled = tl.minimum(groups, SAMPLED)
    at = (first_group + sample_places(groups, SAMPLED)) * NEIGHBOURS
    mask = tl.arange(0, SAMPLED) < sampled
    at = scores_ptr + at[:, None] + tl.arange(0, NEIGHBOURS)[None, :]
    sample = tl.load(at, mask=mask[:, None], other=float("-inf"), cache_modifier=".cg")

    sinks = tl.minimum(sink_tokens, length)
    wanted = tl.minimum(length, max_tokens) - sinks - (length - tl.maximum(newest_page, sinks))
    # If all neighbours are equal, NEIGHBOURS * expected is the variance of the number sampled of the wanted.
    expected = tl.maximum(wanted, 0).to(tl.float32) * sampled.to(tl.float32) / tl.maximum(groups, 1).to(tl.float32)
    rank = (expected + tl.sqrt(expected * NEIGHBOURS) * DEVIATIONS).to(tl.int32) + NEIGHBOURS
    rank = tl.where(groups <= SAMPLED, tl.maximum(wanted, 1), rank)
    enough = rank + rank // 4

    low = -INFINITE
    high = INFINITE + 1
    reach_low = sampled * NEIGHBOURS
    reach_high = 0
    while (high - low > 1) & (reach_low > enough):
        one, two = split_range(low, high)
        reach_one, reach_two = count_both(sample >= score_of_key(one), sample >= score_of_key(two))
        low, high, reach_low, reach_high = narrow(
            low, high, reach_low, reach_high, one, two, reach_one, reach_two, rank
        )
    return low


@triton.jit
def keep_candidates_kernel(
    scores_ptr,  # float16 [pairs, num_tokens]
    candidates_ptr,  # int32 [pairs, programs, SPAN], written: a place in the span << 16 | the score's bits; -1 for none
    found_ptr,  # int32 [pairs, programs + 1], written: how many candidates each program kept; the bound's key
    start_ptr,
    end_ptr,
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    DEVIATIONS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLED: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keep the tokens of a span that reach the sample's bound or are always chosen; grid (programs, pairs).

    The neighbours of the last sink token are kept too, which spares the other tokens a comparison each.
    PADDED allows reading up to a multiple of 16 scores: a mask that changes only there keeps the loads vectorized.
    """
    wait_for_previous_kernel(PDL)
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    programs = tl.num_programs(0)
    begin = tl.program_id(0) * SPAN
    found_ptr += pair * (programs + 1)
    kept = 0
    if begin < length:
        scores_ptr += pair * num_tokens
        candidates_ptr += (pair * programs + tl.program_id(0)) * SPAN
        groups = tl.arange(0, TILE // NEIGHBOURS) * NEIGHBOURS
        lanes = groups[:, None] + tl.arange(0, NEIGHBOURS)[None, :]
        stop = tl.minimum(length - begin, SPAN)
        readable = (stop + 15) // 16 * 16 if PADDED else stop
        # Asked for before the bound is known.
        scores = tl.load(scores_ptr + begin + lanes, mask=lanes < readable, other=0.0, cache_modifier=".cg")
        newest_page = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
        bound = bound_by_sample(scores_ptr, length, newest_page, sink_tokens, max_tokens, DEVIATIONS, SAMPLED)
        if tl.program_id(0) == 0:
            tl.store(found_ptr + programs, bound)
        least = score_of_key(bound)
        # Groups that are kept whole. NaN does not reach -inf, but ranks with it.
        sinks_end = sink_tokens - begin
        newest_begin = tl.where(bound == -INFINITE, 0, newest_page) - begin
        for first in range(0, stop, TILE):
            at = scores_ptr + (begin + first + TILE) + lanes
            ahead = tl.load(at, mask=lanes < readable - first - TILE, other=0.0, cache_modifier=".cg")
            is_whole = (groups < sinks_end - first) | (groups >= newest_begin - first)
            is_kept = ((scores >= least) | is_whole[:, None]) & (lanes < stop - first)
            bits = scores.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            ranks, of_groups = ranks_in_groups(is_kept.to(tl.int32))
            store_groups(candidates_ptr, kept + ranks, tl.where(is_kept, ((first + lanes) << 16) | bits, -1))
            kept += tl.sum(of_groups)
            scores = ahead
        unused = kept + tl.arange(0, TOGETHER)
        absent = tl.full((TOGETHER,), -1, tl.int32)
        tl.store(candidates_ptr + unused, absent, mask=unused < tl.cdiv(kept, TOGETHER) * TOGETHER)
    tl.store(found_ptr + tl.program_id(0), kept)
