"""Triton kernel that finds a row's least chosen score among few candidates, or all tokens, and writes the choice."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from .search import (
    ABSENT,
    DOUBLING,
    FORCED,
    INFINITE,
    NEIGHBOURS,
    TOGETHER,
    count_both,
    key_of_bits,
    narrow,
    ranks_in_groups,
    row_of_pair,
    span_of,
    split_range,
    store_groups,
)

MANY = tl.constexpr(8)  # candidates for each choice: as many come from ties


@triton.jit
def load_tokens(scores_ptr, groups, num_tokens, PADDED: tl.constexpr):
    """Return the bits of the scores in groups of tokens, the tokens, and whether they exist; [groups, TOGETHER]."""
    tokens = groups[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    exists = tokens < num_tokens
    mask = tokens < (num_tokens + 15) // 16 * 16 if PADDED else exists
    scores = tl.load(scores_ptr + tokens, mask=mask, other=0.0, cache_modifier=".cg")
    return scores.to(tl.int16, bitcast=True).to(tl.int32), tokens, exists


@triton.jit
def load_candidates(candidates_ptr, groups, num_groups, firsts, gaps, span, PITCH: tl.constexpr):
    """Return the same of groups of candidates, which `keep_span` wrote.

    `firsts` has the first group of each program after the first one, `gaps` how many groups are free before it.
    """
    at = groups
    for program in tl.static_range(len(firsts)):
        at += tl.where(groups >= firsts[program], gaps[program], 0)
    at *= TOGETHER
    places = at[:, None] + tl.arange(0, TOGETHER)[None, :]
    mask = (groups < num_groups)[:, None]
    candidates = tl.load(candidates_ptr + places, mask=mask, other=-1, cache_modifier=".cg")
    tokens = (at // PITCH * span)[:, None] + ((candidates >> 16) & 0xFFFF)
    return (candidates << 16) >> 16, tokens, candidates != -1


@triton.jit
def load_groups(
    scores_ptr,  # of the pair, like the next
    candidates_ptr,
    first,
    all_tokens,  # how many tokens to load, or 0 to load the candidates
    num_groups,
    firsts,
    gaps,
    span,
    newest_page,
    sink_tokens,
    PITCH: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return GROUPS groups' keys, FORCED for tokens always chosen and ABSENT for none; and the tokens."""
    groups = first + tl.arange(0, GROUPS)
    if PITCH == 0:
        bits, tokens, exists = load_tokens(scores_ptr, groups, all_tokens, PADDED)
    else:
        if all_tokens > 0:
            bits, tokens, exists = load_tokens(scores_ptr, groups, all_tokens, PADDED)
        else:
            bits, tokens, exists = load_candidates(candidates_ptr, groups, num_groups, firsts, gaps, span, PITCH)
    keys = tl.where((tokens < sink_tokens) | (tokens >= newest_page), FORCED, key_of_bits(bits))
    return tl.where(exists, keys, ABSENT), tokens


@triton.jit
def write_groups(indices_ptr, keys, tokens, least, above_before, ties_before, ties):
    """Write the tokens above the least chosen key, and of those equal to it the first `ties` of the row.

    Returns how many are above, and equal, up to the last of these groups; given how many before.
    """
    flags = (keys > least).to(tl.int32) + ((keys == least).to(tl.int32) << 16)  # both in one scan
    ranks, of_groups = ranks_in_groups(flags)
    ties_until = ties_before + (ranks >> 16)
    places = above_before + (ranks & 0xFFFF) + tl.minimum(ties_until, ties)
    is_taken = (keys > least) | ((keys == least) & (ties_until < ties))
    store_groups(indices_ptr, places, tokens, is_taken)
    flags = tl.sum(of_groups)
    return above_before + (flags & 0xFFFF), ties_before + (flags >> 16)


