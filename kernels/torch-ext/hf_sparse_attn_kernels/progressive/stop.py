"""The stop of a progressive read: found from the sums of all tickets, in order."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def _joined(max_a, sum_a, least_a, max_b, sum_b, least_b):
    """Join the sums of two lists of blocks, each given in units of its maximum, and their least sums."""
    top = tl.maximum(max_a, max_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = sum_a * tl.exp2(max_a - shift) + sum_b * tl.exp2(max_b - shift)
    return top, total, tl.minimum(least_a, least_b)


@triton.jit
def find_stop(
    partial_max_ptr,  # [tickets, group], in units of log2, like all pointers here of the row and KV head
    partial_sum_ptr,
    partial_least_ptr,
    partial_tokens_ptr,  # [tickets], for COUNT
    group,
    tickets,
    count,
    num_blocks,
    log2_odds,
    TICKET: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Return the number of tickets up to the stop, all of them if P never exceeds the threshold, and their tokens.

    Partial results of tickets after the stop may never have been written: they influence nothing.
    """
    heads = tl.arange(0, MERGE_G)
    lanes = tl.arange(0, BLOCK_T)
    before_max = tl.full((MERGE_G,), float("-inf"), tl.float32)
    before_sum = tl.zeros((MERGE_G,), tl.float32)
    before_least = tl.full((MERGE_G,), float("inf"), tl.float32)
    stop = tickets
    read = tl.zeros((), tl.int32)
    first = 0
    while first < stop:
        ticket = first + lanes
        at = ticket[:, None] * group + heads[None, :]  # [BLOCK_T, MERGE_G]
        mask = (ticket < tickets)[:, None] & (heads < group)[None, :]
        top = tl.load(partial_max_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(partial_sum_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
        least = tl.load(partial_least_ptr + at, mask=mask, other=float("inf"), cache_modifier=".cg")
        top, total, least = tl.associative_scan((top, total, least), 0, _joined)
        top, total, least = _joined(before_max[None, :], before_sum[None, :], before_least[None, :], top, total, least)
        left = tl.maximum(num_blocks - tl.minimum((ticket + 1) * TICKET, count), 0).to(tl.float32)
        is_enough = top - least + tl.log2(total) > log2_odds + tl.log2(left)[:, None]
        is_enough = tl.min((is_enough | (heads >= group)[None, :]).to(tl.int32), axis=1)
        is_stop = (is_enough == 1) & ((ticket + 1) % PARTS == 0) & (ticket < tickets)
        stop = tl.minimum(stop, tl.min(tl.where(is_stop, ticket + 1, tickets), axis=0))
        is_last = (lanes == BLOCK_T - 1)[:, None]
        before_max = tl.max(tl.where(is_last, top, float("-inf")), axis=0)
        before_sum = tl.sum(tl.where(is_last, total, 0.0), axis=0)
        before_least = tl.min(tl.where(is_last, least, float("inf")), axis=0)
        if COUNT:
            read += tl.sum(tl.load(partial_tokens_ptr + ticket, mask=ticket < stop, other=0, cache_modifier=".cg"))
        first += BLOCK_T
    return stop, read
