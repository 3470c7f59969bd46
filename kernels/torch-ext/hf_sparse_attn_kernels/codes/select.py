"""Triton kernels of `select_tokens_by_score`: a sample leaves few candidates, among which the choice is searched.

Two launches. In the first, all programs of a row and KV head take the same sample, and from it a bound that more scores
reach than tokens are to be chosen. Each keeps those of its own tokens that reach it. In the second, one program gathers
what the others kept, finds the least chosen score, and writes the choice. A row that one program can hold takes the
second launch alone. The bound is an estimate, the choice is exact: with fewer candidates than tokens to choose, which
is rare, or with more than a program holds at once, which ties and large budgets cause, the second launch takes longer.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from math import sqrt
from typing import Any

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._triton import cdiv, launch_options, multiprocessors, next_power_of_2, wait_for_previous_kernel
from .candidates import keep_candidates_kernel
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
    split_range,
    store_groups,
)

DEVIATIONS = 3.0
"""Standard deviations by which the sample's rank exceeds the expected one, if neighbours have equal scores."""
LEAST_SAMPLED, MOST_SAMPLED = 256, 2048
"""Groups of neighbours in a sample: at most 2 ** 15 - 1 tokens, which half of an int can count."""
TILE = 8192
"""Tokens that a program compares at once, a power of two."""
MOST_SPAN = 1 << 15
"""Tokens of a program: their places within it have 15 bits."""
MOST_PROGRAMS = 16
"""Programs of a row and KV head, unless their spans would be too long."""
LEAST_AT_ONCE, MOST_AT_ONCE = 1024, 8192
"""Candidates that a program holds at once; at most 2 ** 15 - 1."""


