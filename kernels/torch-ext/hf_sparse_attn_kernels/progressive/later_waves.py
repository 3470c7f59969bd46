"""The rest of a progressive read: tickets after the first wave, as long as they are needed."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._merge import add_splits, no_splits, write_merged
from .._triton import finished_last, wait_for_previous_kernel
from .stop import find_stop, proves_enough
from .ticket import attend_to_ticket, load_queries, no_tickets


@triton.jit
def later_waves_kernel(
    query_ptr,  # as in `first_wave_kernel`, like all arguments without a comment
    keys_ptr,
    values_ptr,
    order_ptr,
    counts_ptr,
    start_ptr,
    end_ptr,
    out_ptr,
    lse_ptr,
    read_counts_ptr,
    weight_ptr,
    rest_ptr,
    counted_ptr,
    tokens_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_out_ptr,
    shared_ptr,
    goes_on_ptr,
    finished_ptr,
    counter_ptr,
    own_ptr,  # [batch * kv_heads, programs, 3, group], as in `proves_enough`
    kv_heads,
    group,
    max_blocks,
    most_tickets,
    first_wave,  # tickets
    forced_blocks,
    scale_log2,
    log2_odds,
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
    TICKET: tl.constexpr,
    PARTS: tl.constexpr,
    LAST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,  # tickets, at least twice the programs of a pair
    BLOCK_S: tl.constexpr,
    MERGE_G: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to tickets after the first wave, every program to each of its turn until what is done is enough.

    Grid (programs, pairs); the programs of a pair are a whole number of microbatches. A program takes its next ticket
    unless the results that it finds of earlier ones prove that it is not needed. So the tickets up to the stop are
    always taken, whatever the order in which programs run. The last one to finish finds the exact stop, and merges.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    if tl.load(goes_on_ptr + pair) != 0:
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        row = pair // kv_heads
        head = pair % kv_heads
        start = tl.load(start_ptr + row)
        length = tl.maximum(tl.load(end_ptr + row) - start, 0)
        num_blocks = tl.cdiv(length, BLOCK_SIZE)
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
        shared_ptr += pair * 3 * group
        own_ptr += (pair * programs + program) * 3 * group
        heads = tl.arange(0, MERGE_G)
        first_max = tl.load(shared_ptr + heads, mask=heads < group, other=float("-inf"))
        first_sum = tl.load(shared_ptr + group + heads, mask=heads < group, other=0.0)
        first_rest = tl.load(shared_ptr + 2 * group + heads, mask=heads < group, other=float("inf"))

        # The best blocks give all sums their unit: later ones can hardly exceed it by much. What is known is of tickets
        # before `low`; a program looks again and again at results from there on.
        unit = tl.where((first_max > float("-inf")) & (first_max < float("inf")), first_max, 0.0)
        known_sum, known_rest = first_sum, first_rest
        low = first_wave
        top, total, out = no_tickets(BLOCK_G, BLOCK_D)
        ticket = first_wave + program
        goes_on = ticket < tickets
        while goes_on:
            top, total, out = attend_to_ticket(
                q,
                ticket,
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
            ticket += programs
            goes_on = ticket < tickets
            if goes_on:
                is_enough, new_sum, new_rest = proves_enough(
                    weight_ptr,
                    rest_ptr,
                    counted_ptr,
                    own_ptr,
                    low,
                    ticket // PARTS * PARTS,
                    unit,
                    known_sum,
                    known_rest,
                    group,
                    num_blocks,
                    log2_odds,
                    programs,
                    TICKET,
                    PARTS,
                    LAST,
                    BLOCK_W,
                    MERGE_G,
                )
                goes_on = is_enough == 0
                # What is missing of the oldest round by now is left out for good: the sums only have to be too small.
                is_full = ticket + programs > low + BLOCK_W
                known_sum = tl.where(is_full, new_sum, known_sum)
                known_rest = tl.where(is_full, new_rest, known_rest)
                low = tl.where(is_full, low + programs, low)

        if finished_last(finished_ptr + pair, programs):
            stop, read, _, _, _ = find_stop(
                weight_ptr,
                rest_ptr,
                counted_ptr,
                tokens_ptr,
                first_wave,
                tickets,
                first_max,
                first_sum,
                first_rest,
                group,
                count,
                num_blocks,
                log2_odds,
                TICKET,
                PARTS,
                LAST,
                COUNT,
                BLOCK_T,
                MERGE_G,
            )
            stop = tl.minimum(stop, tickets)
            tl.store(read_counts_ptr + pair, tl.minimum(stop * TICKET, count))
            if COUNT:
                tl.atomic_add(counter_ptr, read.to(tl.int64), sem="relaxed")
            merged_max, merged_sum, merged_out = no_splits(BLOCK_D, MERGE_G)
            for first in range(0, first_wave + tl.minimum(programs, stop - first_wave), BLOCK_S):
                result = first + tl.arange(0, BLOCK_S)
                # After the first wave, a program's results include those of its tickets before.
                turns = tl.maximum(stop - 1 - result, 0) // programs
                latest = tl.where(result < first_wave, result, result + turns * programs)
                merged_max, merged_sum, merged_out = add_splits(
                    partial_max_ptr,
                    partial_sum_ptr,
                    partial_out_ptr,
                    latest,
                    result < first_wave + tl.minimum(programs, stop - first_wave),
                    merged_max,
                    merged_sum,
                    merged_out,
                    group,
                    HEAD_DIM,
                    BLOCK_D,
                    MERGE_G,
                )
            write_merged(
                out_ptr + pair * group * HEAD_DIM,
                lse_ptr + pair * group,
                merged_max,
                merged_sum,
                merged_out,
                group,
                HEAD_DIM,
                BLOCK_D,
                MERGE_G,
            )
