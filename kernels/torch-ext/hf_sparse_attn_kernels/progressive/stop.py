"""The stop of a progressive read: the first microbatch after which the tickets' sums are enough."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

MARGIN = tl.constexpr(0.01)
"""How far beyond the threshold, in log2 of P / (1 - P), P must be for a program to leave out a ticket.

It adds sums in another order than `find_stop`, with a relative error of at most 2^-24 per ticket. With the margin,
`find_stop` always finds the stop among the tickets that were taken."""


@triton.jit
def _joined(max_a, sum_a, rest_a, max_b, sum_b, rest_b):
    """Join the sums of two lists of blocks, each given in units of its maximum, and the estimates for the rest."""
    top = tl.maximum(max_a, max_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = sum_a * tl.exp2(max_a - shift) + sum_b * tl.exp2(max_b - shift)
    return top, total, tl.minimum(rest_a, rest_b)


@triton.jit
def _load_sums(
    weight_ptr,
    rest_ptr,
    ticket,  # [BLOCK_T]
    end,
    group,
    MERGE_G: tl.constexpr,
):
    """Load the sums of tickets before `end`, [BLOCK_T, MERGE_G], and what each gives for the estimate of the rest."""
    heads = tl.arange(0, MERGE_G)
    at = ticket[:, None] * group + heads[None, :]
    mask = (ticket < end)[:, None] & (heads < group)[None, :]
    weight = tl.load(weight_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    rest = tl.load(rest_ptr + at, mask=mask, other=float("inf"), cache_modifier=".cg")
    return weight, rest


@triton.jit
def _means(
    counted_ptr,
    ticket,  # [BLOCK_T], from the first ticket of a microbatch on
    end,
    parts,  # [BLOCK_T, MERGE_G]: log2 of the sums of the tickets' blocks that are counted
    unit,  # log2 of the unit in which to add them, [1, MERGE_G] or [BLOCK_T // PARTS, MERGE_G]
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Return log2 of the mean sum of a block of each ticket's microbatch, [BLOCK_T, MERGE_G].

    Where a ticket of the microbatch has no result yet, as where no block is counted, it is infinite: it then proves
    nothing.
    """
    counted = tl.load(counted_ptr + ticket, mask=ticket < end, other=0, cache_modifier=".cg")
    blocks = tl.sum(tl.reshape(counted, (BLOCK_T // PARTS, PARTS)), axis=1).to(tl.float32)[:, None]
    parts = tl.reshape(parts, (BLOCK_T // PARTS, PARTS, MERGE_G))
    total = tl.sum(tl.exp2(parts - unit[:, None, :]), axis=1)
    mean = tl.where(blocks > 0, unit + tl.log2(total) - tl.log2(blocks), float("inf"))
    mean = tl.broadcast_to(mean[:, None, :], (BLOCK_T // PARTS, PARTS, MERGE_G))
    return tl.reshape(mean, (BLOCK_T, MERGE_G))


@triton.jit
def find_stop(
    weight_ptr,  # [tickets, group], in units of log2, like all pointers here of the row and KV head
    rest_ptr,
    counted_ptr,
    tokens_ptr,  # [tickets], for COUNT
    first,  # first ticket to look at, the first of a microbatch
    end,  # the ticket after the last one
    top,  # [MERGE_G], of the tickets before `first`, like the next two
    total,
    rest,
    group,
    count,
    num_blocks,
    log2_odds,
    TICKET: tl.constexpr,
    PARTS: tl.constexpr,
    LAST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Return the ticket after the stop, or `end` + 1 if P never exceeds the threshold, and what was read until then.

    That is the tokens from `first` on, and maximum, sum and estimate of all tickets looked at. Results of tickets after
    the stop may never have been written: they influence only these three, which are of use if there is no stop.
    """
    heads = tl.arange(0, MERGE_G)
    lanes = tl.arange(0, BLOCK_T)
    stop = end + 1
    first += tl.zeros((), tl.int32)  # a tensor, even if the argument is a constant
    read = tl.zeros((), tl.int32)
    while first < tl.minimum(stop, end):
        ticket = first + lanes
        weight, estimate = _load_sums(weight_ptr, rest_ptr, ticket, end, group, MERGE_G)
        if COUNT:
            tokens = tl.load(tokens_ptr + ticket, mask=ticket < end, other=0, cache_modifier=".cg")
        if LAST:
            unit = tl.max(tl.reshape(estimate, (BLOCK_T // PARTS, PARTS, MERGE_G)), axis=1)
            unit = tl.where((unit > float("-inf")) & (unit < float("inf")), unit, 0.0)
            estimate = _means(counted_ptr, ticket, end, estimate, unit, PARTS, BLOCK_T, MERGE_G)
        ones = tl.where(weight > float("-inf"), 1.0, tl.where(weight == float("-inf"), 0.0, weight))  # NaN stays NaN
        tops, totals, rests = tl.associative_scan((weight, ones, estimate), 0, _joined)
        tops, totals, rests = _joined(top[None, :], total[None, :], rest[None, :], tops, totals, rests)
        left = tl.maximum(num_blocks - tl.minimum((ticket + 1) * TICKET, count), 0).to(tl.float32)
        is_enough = tops - rests + tl.log2(totals) > log2_odds + tl.log2(left)[:, None]
        is_enough = tl.min((is_enough | (heads >= group)[None, :]).to(tl.int32), axis=1)
        is_stop = (is_enough == 1) & ((ticket + 1) % PARTS == 0) & (ticket < end)
        stop = tl.min(tl.where(is_stop, ticket + 1, end + 1), axis=0)
        is_last = (lanes == BLOCK_T - 1)[:, None]
        top = tl.max(tl.where(is_last, tops, float("-inf")), axis=0)
        total = tl.sum(tl.where(is_last, totals, 0.0), axis=0)
        rest = tl.min(tl.where(is_last, rests, float("inf")), axis=0)
        if COUNT:
            read += tl.sum(tl.where(ticket < stop, tokens, 0))
        first += BLOCK_T
    return stop, read, top, total, rest


@triton.jit
def proves_enough(
    weight_ptr,  # of the row and KV head, like all pointers here
    rest_ptr,
    counted_ptr,
    own_ptr,  # [3, group], of the program alone
    low,
    end,
    unit,  # [MERGE_G], log2 of the unit of `total`
    total,  # [MERGE_G], of tickets before `low`, like the next
    rest,
    group,
    num_blocks,
    log2_odds,
    step,
    TICKET: tl.constexpr,
    PARTS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Return whether the results there are of tickets before `end` prove that no ticket from `end` on is needed.

    P never falls as more is read: if it exceeds the threshold with the sums of some tickets, it does with those of all.
    A ticket without a result has a sum of 0 and an infinite estimate. Also returns sum and estimate with the next
    `step` tickets from `low` on.

    Other programs write while this one reads. Its warps load a small tensor each for themselves, even several times,
    and may find different values. If they then went different ways, they would wait at different barriers. So what
    follows from these loads goes through memory that only this program writes; and each value may come from a load of
    its own, since the unit in which all are added up is fixed before.
    """
    tl.debug_barrier()  # the program's own results, and its loads of `own_ptr` in the turn before, come first
    heads = tl.arange(0, MERGE_G)
    ticket = low + tl.arange(0, BLOCK_W)
    weight, estimate = _load_sums(weight_ptr, rest_ptr, ticket, end, group, MERGE_G)
    if LAST:
        estimate = _means(counted_ptr, ticket, end, estimate, unit[None, :], PARTS, BLOCK_W, MERGE_G)
    # A sum far above the unit is cut, which can only make the total too small. NaN stays NaN.
    above = weight - unit[None, :]
    weights = tl.exp2(tl.where(above > 64.0, 64.0, above))
    all_total = total + tl.sum(weights, axis=0)
    all_rest = tl.minimum(rest, tl.min(estimate, axis=0))
    excess = unit - all_rest + tl.log2(all_total) - log2_odds
    left = (num_blocks - end * TICKET).to(tl.float32)
    is_short = (excess - tl.log2(left) > MARGIN) == False  # noqa: E712 (a tensor; true for NaN)
    is_next = (ticket < low + step)[:, None]
    next_total = total + tl.sum(tl.where(is_next, weights, 0.0), axis=0)
    next_rest = tl.minimum(rest, tl.min(tl.where(is_next, estimate, float("inf")), axis=0))
    is_head = heads < group
    tl.store(own_ptr + heads, next_total, mask=is_head)
    tl.store(own_ptr + group + heads, next_rest, mask=is_head)
    tl.store(own_ptr + 2 * group + heads, is_short.to(tl.float32), mask=is_head)
    tl.debug_barrier()  # one warp's stores come before the others' loads
    next_total = tl.load(own_ptr + heads, mask=is_head, other=0.0, cache_modifier=".cg")
    next_rest = tl.load(own_ptr + group + heads, mask=is_head, other=0.0, cache_modifier=".cg")
    heads_short = tl.sum(tl.load(own_ptr + 2 * group + heads, mask=is_head, other=0.0, cache_modifier=".cg"))
    return heads_short == 0, next_total, next_rest