@triton.jit
def load_tokens(scores_ptr, groups, num_tokens, PADDED: tl.constexpr):
    """Return the bits of the scores in groups of tokens, and the tokens, -1 for none; all int32 [groups, TOGETHER]."""
    tokens = groups[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    exists = tokens < num_tokens
    mask = tokens < (num_tokens + 15) // 16 * 16 if PADDED else exists
    scores = tl.load(scores_ptr + tokens, mask=mask, other=0.0, cache_modifier=".cg")
    return scores.to(tl.int16, bitcast=True).to(tl.int32), tl.where(exists, tokens, -1)


@triton.jit
def load_candidates(candidates_ptr, groups, num_groups, firsts, gaps, SPAN: tl.constexpr):
    """Return the same of groups of candidates, which `keep_candidates_kernel` wrote.

    `firsts` has the first group of each program after the first one, `gaps` how many groups are free before it.
    """
    at = groups
    for program in tl.static_range(len(firsts)):
        at += tl.where(groups >= firsts[program], gaps[program], 0)
    at *= TOGETHER
    places = at[:, None] + tl.arange(0, TOGETHER)[None, :]
    mask = (groups < num_groups)[:, None]
    candidates = tl.load(candidates_ptr + places, mask=mask, other=-1, cache_modifier=".cg")
    tokens = (at & -SPAN)[:, None] + (candidates >> 16)
    return (candidates << 16) >> 16, tl.where(candidates >= 0, tokens, -1)


@triton.jit
def load_groups(
    scores_ptr,  # of the pair, like the next
    candidates_ptr,
    first,
    all_tokens,  # how many tokens to load, or 0 to load the candidates
    num_groups,
    firsts,
    gaps,
    newest_page,
    sink_tokens,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return GROUPS groups' keys, FORCED for tokens always chosen and ABSENT for none; and the tokens."""
    groups = first + tl.arange(0, GROUPS)
    if SPAN == 0:
        bits, tokens = load_tokens(scores_ptr, groups, all_tokens, PADDED)
    else:
        if all_tokens > 0:
            bits, tokens = load_tokens(scores_ptr, groups, all_tokens, PADDED)
        else:
            bits, tokens = load_candidates(candidates_ptr, groups, num_groups, firsts, gaps, SPAN)
    keys = tl.where((tokens < sink_tokens) | (tokens >= newest_page), FORCED, key_of_bits(bits))
    return tl.where(tokens >= 0, keys, ABSENT), tokens


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
    store_groups(indices_ptr, places, tl.where(is_taken, tokens, -1))
    flags = tl.sum(of_groups)
    return above_before + (flags & 0xFFFF), ties_before + (flags >> 16)


@triton.jit
def write_chosen_kernel(
    scores_ptr,  # float16 [pairs, num_tokens]
    candidates_ptr,  # as `keep_candidates_kernel` writes them, like the next
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
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the least chosen key; write the tokens above it and the first ones equal to it; grid (1, pairs).

    All tokens of a row are candidates if SPAN is 0. GROUPS groups of candidates stay in registers.
    """
    if SPAN == 0:
        wait_for_previous_kernel(PDL)
    # The kernel before, `keep_candidates_kernel`, has waited for those before it: the bounds of rows are final.
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    if SPAN > 0:
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
    if SPAN > 0:
        candidates_ptr += pair * programs * SPAN
        found_ptr += pair * (programs + 1)
        found = tl.load(found_ptr, cache_modifier=".cg")
        groups_before = tl.cdiv(found, TOGETHER)
        kept = found
        for program in tl.static_range(1, PROGRAMS):
            firsts += (groups_before,)  # type: ignore[assignment]
            gaps += (SPAN // TOGETHER - tl.cdiv(found, TOGETHER),)  # type: ignore[assignment]
            found = tl.load(found_ptr + program, mask=program < programs, other=0, cache_modifier=".cg")
            groups_before += tl.cdiv(found, TOGETHER)
            kept += found
        kept_in_any_case = tl.cdiv(sink_tokens, NEIGHBOURS) * NEIGHBOURS - sink_tokens  # they may not reach the bound
        if kept >= count + kept_in_any_case:  # else the sample misled
            low = tl.load(found_ptr + programs, cache_modifier=".cg")
            total = kept
            all_tokens = 0
            num_groups = groups_before

    row = (scores_ptr, candidates_ptr)
    of_row = (all_tokens, num_groups, firsts, gaps, newest_page, sink_tokens)
    keys, tokens = load_groups(*row, 0, *of_row, SPAN, GROUPS, PADDED)
    high = FORCED + 1
    reach_low = total
    reach_high = 0
    one, two = split_range(low, high)
    if all_tokens == 0:  # the bound is not far below the least chosen score
        one = low + DOUBLING // 4
        two = low + DOUBLING
    while (high - low > 1) & (reach_low > count):
        reach_one, reach_two = count_both(keys >= one, keys >= two)
        for first in range(GROUPS, num_groups, GROUPS):
            more, _ = load_groups(*row, first, *of_row, SPAN, GROUPS, PADDED)
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
        keys, tokens = load_groups(*row, first, *of_row, SPAN, GROUPS, PADDED)
        above, tied = write_groups(indices_ptr, keys, tokens, low, above, tied, ties)
    tl.store(counts_ptr + pair, count)
    lanes = tl.arange(0, GROUPS)
    for first in range(count // GROUPS * GROUPS, max_tokens, GROUPS):
        slots = first + lanes
        absent = tl.full((GROUPS,), -1, tl.int32)
        tl.store(indices_ptr + slots, absent, mask=(slots >= count) & (slots < max_tokens))


def sampled_groups(num_tokens: int) -> int:
    """Return how many groups of neighbours a sample has."""
    return max(LEAST_SAMPLED, min(next_power_of_2(num_tokens // 256), MOST_SAMPLED))


def expected_candidates(num_tokens: int, max_tokens: int) -> float:
    """Return about how many tokens reach the bound of `bound_by_sample`."""
    neighbours = int(NEIGHBOURS)
    share = min(1.0, sampled_groups(num_tokens) * neighbours / num_tokens)
    expected = share * max_tokens
    return (expected + DEVIATIONS * sqrt(neighbours * expected) + neighbours) / share


def select_tokens_by_score(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    check_triton_dtype("scores", scores, (torch.float16,))
    batch, kv_heads, num_tokens = scores.shape
    pairs, device = batch * kv_heads, scores.device
    indices = torch.empty((batch, kv_heads, max_tokens), dtype=torch.int32, device=device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    scores = scores.contiguous()
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    sizes = (kv_heads, num_tokens, max_tokens, sink_tokens)
    launch: dict[str, Any] = {"PAGE_SIZE": page_size, "PADDED": num_tokens % 16 == 0, **launch_options(device)}
    candidates = found = counts
    programs, span, at_once = 1, 0, num_tokens
    if num_tokens > MOST_AT_ONCE:
        # Two programs for each multiprocessor, of at least a tile.
        programs = max(1, min(MOST_PROGRAMS, 2 * multiprocessors(device) // pairs))
        span = min(max(TILE, next_power_of_2(cdiv(num_tokens, programs))), MOST_SPAN)
        programs = cdiv(num_tokens, span)
        candidates = torch.empty((pairs, programs, span), dtype=torch.int32, device=device)
        found = torch.empty((pairs, programs + 1), dtype=torch.int32, device=device)
        keep_candidates_kernel[(programs, pairs)](
            scores,
            candidates,
            found,
            *row_bounds,
            *sizes,
            DEVIATIONS=DEVIATIONS,
            SPAN=span,
            TILE=TILE,
            SAMPLED=sampled_groups(num_tokens),
            num_warps=max(1, TILE // 512),
            **launch,
        )
        at_once = round(4 / 3 * expected_candidates(num_tokens, max_tokens))
    at_once = max(LEAST_AT_ONCE, min(next_power_of_2(at_once), MOST_AT_ONCE))
    write_chosen_kernel[(1, pairs)](
        scores,
        candidates,
        found,
        *row_bounds,
        indices,
        counts,
        *sizes,
        programs,
        PROGRAMS=next_power_of_2(programs),
        SPAN=span,
        GROUPS=at_once // int(TOGETHER),
        num_warps=max(1, at_once // 256),
        **launch,
    )
    return indices, counts
