"""Exact top-k of long rows, spread over the device: a radix search for the k-th largest value, then compaction."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._topk import _key_of, _ranks, find_digit
from .._triton import cdiv, wait_for_previous_kernel
from .candidates import Candidates, candidates_of

# A value's 32 bits are three digits, the highest first, of 8, 12 and 12 bits. The first is counted for every value, so
# it has few bins. Usually few values are left then, and these are counted one by one.
BINS_1 = tl.constexpr(256)
BINS = tl.constexpr(4096)
COPIES = tl.constexpr(16)  # of the first histogram, in the space of one of the others
BINS_AT_ONCE = tl.constexpr(512)  # that a program holds in registers
COUNTED_ONE_BY_ONE = tl.constexpr(64)  # values of a tile, at most

# A line's search buffer, int32, holds three histograms; after the first and the second digit, the leading bits of the
# k-th largest value and its rank among the values with these bits; then a word for each tile.
STATE = tl.constexpr(3 * BINS.value)
TILE_COUNTS = tl.constexpr(STATE.value + 4)
CLEARED_AT_ONCE = tl.constexpr(1024)

# A tile's word: the number of its values above the k-th largest, the number equal to it, and a flag when written.
TIED = tl.constexpr(14)  # where the second number begins
TIED_BELOW = tl.constexpr((1 << 14) - 1)
WRITTEN = tl.constexpr(1 << 30)


def search_size(candidates: Candidates) -> int:
    """Return the size of a line's search buffer in words."""
    size: int = cdiv(TILE_COUNTS.value + candidates.tiles, CLEARED_AT_ONCE.value) * CLEARED_AT_ONCE.value
    return size


@triton.jit
def clear_search(search_ptr, size):
    """Set a line's search buffer to 0."""
    for first in range(0, size, CLEARED_AT_ONCE):
        tl.store(search_ptr + first + tl.arange(0, CLEARED_AT_ONCE), tl.zeros((CLEARED_AT_ONCE,), tl.int32))


@triton.jit
def order_key(values):
    """Map a float32 to a uint32 of the same order: NaN ranks with the lowest, -0.0 ties with 0.0."""
    values = tl.where(values == values, values, float("-inf"))
    values = tl.where(values == 0.0, 0.0, values)
    return (_key_of(values) ^ -0x80000000).to(tl.uint32, bitcast=True)


