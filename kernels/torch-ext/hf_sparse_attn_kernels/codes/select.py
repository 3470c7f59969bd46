"""Triton kernels of `select_tokens_by_score`: the k-th highest score is found digit by digit, then all compact.

A score of 16 bits has two digits of 8. Three launches count the first digits, count the second digits, and write the
choice: each needs what all programs of a row and KV head counted before. Every program adds up the others' histograms
itself, so there are no atomics, no program waits for another, and nothing has to be cleared.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._topk import _ranks, find_digit
from .._triton import cdiv, launch_options, multiprocessors, next_power_of_2, wait_for_previous_kernel

BINS = tl.constexpr(256)  # of a digit
ADDED_AT_ONCE = tl.constexpr(16 * 256)  # bins of several histograms
FORCED = tl.constexpr(0xFFFF)  # above the key of every score, which is at most 0xFC00
LEAST_TILE, MOST_TILE = 1024, 16384
"""Tokens of a program; at most 2 ** 15 - 1, which a histogram's bin can hold."""


@triton.jit
def row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens, TILE: tl.constexpr):
    """Return the pair, the row's length, and its number of tiles, at least 1."""
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.minimum(tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0), num_tokens)
    return pair, length, tl.maximum(tl.cdiv(length, TILE), 1)


@triton.jit
def load_tile(scores_ptr, length, sink_tokens, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """Load this program's scores as keys: ints of 16 bits and the same order, with forced tokens above all scores.

    Returns the tokens, their keys, and whether they exist, all [TILE]. PADDED allows reading up to a multiple of 16
    scores: a mask that changes only there keeps the loads vectorized.
    """
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = tokens < length
    mask = tokens < (length + 15) // 16 * 16 if PADDED else exists
    bits = tl.load(scores_ptr + tokens, mask=mask, other=0.0, cache_modifier=".cg").to(tl.int16, bitcast=True)
    bits = bits.to(tl.int32)
    magnitude = bits & 0x7FFF
    signed = tl.where(bits < 0, -magnitude, magnitude)  # -0.0 ties with 0.0
    signed = tl.where(magnitude > 0x7C00, -0x7C00, signed)  # NaN ranks with -inf
    newest_page = tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    is_forced = (tokens < sink_tokens) | (tokens >= newest_page)
    return tokens, tl.where(is_forced, FORCED, 0x8000 + signed), exists


@triton.jit
def store_histogram(histograms_ptr, digits, counted, NUM_BINS: tl.constexpr):
    """Store how often this program counted each digit."""
    counts = tl.histogram(digits, NUM_BINS, mask=counted)
    tl.store(histograms_ptr + tl.program_id(0) * NUM_BINS + tl.arange(0, NUM_BINS), counts.to(tl.int16))


@triton.jit
def add_histograms(histograms_ptr, programs, NUM_BINS: tl.constexpr):
    """Add the histograms of all programs of a pair, and those of the programs before this one."""
    AT_ONCE: tl.constexpr = ADDED_AT_ONCE // NUM_BINS
    total = tl.zeros((NUM_BINS,), tl.int32)
    before = tl.zeros((NUM_BINS,), tl.int32)
    for first in range(0, programs, AT_ONCE):
        rows = (first + tl.arange(0, AT_ONCE))[:, None]
        at = histograms_ptr + rows * NUM_BINS + tl.arange(0, NUM_BINS)[None, :]
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
def count_first_digits_kernel(
    scores_ptr,  # float16 [pairs, num_tokens]
    histograms_ptr,  # int16 [pairs, programs, BINS], written
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
    """Count the first digits of a tile's keys; grid (programs, pairs)."""
    wait_for_previous_kernel(PDL)
    pair, length, programs = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens, TILE)
    if tl.program_id(0) < programs:
        scores_ptr += pair * num_tokens
        _, keys, exists = load_tile(scores_ptr, length, sink_tokens, PAGE_SIZE, TILE, PADDED)
        store_histogram(histograms_ptr + pair * tl.num_programs(0) * BINS, keys >> 8, exists, BINS)


@triton.jit
def count_second_digits_kernel(
    scores_ptr,
    first_ptr,  # int16 [pairs, programs, BINS]
    second_ptr,  # int16 [pairs, programs, BINS], written
    found_ptr,  # int32 [pairs, programs, 4], written
    start_ptr,
    end_ptr,
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the first digit of the least chosen key; count the second digits behind it; grid (programs, pairs).

    Each program keeps for itself this digit, the least chosen key's rank among the keys that have it, and how many
    keys above them the tiles before have.
    """
    wait_for_previous_kernel(PDL)
    pair, length, programs = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens, TILE)
    program = tl.program_id(0)
    if program < programs:
        scores_ptr += pair * num_tokens
        _, keys, exists = load_tile(scores_ptr, length, sink_tokens, PAGE_SIZE, TILE, PADDED)
        line = pair * tl.num_programs(0)
        total, before = add_histograms(first_ptr + line * BINS, programs, BINS)
        digit, rank = find_digit(total, tl.minimum(length, max_tokens), BINS)
        found_ptr += (line + program) * 4
        tl.store(found_ptr, digit)
        tl.store(found_ptr + 1, rank)
        tl.store(found_ptr + 2, tl.sum(tl.where(tl.arange(0, BINS) > digit, before, 0)))
        store_histogram(second_ptr + line * BINS, keys & 0xFF, exists & (keys >> 8 == digit), BINS)


@triton.jit
def write_chosen_kernel(
    scores_ptr,
    second_ptr,
    found_ptr,
    start_ptr,
    end_ptr,
    indices_ptr,  # int32 [pairs, max_tokens], written
    counts_ptr,  # int32 [pairs], written
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the least chosen key, and write a tile's chosen tokens at their places; grid (programs, pairs)."""
    wait_for_previous_kernel(PDL)
    pair, length, programs = row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens, TILE)
    program = tl.program_id(0)
    if program < programs:
        scores_ptr += pair * num_tokens
        indices_ptr += pair * max_tokens
        tokens, keys, exists = load_tile(scores_ptr, length, sink_tokens, PAGE_SIZE, TILE, PADDED)
        line = pair * tl.num_programs(0)
        found_ptr += (line + program) * 4
        first_digit = tl.load(found_ptr, cache_modifier=".cg")
        rank = tl.load(found_ptr + 1, cache_modifier=".cg")
        above_before = tl.load(found_ptr + 2, cache_modifier=".cg")
        total, before = add_histograms(second_ptr + line * BINS, programs, BINS)
        # `ties` of the keys equal to the least chosen one are chosen, those with the lowest indices.
        second_digit, ties = find_digit(total, rank, BINS)
        bins = tl.arange(0, BINS)
        above_before += tl.sum(tl.where(bins > second_digit, before, 0))
        ties_before = tl.sum(tl.where(bins == second_digit, before, 0))
        least = (first_digit << 8) | second_digit
        is_above = exists & (keys > least)
        is_tied = exists & (keys == least)
        write_taken(indices_ptr, tokens, is_above, is_tied, above_before, ties_before, ties, TILE)
        if program == 0:
            count = tl.minimum(length, max_tokens)
            tl.store(counts_ptr + pair, count)
            lanes = tl.arange(0, TILE)
            for first in range(count // TILE * TILE, max_tokens, TILE):
                slots = first + lanes
                absent = tl.full((TILE,), -1, tl.int32)
                tl.store(indices_ptr + slots, absent, mask=(slots >= count) & (slots < max_tokens))


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
    # About one program for each multiprocessor: each reads the histograms of all programs of its pair.
    tile = next_power_of_2(cdiv(num_tokens * pairs, multiprocessors(device)))
    tile = max(LEAST_TILE, min(tile, MOST_TILE))
    programs = max(1, cdiv(num_tokens, tile))
    indices = torch.empty((batch, kv_heads, max_tokens), dtype=torch.int32, device=device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    first = torch.empty((pairs, programs, BINS.value), dtype=torch.int16, device=device)
    second = torch.empty_like(first)
    found = torch.empty((pairs, programs, 4), dtype=torch.int32, device=device)

    scores = scores.contiguous()
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    sizes = (kv_heads, num_tokens)
    launch = {
        "PAGE_SIZE": page_size,
        "TILE": tile,
        "PADDED": num_tokens % 16 == 0,
        "num_warps": max(1, min(16, tile // 256)),
        **launch_options(device),
    }
    grid = (programs, pairs)
    count_first_digits_kernel[grid](scores, first, *row_bounds, *sizes, sink_tokens, **launch)
    count_second_digits_kernel[grid](
        scores, first, second, found, *row_bounds, *sizes, max_tokens, sink_tokens, **launch
    )
    write_chosen_kernel[grid](
        scores, second, found, *row_bounds, indices, counts, *sizes, max_tokens, sink_tokens, **launch
    )
    return indices, counts
