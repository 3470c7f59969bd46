"""Attention that stops early: programs take parts of a row until what is done proves that the rest is not needed."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._merge import merge_splits
from .._triton import wait_for_previous_kernel
from .stop import find_stop

# The state of a row and KV head, one int32: the programs that have ended in bits 0 to 7, the tickets taken in bits 8 to
# 28, then two flags.
ENDED_MASK = tl.constexpr((1 << 8) - 1)
ONE_TICKET = tl.constexpr(1 << 8)
TICKETS_MASK = tl.constexpr((1 << 21) - 1)
HAS_SUMS = tl.constexpr(1 << 29)  # the sums that all programs add to exist
IS_ENOUGH = tl.constexpr(1 << 30)  # no further ticket is needed
MARGIN = tl.constexpr(0.01)
"""How far beyond the threshold, in log2 of P / (1 - P), the sums of all programs must be. They are added up in any
order, with a relative error of at most 2^-24 per ticket. So `find_stop`, whose order is fixed, always finds the stop
among the tickets that were taken."""


@triton.jit
def progressive_decode_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    order_ptr,  # [batch * kv_heads, max_blocks]
    counts_ptr,  # [batch * kv_heads]
    start_ptr,
    end_ptr,
    out_ptr,  # [batch * q_heads, HEAD_DIM]
    lse_ptr,  # [batch * q_heads]
    read_counts_ptr,  # [batch * kv_heads]
    partial_max_ptr,  # [batch * kv_heads, most_tickets, group], in units of log2
    partial_sum_ptr,  # [batch * kv_heads, most_tickets, group]
    partial_least_ptr,  # [batch * kv_heads, most_tickets, group]: log2 of the least sum of a complete block
    partial_out_ptr,  # [batch * kv_heads, most_tickets, group, HEAD_DIM]
    partial_tokens_ptr,  # int32 [batch * kv_heads, most_tickets], for COUNT
    shared_ptr,  # [batch * kv_heads, 3, group]: a fixed log2, the sum in units of it, and log2 of the least sum
    state_ptr,  # int32 [batch * kv_heads], 0 before and after
    counter_ptr,
    kv_heads,
    group,
    max_blocks,
    most_tickets,
    scale_log2,
    log2_odds,  # of the threshold
    query_stride_b,
    query_stride_h,
    query_stride_d,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # BLOCK_SIZE rounded up to a power of two
    TICKET: tl.constexpr,  # blocks
    PARTS: tl.constexpr,  # tickets of a microbatch
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE_G: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to a row's blocks in the order of their ranks, for all query heads of a KV head; grid (programs, pairs).

    A program takes the next ticket, attends to its blocks, writes a partial result, and adds its sums to those of the
    pair's other programs. No program takes a further ticket once these sums prove that the earlier ones are enough. No
    program waits for another. The last one to end finds the exact stop, and merges the results before it.
    """
    wait_for_previous_kernel(PDL)
    programs = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    length = tl.maximum(end - start, 0)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    count = tl.load(counts_ptr + pair)
    tickets = tl.cdiv(count, TICKET)

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    head_mask = heads < group
    group_mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = query_ptr + row * query_stride_b + (head * group + heads)[:, None] * query_stride_h
    q = tl.load(query_at + dims[None, :] * query_stride_d, mask=group_mask, other=0.0).to(DOT_DTYPE)
    keys_ptr += row * keys_stride_b + head * keys_stride_h
    values_ptr += row * values_stride_b + head * values_stride_h
    order_ptr += pair * max_blocks
    partial_max_ptr += pair * most_tickets * group
    partial_sum_ptr += pair * most_tickets * group
    partial_least_ptr += pair * most_tickets * group
    partial_out_ptr += pair * most_tickets * group * HEAD_DIM
    partial_tokens_ptr += pair * most_tickets
    shared_ptr += pair * 3 * group
    state_ptr += pair

    # Sums that this program has not yet added to the shared ones.
    own_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    own_sum = tl.zeros((BLOCK_G,), tl.float32)
    own_least = tl.full((BLOCK_G,), float("inf"), tl.float32)
    state = tl.atomic_add(state_ptr, ONE_TICKET, sem="acq_rel")
    ticket = (state // ONE_TICKET) & TICKETS_MASK
    go_on = (ticket < tickets) & ((state & IS_ENOUGH) == 0)
    while go_on:
        top, total, least, out, read = _attend_to_ticket(
            q,
            keys_ptr,
            values_ptr,
            order_ptr + ticket * TICKET,
            tl.minimum(count - ticket * TICKET, TICKET),
            start,
            length,
            keys_stride_n,
            values_stride_n,
            scale_log2,
            HEAD_DIM,
            BLOCK_SIZE,
            LANES,
            TICKET,
            BLOCK_N,
            BLOCK_G,
            BLOCK_D,
            DOT_DTYPE,
        )
        at = ticket * group + heads
        tl.store(partial_max_ptr + at, top, mask=head_mask)
        tl.store(partial_sum_ptr + at, total, mask=head_mask)
        tl.store(partial_least_ptr + at, least, mask=head_mask)
        tl.store(partial_out_ptr + at[:, None] * HEAD_DIM + dims[None, :], out, mask=group_mask)
        if COUNT:
            tl.store(partial_tokens_ptr + ticket, read)
        is_first = ticket == 0
        if is_first:
            # The best blocks give the shared sums their unit, so that later ones can hardly exceed it by much.
            is_finite = (top > float("-inf")) & (top < float("inf"))
            unit = tl.where(is_finite, top, 0.0)
            tl.store(shared_ptr + heads, unit, mask=head_mask)
            tl.store(shared_ptr + group + heads, total * tl.exp2(top - unit), mask=head_mask)
            tl.store(shared_ptr + 2 * group + heads, least, mask=head_mask)
        else:
            new_max = tl.maximum(own_max, top)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            own_sum = own_sum * tl.exp2(own_max - shift) + total * tl.exp2(top - shift)
            own_max = new_max
            own_least = tl.minimum(own_least, least)

        tl.debug_barrier()  # every thread's stores come before the state says so
        state = tl.atomic_add(state_ptr, tl.where(is_first, HAS_SUMS, 0), sem="acq_rel")
        go_on = ((state // ONE_TICKET & TICKETS_MASK) < tickets) & ((state & IS_ENOUGH) == 0)
        if go_on:
            # The shared sums are read before the ticket is taken: they are then sums of earlier tickets alone.
            excess = tl.full((BLOCK_G,), float("-inf"), tl.float32)
            if is_first | ((state & HAS_SUMS) != 0):
                # A sum far above the unit is cut, which can only make the shared sum too small.
                unit = tl.load(shared_ptr + heads, mask=head_mask, other=0.0, cache_modifier=".cg")
                added = own_sum * tl.exp2(tl.minimum(own_max - unit, 64.0))
                tl.atomic_add(shared_ptr + group + heads, added, mask=head_mask, sem="relaxed")
                tl.atomic_min(shared_ptr + 2 * group + heads, own_least, mask=head_mask, sem="relaxed")
                own_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
                own_sum = tl.zeros((BLOCK_G,), tl.float32)
                own_least = tl.full((BLOCK_G,), float("inf"), tl.float32)
                tl.debug_barrier()  # this program's sums come before the loads
                shared_sum = tl.load(shared_ptr + group + heads, mask=head_mask, other=1.0, cache_modifier=".cg")
                shared_least = tl.load(shared_ptr + 2 * group + heads, mask=head_mask, other=0.0, cache_modifier=".cg")
                excess = unit - shared_least + tl.log2(shared_sum) - log2_odds
            tl.debug_barrier()  # every thread's loads come before the next ticket is taken
            state = tl.atomic_add(state_ptr, ONE_TICKET, sem="acq_rel")
            ticket = (state // ONE_TICKET) & TICKETS_MASK
            go_on = (ticket < tickets) & ((state & IS_ENOUGH) == 0)
            # All earlier tickets will be read, and P never falls: if P exceeds the threshold with the sums of some of
            # them, it does with the sums of all. Only whole microbatches end the reading.
            if go_on & (ticket % PARTS == 0):
                left = (num_blocks - ticket * TICKET).to(tl.float32)
                heads_left = tl.sum((head_mask & ((excess - tl.log2(left) > MARGIN) == 0)).to(tl.int32))
                go_on = heads_left > 0
                if heads_left == 0:
                    tl.atomic_or(state_ptr, IS_ENOUGH, sem="relaxed")

    tl.debug_barrier()  # every thread's stores come before the program ends
    if (tl.atomic_add(state_ptr, 1, sem="acq_rel") & ENDED_MASK) == programs - 1:
        tl.store(state_ptr, 0)
        merged, read = find_stop(
            partial_max_ptr,
            partial_sum_ptr,
            partial_least_ptr,
            partial_tokens_ptr,
            group,
            tickets,
            count,
            num_blocks,
            log2_odds,
            TICKET,
            PARTS,
            COUNT,
            BLOCK_T,
            MERGE_G,
        )
        tl.store(read_counts_ptr + pair, tl.minimum(merged * TICKET, count))
        if COUNT:
            tl.atomic_add(counter_ptr, read.to(tl.int64), sem="relaxed")
            tl.atomic_add(counter_ptr + 1, length.to(tl.int64), sem="relaxed")
            if pair == 0:
                tl.atomic_add(counter_ptr + 3, tl.full((), 1, tl.int64), sem="relaxed")
        merge_splits(
            partial_max_ptr,
            partial_sum_ptr,
            partial_out_ptr,
            out_ptr + pair * group * HEAD_DIM,
            lse_ptr + pair * group,
            group,
            merged,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_S,
            MERGE_G,
        )


@triton.jit
def _attend_to_ticket(
    q,  # [BLOCK_G, BLOCK_D]
    keys_ptr,  # of the row and KV head, like the next
    values_ptr,
    order_ptr,  # of the ticket
    blocks,  # that it has, at most TICKET
    start,
    length,
    keys_stride_n,
    values_stride_n,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TICKET: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Attend to the blocks of a ticket, in tiles that are whole blocks or parts of one.

    Returns the running maximum, in units of log2, the sum, log2 of the least sum of a complete block, the output before
    the division by the sum, and the number of tokens.
    """
    TILE_BLOCKS: tl.constexpr = max(1, BLOCK_N // LANES)
    BLOCK_TILES: tl.constexpr = max(1, LANES // BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    tile_blocks = tl.arange(0, TILE_BLOCKS)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    block_total = tl.zeros((BLOCK_G,), tl.float32)  # of the block that has begun, if a block has several tiles
    least = tl.full((BLOCK_G,), float("inf"), tl.float32)
    out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    read = tl.zeros((), tl.int32)
    for tile in range(tl.cdiv(TICKET * LANES, BLOCK_N)):
        lane = tile * BLOCK_N + lanes
        block = tl.load(order_ptr + lane // LANES, mask=lane // LANES < blocks, other=-1)
        token = block * BLOCK_SIZE + lane % LANES
        valid = (block >= 0) & (lane % LANES < BLOCK_SIZE) & (token < length)
        position = start.to(tl.int64) + token
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        # Masked values must be 0: a weight of 0 times a NaN in the buffer would still be NaN.
        k = tl.load(keys_ptr + position[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
        v = tl.load(values_ptr + position[:, None] * values_stride_n + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        top = new_top
        sums = tl.sum(tl.reshape(weights, (BLOCK_G, TILE_BLOCKS, BLOCK_N // TILE_BLOCKS)), axis=2)
        total = total * decay + tl.sum(weights, axis=1)
        out = out * decay[:, None]
        out = tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), out, input_precision="ieee")
        read += tl.sum(valid.to(tl.int32))

        # A sum too small for float32 counts as 0: beside the largest weight, it makes P exceed any threshold anyway.
        place = tile // BLOCK_TILES * TILE_BLOCKS + tile_blocks
        block = tl.load(order_ptr + place, mask=place < blocks, other=-1)
        is_complete = (block >= 0) & ((block + 1) * BLOCK_SIZE <= length)
        if BLOCK_TILES > 1:
            block_total = block_total * decay + tl.sum(sums, axis=1)
            sums = block_total[:, None]
            is_end = tile % BLOCK_TILES == BLOCK_TILES - 1
            is_complete = is_complete & is_end
            block_total = tl.where(is_end, 0.0, block_total)
        log_sums = tl.where(is_complete[None, :], tl.log2(sums) + shift[:, None], float("inf"))
        least = tl.minimum(least, tl.min(log_sums, axis=1))
    return top, total, least, out, read