@triton.jit
def write_chosen_kernel(
    scores_ptr,  # float16 [pairs, num_tokens]
    candidates_ptr,  # as for `keep_candidates_kernel`, like the next
    found_ptr,
    start_ptr,
    end_ptr,
    indices_ptr,  # int32 [pairs, max_tokens], written
    counts_ptr,  # int32 [pairs], written
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    programs,  # that kept candidates, at most PROGRAMS
    PAGE_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PITCH: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the least chosen key; write the tokens above it and the first ones equal to it; grid (1, pairs).

    All tokens of a row are candidates if PITCH is 0. GROUPS groups of candidates stay in registers.
    """
    if PITCH == 0:
        wait_for_previous_kernel(PDL)
    # The kernel before, which kept candidates, has waited for those before it: the bounds of rows are final.
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    if PITCH > 0:
        wait_for_previous_kernel(PDL)
    newest_page = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    count = tl.minimum(length, max_tokens)
    scores_ptr += pair * num_tokens
    indices_ptr += pair * max_tokens
    low = -INFINITE
    total = length
    all_tokens = length
    num_groups = tl.cdiv(length, TOGETHER)
    firsts = ()
    gaps = ()
    if PITCH > 0:
        candidates_ptr += pair * programs * PITCH
        found_ptr += pair * (programs + 1)
        found = tl.load(found_ptr, cache_modifier=".cg")
        groups_before = tl.cdiv(found, TOGETHER)
        kept = found
        for program in tl.static_range(1, PROGRAMS):
            firsts += (groups_before,)  # type: ignore[assignment]
            gaps += (PITCH // TOGETHER - tl.cdiv(found, TOGETHER),)  # type: ignore[assignment]
            found = tl.load(found_ptr + program, mask=program < programs, other=0, cache_modifier=".cg")
            groups_before += tl.cdiv(found, TOGETHER)
            kept += found
        kept_in_any_case = tl.cdiv(sink_tokens, NEIGHBOURS) * NEIGHBOURS - sink_tokens  # they may not reach the bound
        # Else the sample misled, or the row is empty and has no bound.
        if (kept >= count + kept_in_any_case) & (length > 0):
            low = tl.load(found_ptr + programs, cache_modifier=".cg")
            total = kept
            all_tokens = 0
            num_groups = groups_before

    row = (scores_ptr, candidates_ptr)
    of_row = (all_tokens, num_groups, firsts, gaps, span_of(length, programs), newest_page, sink_tokens)
    keys, tokens = load_groups(*row, 0, *of_row, PITCH, GROUPS, PADDED)
    high = FORCED + 1
    reach_low = total
    reach_high = 0
    one, two = split_range(low, high)
    if all_tokens == 0:
        # The bound is not far below the least chosen score, or equal to it if so many tokens reach it.
        one = low + tl.where(total > MANY * count, 1, DOUBLING // 4)
        two = low + DOUBLING
    while (high - low > 1) & (reach_low > count):
        reach_one, reach_two = count_both(keys >= one, keys >= two)
        for first in range(GROUPS, num_groups, GROUPS):
            more, _ = load_groups(*row, first, *of_row, PITCH, GROUPS, PADDED)
            more_one, more_two = count_both(more >= one, more >= two)
            reach_one += more_one
            reach_two += more_two
        low, high, reach_low, reach_high = narrow(
            low, high, reach_low, reach_high, one, two, reach_one, reach_two, count
        )
        one, two = split_range(low, high)
    # Tokens equal to the least chosen one are all chosen, or those with the lowest indices.
    ties = tl.where(reach_low > count, count - reach_high, length)
    above, tied = write_groups(indices_ptr, keys, tokens, low, 0, 0, ties)
    for first in range(GROUPS, num_groups, GROUPS):
        keys, tokens = load_groups(*row, first, *of_row, PITCH, GROUPS, PADDED)
        above, tied = write_groups(indices_ptr, keys, tokens, low, above, tied, ties)
    tl.store(counts_ptr + pair, count)
    lanes = tl.arange(0, GROUPS)
    for first in range(count // GROUPS * GROUPS, max_tokens, GROUPS):
        slots = first + lanes
        absent = tl.full((GROUPS,), -1, tl.int32)
        tl.store(indices_ptr + slots, absent, mask=(slots >= count) & (slots < max_tokens))
