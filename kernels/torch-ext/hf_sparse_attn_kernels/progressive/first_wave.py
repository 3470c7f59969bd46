"""The first wave of a progressive read: as many tickets as the device takes at once."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._merge import merge_splits, no_splits
from .._triton import finished_last, wait_for_previous_kernel
from .stop import find_stop
from .ticket import attend_to_ticket, load_queries, no_tickets


@triton.jit
def first_wave_kernel(
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
    weight_ptr,  # [batch * kv_heads, most_tickets, group], as in `attend_to_ticket`, like the next six
    rest_ptr,
    counted_ptr,
    tokens_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_out_ptr,
    shared_ptr,  # [batch * kv_heads, 3, group], for MORE: maximum, sum and estimate of the rest after the first wave
    goes_on_ptr,  # int32 [batch * kv_heads], for MORE: whether tickets after the first wave may be needed
    finished_ptr,  # int32 [batch * kv_heads], 0 before and after
    counter_ptr,
    kv_heads,
    group,
    max_blocks,
    most_tickets,
    forced_blocks,
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
    LANES: tl.constexpr,
    TICKET: tl.constexpr,  # blocks
    PARTS: tl.constexpr,  # tickets of a microbatch: a power of two
    LAST: tl.constexpr,  # estimate the rest by the microbatches' means
    COUNT: tl.constexpr,
    MORE: tl.constexpr,  # `later_waves_kernel` follows
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tickets, at least PARTS
    BLOCK_S: tl.constexpr,
    MERGE_G: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one ticket per program, for all query heads of a KV head; grid (programs, pairs).

    The programs of a pair are a whole number of microbatches. The last one to finish looks for the stop. If it is among
    these tickets, or there are no more, it merges the results; else it leaves the sums to the next launch.
    """
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    start = tl.load(start_ptr + row)
    length = tl.maximum(tl.load(end_ptr + row) - start, 0)
    count = tl.load(counts_ptr + pair)
    tickets = tl.cdiv(count, TICKET)
    q = load_queries(
        query_ptr,
        row,
        head,
        group,
        query_stride_b,
        query_stride_h,
        query_stride_d,
        HEAD_DIM,
        BLOCK_G,
        BLOCK_D,
        DOT_DTYPE,
    )
    keys_ptr += row * keys_stride_b + head * keys_stride_h
    values_ptr += row * values_stride_b + head * values_stride_h
    pair_tickets = pair * most_tickets
    weight_ptr += pair_tickets * group
    rest_ptr += pair_tickets * group
    counted_ptr += pair_tickets
    tokens_ptr += pair_tickets
    partial_max_ptr += pair_tickets * group
    partial_sum_ptr += pair_tickets * group
    partial_out_ptr += pair_tickets * group * HEAD_DIM

    if MORE:  # programs of the next launch read results that may not be there yet
        CLEARED: tl.constexpr = 256
        lanes = tl.arange(0, CLEARED)
        for at in range(programs * group + program * CLEARED, tickets * group, programs * CLEARED):
            mask = at + lanes < tickets * group
            tl.store(weight_ptr + at + lanes, float("-inf"), mask=mask)
            tl.store(rest_ptr + at + lanes, float("inf"), mask=mask)
            if LAST:
                is_ticket = (at + lanes) % group == 0
                tl.store(counted_ptr + (at + lanes) // group, 0, mask=mask & is_ticket)

    top, total, out = no_tickets(BLOCK_G, BLOCK_D)
    attend_to_ticket(
        q,
        program,
        top,
        total,
        out,
        keys_ptr,
        values_ptr,
        order_ptr + pair * max_blocks,
        weight_ptr,
        rest_ptr,
        counted_ptr,
        tokens_ptr,
        partial_max_ptr,
        partial_sum_ptr,
        partial_out_ptr,
        group,
        max_blocks,
        count,
        forced_blocks,
        start,
        length,
        keys_stride_n,
        values_stride_n,
        scale_log2,
        HEAD_DIM,
        BLOCK_SIZE,
        LANES,
        TICKET,
        LAST,
        COUNT,
        BLOCK_N,
        BLOCK_G,
        BLOCK_D,
        BLOCK_B,
        DOT_DTYPE,
    )

    if finished_last(finished_ptr + pair, programs):
        wave = tl.minimum(tickets, programs)
        before, nothing, _ = no_splits(BLOCK_D, MERGE_G)
        stop, read, known_max, known_sum, known_rest = find_stop(
            weight_ptr,
            rest_ptr,
            counted_ptr,
            tokens_ptr,
            0,
            wave,
            before,
            nothing,
            nothing + float("inf"),
            group,
            count,
            tl.cdiv(length, BLOCK_SIZE),
            log2_odds,
            TICKET,
            PARTS,
            LAST,
            COUNT,
            BLOCK_T,
            MERGE_G,
        )
        if COUNT:
            tl.atomic_add(counter_ptr, read.to(tl.int64), sem="relaxed")
            tl.atomic_add(counter_ptr + 1, length.to(tl.int64), sem="relaxed")
            if pair == 0:
                tl.atomic_add(counter_ptr + 3, tl.full((), 1, tl.int64), sem="relaxed")
        goes_on = (stop > wave) & (wave < tickets)
        if MORE:
            tl.store(goes_on_ptr + pair, goes_on.to(tl.int32))
        if goes_on:
            heads = tl.arange(0, MERGE_G)
            shared_ptr += pair * 3 * group
            tl.store(shared_ptr + heads, known_max, mask=heads < group)
            tl.store(shared_ptr + group + heads, known_sum, mask=heads < group)
            tl.store(shared_ptr + 2 * group + heads, known_rest, mask=heads < group)
        else:
            merged = tl.minimum(stop, wave)
            tl.store(read_counts_ptr + pair, tl.minimum(merged * TICKET, count))
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
