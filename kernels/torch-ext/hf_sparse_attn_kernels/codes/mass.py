"""Triton kernels of `select_tokens_by_mass`: the border between chosen and other weights is found, then all compact.

Weights have STEPS different values, so a histogram of the steps holds all that sums of weights depend on. Three
launches find the greatest score, count the steps, and write the choice: each needs what all programs of a row and KV
head found before. Every program adds up the others' histograms itself, so there are no atomics, no program waits for
another, and nothing has to be cleared.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._topk import _ranks
from .._triton import cdiv, launch_options, multiprocessors, next_power_of_2, wait_for_previous_kernel
from . import MOST_HALF
from .mass_weights import SHARE_BITS, STEPS, STEPS_PER_NAT, step_weights, whole_share
from .search import row_of_pair

BINS = tl.constexpr(STEPS)
ROWS_AT_ONCE = tl.constexpr(4)  # histograms that are added at once
PER_NAT = tl.constexpr(STEPS_PER_NAT)
UNIT_BITS = tl.constexpr(SHARE_BITS)
LIMIT = tl.constexpr(MOST_HALF)
LEAST_TILE, MOST_TILE = 2048, 16384
"""Tokens of a program; at most 2 ** 15 - 1, which a histogram's bin can hold."""


@triton.jit
def load_candidates(scores_ptr, length, sink_tokens, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """Load this program's scores; return the tokens, whether each is always chosen, and the scores, all [TILE].

    The score of a token without a weight is -inf. PADDED allows reading up to a multiple of 16 scores: a mask that
    changes only there keeps the loads vectorized.
    """
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = tokens < length
    mask = tokens < (length + 15) // 16 * 16 if PADDED else exists
    scores = tl.load(scores_ptr + tokens, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    newest_page = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    is_forced = exists & ((tokens < sink_tokens) | (tokens >= newest_page))
    has_weight = exists & (is_forced == 0) & (scores > float("-inf"))  # not NaN
    return tokens, is_forced, tl.where(has_weight, tl.minimum(scores, LIMIT), float("-inf"))


@triton.jit
def load_greatest(greatest_ptr, programs, BLOCK_P: tl.constexpr):
    """Return the greatest score that any program of the pair found, or the least finite one."""
    program = tl.arange(0, BLOCK_P)
    found = tl.load(greatest_ptr + program, mask=program < programs, other=float("-inf"), cache_modifier=".cg")
    return tl.maximum(tl.max(found), -LIMIT)


@triton.jit
def steps_below(greatest, scores):
    """Return by how many steps each weight is below the greatest, int32; BINS for tokens without a weight."""
    has_weight = scores > float("-inf")
    # One subtraction and one product, each rounded: the same in every implementation. Nothing may be added to it.
    below = tl.where(has_weight, greatest - scores, 0.0) * PER_NAT
    steps = tl.minimum(below, BINS - 1).to(tl.int32)
    return tl.where(has_weight, steps, BINS)


@triton.jit
def store_histogram(histograms_ptr, digits, counted):
    """Store how often this program counted each digit."""
    counts = tl.histogram(digits, BINS, mask=counted)
    tl.store(histograms_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts.to(tl.int16))


@triton.jit
def add_histograms(histograms_ptr, programs):
    """Add the histograms of all programs of a pair, and those of the programs before this one."""
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in range(0, programs, ROWS_AT_ONCE):
        rows = (first + tl.arange(0, ROWS_AT_ONCE))[:, None]
        at = histograms_ptr + rows * BINS + tl.arange(0, BINS)[None, :]
        counts = tl.load(at, mask=rows < programs, other=0, cache_modifier=".cg").to(tl.int32)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(rows < tl.program_id(0), counts, 0), axis=0)
    return total, before


@triton.jit
def write_taken(
    indices_ptr,  # of the pair
    tokens,
    is_above,
    is_tied,
    above_before,  # how many tokens of the tiles before are above
    ties_before,
    ties,
    TILE: tl.constexpr,
):
    """Write the tokens of a tile that are above the least chosen one, and those of its first `ties` equals."""
    ranks = _ranks(is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16), TILE)  # both in one scan
    ties_until = ties_before + (ranks >> 16)
    places = above_before + (ranks & 0xFFFF) + tl.minimum(ties_until, ties)
    tl.store(indices_ptr + places, tokens, mask=is_above | (is_tied & (ties_until < ties)))


