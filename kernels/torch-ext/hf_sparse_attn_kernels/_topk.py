"""Top-k without a sort, shared by the selecting Triton kernels: a search over the scores' bits, then compaction."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def _key_of(score):
    """Map a float32 to an int32 of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score_of(key):
    """Invert `_key_of`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _place(reached, num_blocks):
    """Estimate how far up the scores a bound lies that `reached` of them reach."""
    reached = tl.maximum(reached.to(tl.float32), 0.5)
    return tl.sqrt(tl.maximum(tl.log2(num_blocks.to(tl.float32) / reached), 0.0))


@triton.jit
def order_keys(scores, blocks, num_blocks, sink_blocks, recent_blocks):
    """Map scores to int32 of the same order, with forced blocks above every score and absent blocks below."""
    scores = scores.to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))  # NaN ranks with the lowest
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 ties with 0.0
    keys = _key_of(scores)
    forced = (blocks < sink_blocks) | (blocks >= num_blocks - recent_blocks)
    keys = tl.where(forced, 0x7FFFFFFF, keys)
    return tl.where(blocks < num_blocks, keys, -0x80000000)


@triton.jit
def load_order_keys(scores_ptr, blocks, num_blocks, sink_blocks, recent_blocks, PADDED: tl.constexpr):
    """Load scores as order keys.

    PADDED allows reading up to a multiple of 16 scores: a mask that changes only there keeps the loads vectorized.
    """
    mask = blocks < (num_blocks + 15) // 16 * 16 if PADDED else blocks < num_blocks
    scores = tl.load(scores_ptr + blocks, mask=mask, other=0.0, cache_modifier=".cg")
    return order_keys(scores, blocks, num_blocks, sink_blocks, recent_blocks)


@triton.jit
def write_top_blocks(
    first_keys,  # int32 [BLOCK_N], order keys of the first BLOCK_N blocks, which stay in registers
    first_blocks,  # int32 [BLOCK_N], their indices, ascending
    floor,  # a key that at least `count` keys are known to reach, else the lowest
    scores_ptr,  # the row's scores, read beyond the first BLOCK_N
    indices_ptr,  # the row's block indices
    num_blocks,
    count,
    max_blocks,
    sink_blocks,
    recent_blocks,
    BLOCK_N: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the indices of the `count` blocks with the largest keys, ascending, then -1 up to `max_blocks`.

    Of equal keys the lower index wins. Returns the count-th largest key, or a lower one if all blocks are taken.
    """
    lanes = tl.arange(0, BLOCK_N)
    # The count-th largest key is the largest one that at least `count` keys reach. It lies between the least score and
    # one above the greatest (if only forced blocks fit).
    least, greatest = _range_of_scores(first_keys)
    if not ONE_TILE:
        for first in range(BLOCK_N, num_blocks, BLOCK_N):
            keys = load_order_keys(scores_ptr, first + lanes, num_blocks, sink_blocks, recent_blocks, PADDED)
            tile_least, tile_greatest = _range_of_scores(keys)
            least = tl.minimum(least, tile_least)
            greatest = tl.maximum(greatest, tile_greatest)
    low = tl.minimum(least, greatest)
    reach_low = num_blocks  # how many keys reach `low`
    if floor > low:
        low = floor
        reach_low = tl.sum((first_keys >= low).to(tl.int32))
    span = (greatest - low + 1).to(tl.uint32, bitcast=True)  # the bound is in low + [0, span]
    span = tl.where(reach_low > count, span, 0)
    place_low = _place(reach_low, num_blocks)
    place_high = _place(tl.minimum(sink_blocks + recent_blocks, count), num_blocks)
    place = _place(count, num_blocks)
    low_score = _score_of(low)
    high_score = _score_of(greatest)
    step = 0
    last_side = 0
    while span > 0:
        # The next guess interpolates between the ends, halving the distance to an end that stayed twice (the Illinois
        # rule). Every fourth guess halves the range of keys, which limits the steps for any scores.
        share = (place - place_low) / tl.maximum(place_high - place_low, 1e-6)
        guess_key = _key_of(low_score + (high_score - low_score) * share)
        half_way = (step % 4 == 3) | (guess_key <= low)
        guess = tl.where(half_way, (span + 1) >> 1, (guess_key - low).to(tl.uint32, bitcast=True))
        guess = tl.minimum(guess, span)
        bound = low + guess.to(tl.int32, bitcast=True)
        reached = tl.sum((first_keys >= bound).to(tl.int32))
        if not ONE_TILE:
            for first in range(BLOCK_N, num_blocks, BLOCK_N):
                keys = load_order_keys(scores_ptr, first + lanes, num_blocks, sink_blocks, recent_blocks, PADDED)
                reached += tl.sum((keys >= bound).to(tl.int32))
        if reached >= count:
            low = bound
            low_score = _score_of(bound)
            reach_low = reached
            place_low = _place(reached, num_blocks)
            place_high = tl.where(last_side == 1, (place + place_high) * 0.5, place_high)
            span = tl.where(reached == count, 0, span - guess)
            last_side = 1
        else:
            high_score = _score_of(bound)
            place_high = _place(reached, num_blocks)
            place_low = tl.where(last_side == 2, (place + place_low) * 0.5, place_low)
            span = guess - 1
            last_side = 2
        step += 1
    # Number of keys equal to the bound that are taken: all of them, or those with the lowest indices.
    ties_left = count
    if reach_low > count:
        ties_left -= tl.sum((first_keys > low).to(tl.int32))
        if not ONE_TILE:
            for first in range(BLOCK_N, num_blocks, BLOCK_N):
                keys = load_order_keys(scores_ptr, first + lanes, num_blocks, sink_blocks, recent_blocks, PADDED)
                ties_left -= tl.sum((keys > low).to(tl.int32))
    written, ties_left = _write_tile(
        first_keys, first_blocks, low, ties_left, reach_low > count, 0, indices_ptr, BLOCK_N
    )
    if not ONE_TILE:
        for first in range(BLOCK_N, num_blocks, BLOCK_N):
            keys = load_order_keys(scores_ptr, first + lanes, num_blocks, sink_blocks, recent_blocks, PADDED)
            written, ties_left = _write_tile(
                keys, first + lanes, low, ties_left, reach_low > count, written, indices_ptr, BLOCK_N
            )
    for first in range(count // BLOCK_N * BLOCK_N, max_blocks, BLOCK_N):
        slots = first + lanes
        tl.store(indices_ptr + slots, tl.full((BLOCK_N,), -1, tl.int32), mask=(slots >= count) & (slots < max_blocks))
    return low


@triton.jit
def _range_of_scores(keys):
    """Return the least and the greatest key of a score that is neither forced nor absent."""
    is_score = (keys != 0x7FFFFFFF) & (keys != -0x80000000)
    return tl.min(tl.where(is_score, keys, 0x7FFFFFFF)), tl.max(tl.where(is_score, keys, -0x7FFFFFFF))


@triton.jit
def _ranks(flags, BLOCK_N: tl.constexpr):
    """Count the flags of a tile set before each one, [BLOCK_N].

    In two levels, the longer one within few threads: a scan of the whole tile would take several times as long.
    """
    rows = tl.reshape(flags.to(tl.int32), (BLOCK_N // 32, 32))
    in_row = tl.sum(rows, axis=1)
    before_row = tl.cumsum(in_row, axis=0) - in_row
    return tl.reshape(before_row[:, None] + tl.cumsum(rows, axis=1) - rows, (BLOCK_N,))


@triton.jit
def find_digit(counts, rank, NUM_BINS: tl.constexpr):
    """Return the digit of the value of a rank, counted from 1 at the largest, and its rank among those with this digit.

    `counts` [NUM_BINS] says how many values have each digit.
    """
    bins = tl.arange(0, NUM_BINS)
    reached = tl.sum(counts) - _ranks(counts, NUM_BINS)  # values with this digit or a larger one
    digit = tl.maximum(tl.sum((reached >= rank).to(tl.int32)) - 1, 0)
    return digit, rank - tl.sum(tl.where(bins > digit, counts, 0))


@triton.jit
def _write_tile(keys, blocks, bound, ties_left, has_surplus, written, indices_ptr, BLOCK_N: tl.constexpr):
    """Append the indices of a tile's taken blocks; return the number of indices written and of ties left."""
    taken = keys >= bound
    if has_surplus:
        tied = keys == bound
        taken = (keys > bound) | (tied & (_ranks(tied, BLOCK_N) < ties_left))
        ties_left -= tl.sum(tied.to(tl.int32))
    tl.store(indices_ptr + written + _ranks(taken, BLOCK_N), blocks, mask=taken)
    return written + tl.sum(taken.to(tl.int32)), ties_left