@triton.jit
def count_first_digits(search_ptr, tile, values, counted):
    """Count the first digits of a tile of values.

    Few bins mean that the programs of a row collide, so each adds to one of COPIES histograms.
    """
    search_ptr += tile % COPIES * BINS_1
    digits = (order_key(values) >> 24).to(tl.int32)
    counts = tl.histogram(digits, BINS_1, mask=counted)
    tl.atomic_add(search_ptr + tl.arange(0, BINS_1), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _find_digit(histogram_ptr, rank, NUM_BINS: tl.constexpr):
    """Return the digit of the rank-th largest value, and its rank among the values with this digit."""
    bins = tl.arange(0, NUM_BINS)
    if NUM_BINS == BINS_1:
        counts = tl.zeros((NUM_BINS,), tl.int32)
        for copy in tl.static_range(COPIES):
            counts += tl.load(histogram_ptr + copy * NUM_BINS + bins)
    else:
        counts = tl.load(histogram_ptr + bins)
    return find_digit(counts, rank, NUM_BINS)


@triton.jit
def _narrow(search_ptr, rank, stores, DIGITS: tl.constexpr):
    """Return the leading DIGITS digits of the value of this rank, and its rank among the values that have them.

    Every program finds the last digit itself in a complete histogram. The program that `stores` keeps the result for
    later kernels.
    """
    if DIGITS == 1:
        digit, rank = _find_digit(search_ptr, rank, BINS_1)
        bits = digit.to(tl.uint32)
    else:
        bits = tl.load(search_ptr + STATE + 2 * DIGITS - 4).to(tl.uint32, bitcast=True)
        rank = tl.load(search_ptr + STATE + 2 * DIGITS - 3)
        digit, rank = _find_digit(search_ptr + (DIGITS - 1) * BINS, rank, BINS)
        bits = (bits << 12) | digit.to(tl.uint32)
    if stores:
        tl.store(search_ptr + STATE + 2 * DIGITS - 2, bits.to(tl.int32, bitcast=True))
        tl.store(search_ptr + STATE + 2 * DIGITS - 1, rank)
    return bits, rank


@triton.jit
def count_digits_kernel(
    values_ptr,  # [lines, width]
    pooled_ptr,  # [lines, width], written, for POOL > 1 only
    start_ptr,
    end_ptr,
    reuse_ptr,
    num_tokens,
    max_tokens,
    sink_tokens,
    recent_tokens,
    search_ptr,  # [lines, search_size]
    search_size,
    per_row,
    width,
    num_voted,
    LEVEL: tl.constexpr,
    POOL: tl.constexpr,
    CACHE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count digit LEVEL of the values of a line whose higher digits match the search; grid (tiles, lines)."""
    wait_for_previous_kernel(PDL)
    line = tl.program_id(1).to(tl.int64)
    first, last = candidates_of(
        line // per_row, start_ptr, end_ptr, reuse_ptr, num_tokens, max_tokens, sink_tokens, recent_tokens, CACHE
    )
    tile = tl.program_id(0)
    if (tile * BLOCK_T + BLOCK_T > first) & (tile * BLOCK_T < last) & (first < last):
        search_ptr += line * search_size
        values_ptr += line * width
        tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        counted = (tokens >= first) & (tokens < last)
        values = tl.load(values_ptr + tokens)
        if POOL > 1:
            values = tl.where(counted & (values == values), values, float("-inf"))
            for distance in range(1, POOL // 2 + 1):
                for side in tl.static_range(2):
                    near = tokens + (2 * side - 1) * distance
                    other = tl.load(values_ptr + near, mask=(near >= first) & (near < last), other=float("-inf"))
                    values = tl.where(other > values, other, values)
            tl.store(pooled_ptr + line * width + tokens, values)
        if LEVEL == 1:
            count_first_digits(search_ptr, tile, values, counted)
        else:
            keys = order_key(values)
            rank = tl.minimum(num_voted, last - first)
            bits, _ = _narrow(search_ptr, rank, tile == first // BLOCK_T, LEVEL - 1)
            if LEVEL == 2:
                counted &= keys >> 24 == bits
                digits = ((keys >> 12) & 4095).to(tl.int32)
            else:
                counted &= keys >> 12 == bits
                digits = (keys & 4095).to(tl.int32)
            search_ptr += (LEVEL - 1) * BINS
            if tl.sum(counted.to(tl.int32)) <= COUNTED_ONE_BY_ONE:
                tl.atomic_add(search_ptr + digits, 1, mask=counted, sem="relaxed")
            else:
                for first_bin in range(0, BINS, BINS_AT_ONCE):
                    here = counted & (digits >= first_bin) & (digits < first_bin + BINS_AT_ONCE)
                    if tl.max(here.to(tl.int32)) > 0:
                        counts = tl.histogram(digits % BINS_AT_ONCE, BINS_AT_ONCE, mask=here)
                        at = search_ptr + first_bin + tl.arange(0, BINS_AT_ONCE)
                        tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _sums_of_words(words_ptr, earlier):
    """Return the sum of the words' first numbers, plus 2^24 times that of the second ones, plus 2^48 for each word.

    Other programs write them meanwhile. Several warps may load the same word, and find different values, of which a sum
    takes any. So whether all words are there, and what they add up to, has to come of one sum.
    """
    words = tl.load(words_ptr, mask=earlier, other=WRITTEN, volatile=True).to(tl.int64)
    return tl.sum((words & TIED_BELOW) + ((words >> TIED & TIED_BELOW) << 24) + ((words >> 30) << 48))


@triton.jit
def taken_of_tile(
    values_ptr,  # of the line, like the next
    search_ptr,
    first,
    last,
    tile,
    BLOCK_T: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return which values of a tile are among the k largest of the line, and how many are in the tiles before it.

    The first ones count among values equal to the k-th largest. Waits for the programs of earlier tiles, which start
    first.
    """
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    counted = (tokens >= first) & (tokens < last)
    keys = order_key(tl.load(values_ptr + tokens))
    bits, ties = _narrow(search_ptr, 0, False, 3)
    taken = counted & (keys > bits)
    tied = counted & (keys == bits)
    num_above = tl.sum(taken.to(tl.int32))
    num_tied = tl.sum(tied.to(tl.int32))
    words_ptr = search_ptr + TILE_COUNTS
    tl.atomic_xchg(words_ptr + tile, num_above | (num_tied << TIED) | WRITTEN, sem="relaxed")
    before = tl.zeros((), tl.int32)
    if num_above + num_tied > 0:
        every = tl.arange(0, BLOCK_TILES)
        earlier = (every < tile) & (every >= first // BLOCK_T)
        sums = _sums_of_words(words_ptr + every, earlier)
        while (sums >> 48) < BLOCK_TILES:
            sums = _sums_of_words(words_ptr + every, earlier)
        tied_before = (sums >> 24).to(tl.int32) & 0xFFFFFF
        before = (sums.to(tl.int32) & 0xFFFFFF) + tl.minimum(tied_before, ties)
        if tied_before + num_tied <= ties:
            taken |= tied
        elif tied_before < ties:
            taken |= tied & (_ranks(tied, BLOCK_T) < ties - tied_before)
    return tokens, taken, before


def find_top(
    values: torch.Tensor,
    candidates: Candidates,
    search: torch.Tensor,
    *,
    num_voted: int,
    pool_size: int,
    first_level: int,
) -> torch.Tensor:
    """Search each line of `values` [lines, width] for its `num_voted`-th largest candidate, except for the last digit.

    With `first_level` 2 the first digits are already counted. Returns the searched values: the pooled ones, if any.
    """
    lines = values.shape[0]
    pooled = torch.empty_like(values) if pool_size > 1 else values
    for level in range(first_level, 4):
        count_digits_kernel[(candidates.tiles, lines)](
            values if level == 1 else pooled,
            pooled,
            *candidates.arguments(),
            search,
            search_size(candidates),
            lines // candidates.seq_start.shape[0],
            candidates.width,
            num_voted,
            LEVEL=level,
            POOL=pool_size if level == 1 else 1,
            **candidates.options() | {"num_warps": 8},
        )
    return pooled