@triton.jit
def count_by_mass(total, weights_ptr, share):
    """Return how many of the heaviest tokens hold `share` of the weight, given how many have each weight."""
    bins = tl.arange(0, BINS)
    weights = tl.load(weights_ptr + bins)
    mass = total.to(tl.int64) * weights
    whole = tl.sum(mass)
    # whole * share, rounded up, without numbers above 2 ** 63.
    UNIT: tl.constexpr = 2**UNIT_BITS
    need = (whole >> UNIT_BITS) * share + (((whole & (UNIT - 1)) * share + (UNIT - 1)) >> UNIT_BITS)
    border = tl.sum((tl.cumsum(mass, axis=0) < need).to(tl.int32))
    heavier = tl.sum(tl.where(bins < border, mass, 0))
    of_border = tl.sum(tl.where(bins == border, weights, 0))
    return tl.sum(tl.where(bins < border, total, 0)) + ((need - heavier + of_border - 1) // of_border).to(tl.int32)


@triton.jit
def find_greatest_kernel(
    scores_ptr,  # float16 [pairs, num_tokens]
    greatest_ptr,  # float32 [pairs, programs], written
    start_ptr,
    end_ptr,
    kv_heads,
    num_tokens,
    sink_tokens,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the greatest score of a tile's candidates; grid (programs, pairs)."""
    wait_for_previous_kernel(PDL)
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    programs = tl.maximum(tl.cdiv(length, TILE), 1)
    program = tl.program_id(0)
    if program < programs:
        _, _, scores = load_candidates(scores_ptr + pair * num_tokens, length, sink_tokens, PAGE_SIZE, TILE, PADDED)
        tl.store(greatest_ptr + pair * tl.num_programs(0) + program, tl.max(scores))


@triton.jit
def count_steps_kernel(
    scores_ptr,
    greatest_ptr,  # float32 [pairs, programs]
    histograms_ptr,  # int16 [pairs, programs, BINS], written
    start_ptr,
    end_ptr,
    kv_heads,
    num_tokens,
    sink_tokens,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count how many of a tile's candidates are so many steps below the greatest; grid (programs, pairs)."""
    wait_for_previous_kernel(PDL)
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    programs = tl.maximum(tl.cdiv(length, TILE), 1)
    program = tl.program_id(0)
    if program < programs:
        _, _, scores = load_candidates(scores_ptr + pair * num_tokens, length, sink_tokens, PAGE_SIZE, TILE, PADDED)
        line = pair * tl.num_programs(0)
        steps = steps_below(load_greatest(greatest_ptr + line, programs, BLOCK_P), scores)
        store_histogram(histograms_ptr + line * BINS, tl.minimum(steps, BINS - 1), steps < BINS)


@triton.jit
def write_heaviest_kernel(
    scores_ptr,
    greatest_ptr,
    histograms_ptr,
    weights_ptr,  # int64 [BINS]
    start_ptr,
    end_ptr,
    indices_ptr,  # int32 [pairs, max_tokens], written
    counts_ptr,  # int32 [pairs], written
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    share,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find how many tokens are chosen, and write a tile's chosen tokens at their places; grid (programs, pairs)."""
    wait_for_previous_kernel(PDL)
    pair, length = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens)
    programs = tl.maximum(tl.cdiv(length, TILE), 1)
    program = tl.program_id(0)
    indices_ptr += pair * max_tokens
    line = pair * tl.num_programs(0)
    total, before = add_histograms(histograms_ptr + line * BINS, programs)
    sinks = tl.minimum(sink_tokens, length)
    newest = tl.maximum(tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE, sinks)
    forced = sinks + length - newest
    chosen = tl.minimum(count_by_mass(total, weights_ptr, share), max_tokens - forced)
    # All tokens above the border are chosen, and `ties` of those on it, those with the lowest indices.
    bins = tl.arange(0, BINS)
    border = tl.sum((tl.cumsum(total, axis=0) < chosen).to(tl.int32))
    ties = chosen - tl.sum(tl.where(bins < border, total, 0))
    ties_before = tl.sum(tl.where(bins == border, before, 0))
    first_token = program * TILE
    above_before = tl.sum(tl.where(bins < border, before, 0))
    above_before += tl.minimum(first_token, sinks) + tl.maximum(first_token - newest, 0)
    if program < programs:
        scores_ptr += pair * num_tokens
        tokens, is_forced, scores = load_candidates(scores_ptr, length, sink_tokens, PAGE_SIZE, TILE, PADDED)
        steps = steps_below(load_greatest(greatest_ptr + line, programs, BLOCK_P), scores)
        is_above = is_forced | (steps < border)
        is_tied = (steps == border) & (is_forced == 0)
        write_taken(indices_ptr, tokens, is_above, is_tied, above_before, ties_before, ties, TILE)
    count = forced + chosen
    if program == 0:
        tl.store(counts_ptr + pair, count)
    absent = tl.full((TILE,), -1, tl.int32)
    for first in range(first_token, max_tokens, tl.num_programs(0) * TILE):
        slots = first + tl.arange(0, TILE)
        tl.store(indices_ptr + slots, absent, mask=(slots >= count) & (slots < max_tokens))


def select_tokens_by_mass(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    top_p: float,
    sink_tokens: int,
    page_size: int,
    max_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    check_triton_dtype("scores", scores, (torch.float16,))
    batch, kv_heads, num_tokens = scores.shape
    max_tokens = num_tokens if max_tokens is None else max_tokens
    pairs, device = batch * kv_heads, scores.device
    # About one program for each multiprocessor: each reads the histograms of all programs of its pair.
    tile = next_power_of_2(cdiv(num_tokens * pairs, multiprocessors(device)))
    tile = max(LEAST_TILE, min(tile, MOST_TILE))
    programs = max(1, cdiv(num_tokens, tile))
    indices = torch.empty((batch, kv_heads, max_tokens), dtype=torch.int32, device=device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    greatest = torch.empty((pairs, programs), dtype=torch.float32, device=device)
    histograms = torch.empty((pairs, programs, STEPS), dtype=torch.int16, device=device)

    scores = scores.contiguous()
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    launch = {
        "PAGE_SIZE": page_size,
        "TILE": tile,
        "PADDED": num_tokens % 16 == 0,
        "num_warps": max(1, min(16, tile // 256)),
        **launch_options(device),
    }
    grid, block_p = (programs, pairs), next_power_of_2(programs)
    sizes = (kv_heads, num_tokens)
    find_greatest_kernel[grid](scores, greatest, *row_bounds, *sizes, sink_tokens, **launch)
    count_steps_kernel[grid](scores, greatest, histograms, *row_bounds, *sizes, sink_tokens, BLOCK_P=block_p, **launch)
    write_heaviest_kernel[grid](
        scores,
        greatest,
        histograms,
        step_weights(device),
        *row_bounds,
        indices,
        counts,
        *sizes,
        max_tokens,
        sink_tokens,
        whole_share(top_p),
        BLOCK_P=block_p,
        **launch,
    )
    return indices, counts
