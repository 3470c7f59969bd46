"""Parts of kernels that search a row's scores for the least chosen one.

Tokens and candidates lie in groups of a few: a thread loads a group at once and counts within it on its own.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._topk import _ranks

NEIGHBOURS = tl.constexpr(8)  # tokens of a group: 16 bytes of scores
LINE = tl.constexpr(64)  # tokens whose scores share a line of the cache
TOGETHER = tl.constexpr(4)  # candidates of a group: 16 bytes

# A score of 16 bits as an int of the same order.
FORCED = tl.constexpr(0x7FFF)
INFINITE = tl.constexpr(0x7C00)
ABSENT = tl.constexpr(-0x8000)
DOUBLING = tl.constexpr(0x400)  # from a positive score to twice as much


@triton.jit
def row_of_pair(start_ptr, end_ptr, kv_heads, num_tokens):
    """Return the pair and the row's length."""
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    return pair, tl.minimum(tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0), num_tokens)


@triton.jit
def span_of(length, programs):
    """Return how many tokens of a row each program has, all lines of scores but the row's last ones whole."""
    return tl.cdiv(tl.cdiv(length, programs), LINE) * LINE


@triton.jit
def key_of_bits(bits):
    """Map the bits of a float16, an int32 with their sign, to an int32 of the same order."""
    magnitude = bits & 0x7FFF
    keys = tl.where(bits < 0, -magnitude, magnitude)  # -0.0 ties with 0.0
    return tl.where(magnitude > INFINITE, -INFINITE, keys)  # NaN ranks with -inf


@triton.jit
def score_of_key(key):
    """Return the float16 of a key."""
    bits = tl.where(key < 0, -key - 0x8000, key)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def split_range(low, high):
    """Return two keys that split a range in three; the same one twice if only one lies inside."""
    third = tl.maximum((high - low) // 3, 1)
    return low + third, high - third


@triton.jit
def count_both(reaches_one, reaches_two):
    """Count two sets of flags, fewer than 2 ** 15 each, in one sum."""
    counts = tl.sum(reaches_one.to(tl.int32) + (reaches_two.to(tl.int32) << 16))
    return counts & 0xFFFF, counts >> 16


@triton.jit
def narrow(low, high, reach_low, reach_high, one, two, reach_one, reach_two, rank):
    """Return the third of a range where the rank-th largest value lies, and how many values reach its ends.

    At least `rank` values reach `low`, and fewer reach `high`.
    """
    if reach_two >= rank:
        low = two
        reach_low = reach_two
    else:
        high = two
        reach_high = reach_two
        if reach_one >= rank:
            low = one
            reach_low = reach_one
        else:
            high = one
            reach_high = reach_one
    return low, high, reach_low, reach_high


@triton.jit
def count_four(scores, one, two, three, four):
    """Count how many scores, fewer than 2 ** 15, reach each of four keys' scores, in one sum."""
    low = (scores >= score_of_key(one)).to(tl.int32) + ((scores >= score_of_key(two)).to(tl.int32) << 16)
    high = (scores >= score_of_key(three)).to(tl.int32) + ((scores >= score_of_key(four)).to(tl.int32) << 16)
    counts = tl.sum(low.to(tl.int64) + (high.to(tl.int64) << 32))
    low = counts.to(tl.int32)
    high = (counts >> 32).to(tl.int32)
    return low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16


@triton.jit
def raise_or_lower(low, high, reach_low, key, reach, rank):
    """Narrow a range where the rank-th largest value lies, given how many values reach a key above its lower end.

    Returns the range, and how many reach its lower end. Keys come in ascending order.
    """
    is_reached = reach >= rank
    low = tl.where(is_reached, key, low)
    reach_low = tl.where(is_reached, reach, reach_low)
    return low, tl.where(is_reached, high, tl.minimum(high, key)), reach_low


@triton.jit
def ranks_in_groups(counts):
    """Add up the counts [groups, members] before each one; return these sums and the counts of groups, [groups]."""
    of_groups = tl.sum(counts, axis=1)
    return _ranks(of_groups, counts.shape[0])[:, None] + tl.cumsum(counts, axis=1) - counts, of_groups


@triton.jit
def store_groups(out_ptr, places, values, is_stored):
    """Store values [groups, members] at their places, one of each group at a time.

    All at once, the compiler would exchange them between threads first, for the sake of neighbouring places.
    """
    members = tl.arange(0, values.shape[1])[None, :]
    for member in tl.static_range(values.shape[1]):
        is_here = members == member
        place = tl.sum(tl.where(is_here, places, 0), axis=1)
        value = tl.sum(tl.where(is_here, values, 0), axis=1)
        tl.store(out_ptr + place, value, mask=tl.max((is_here & is_stored).to(tl.int32), axis=1) > 0)
