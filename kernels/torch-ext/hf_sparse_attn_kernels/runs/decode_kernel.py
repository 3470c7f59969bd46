"""Attention of one query token per row to runs and a tail, the tiles of all heads shared by a number of programs."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import sum_of_products, wait_for_previous_kernel


@triton.jit
def _tiles_of(run_count, start, end, RUNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tiles of a pair's chosen runs, RUNS of them each, and those of its tail."""
    return tl.cdiv(run_count, RUNS), tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)


@triton.jit
def _tile_ends(
    run_counts_ptr,
    start_ptr,
    end_ptr,
    kv_heads,
    pairs,
    RUNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Number the tiles of all pairs through; return the end of each pair's tiles, [PAIRS]."""
    pair = tl.arange(0, PAIRS)
    exists = pair < pairs
    row = pair // kv_heads
    run_count = tl.load(run_counts_ptr + pair, mask=exists, other=0)
    start = tl.load(start_ptr + row, mask=exists, other=0)
    end = tl.load(end_ptr + row, mask=exists, other=0)
    context_tiles, tail_tiles = _tiles_of(run_count, start, end, RUNS, BLOCK_N)
    return tl.cumsum(context_tiles + tail_tiles, axis=0)


@triton.jit
def _load_runs(indices_at, tile, run_count, MAX_RUN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the index of each lane's run in a tile of BLOCK_N // MAX_RUN runs; -1 past the chosen ones."""
    listed = tile * (BLOCK_N // MAX_RUN) + tl.arange(0, BLOCK_N) // MAX_RUN
    return tl.load(indices_at + listed, mask=listed < run_count, other=-1)


@triton.jit
def _load_bounds(run_starts_at, run):
    """Load the first slot of each lane's run and the one past its last; no slot for the index -1."""
    first = tl.load(run_starts_at + run, mask=run >= 0, other=0)
    stop = tl.load(run_starts_at + run + 1, mask=run >= 0, other=0)
    return first, stop


@triton.jit
def _load_tokens(token_order_at, run_first, run_stop, MAX_RUN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the token in each lane's slot, counted from the context's first; -1 past the run's end."""
    slot = run_first + tl.arange(0, BLOCK_N) % MAX_RUN
    return tl.load(token_order_at + slot, mask=slot < run_stop, other=-1)


@triton.jit
def _attend_to_tile(
    q,  # [BLOCK_G, BLOCK_D]
    keys_at,  # [BLOCK_N], addresses of vectors, like the next
    values_at,
    valid,  # [BLOCK_N]
    running_max,  # [BLOCK_G], in units of log2
    running_sum,  # [BLOCK_G]
    out,  # [BLOCK_G, BLOCK_D]
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Add a tile of keys and values to the running maximum, sum and output of the group's query heads."""
    dims = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    # Masked values must be 0: a weight of 0 times a NaN in the buffer would still be NaN.
    k = tl.load(keys_at[:, None] + dims[None, :], mask=mask, other=0.0)
    v = tl.load(values_at[:, None] + dims[None, :], mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(running_max - shift)
    running_sum = running_sum * decay + tl.sum(weights, axis=1)
    out = out * decay[:, None]
    out = tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), out, input_precision="ieee")
    return new_max, running_sum, out


@triton.jit
def runs_decode_kernel(
    query_ptr,
    context_keys_ptr,
    context_values_ptr,
    context_start_ptr,  # [batch]
    run_starts_ptr,  # [batch, kv_heads, runs + 1]
    run_indices_ptr,  # [pairs, runs], pairs = batch * kv_heads
    run_counts_ptr,  # [pairs]
    keys_ptr,
    values_ptr,
    start_ptr,  # [batch], like the next
    end_ptr,
    token_order_ptr,  # [batch, kv_heads, slots], if ORDERED
    lengths_ptr,  # [batch, kv_heads], if COUNT
    partial_max_ptr,  # [programs + pairs, group], in units of log2
    partial_sum_ptr,  # [programs + pairs, group]
    partial_out_ptr,  # [programs + pairs, group, HEAD_DIM]
    counter_ptr,
    kv_heads,
    group,
    pairs,
    runs,
    scale_log2,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    context_keys_stride_b,
    context_keys_stride_h,
    context_keys_stride_n,
    context_values_stride_b,
    context_values_stride_h,
    context_values_stride_n,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    run_starts_stride_b,
    run_starts_stride_h,
    token_order_stride_b,
    token_order_stride_h,
    lengths_stride_b,
    lengths_stride_h,
    HEAD_DIM: tl.constexpr,
    MAX_RUN: tl.constexpr,
    ORDERED: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to an equal share of all tiles; grid (programs,).

    The shares of consecutive programs are consecutive, so a program and a pair that have tiles in common stand on a
    staircase: each step to the right or down raises program + pair, the slot of their partial results.
    """
    wait_for_previous_kernel(PDL)
    program = tl.program_id(0)
    RUNS: tl.constexpr = BLOCK_N // MAX_RUN
    ends = _tile_ends(run_counts_ptr, start_ptr, end_ptr, kv_heads, pairs, RUNS, BLOCK_N, PAIRS)
    total = tl.max(ends, axis=0)
    each = total // tl.num_programs(0)
    more = total % tl.num_programs(0)  # programs with one tile more than `each`
    first = program * each + tl.minimum(program, more)
    last = first + each + (program < more).to(tl.int32)
    first_pair = tl.sum((ends <= first).to(tl.int32), axis=0)
    stop_pair = tl.sum((ends < last).to(tl.int32), axis=0) + 1  # past the pair with the last tile
    stop_pair = tl.where(first < last, stop_pair, first_pair)
    pair_first = tl.max(tl.where(ends <= first, ends, 0), axis=0)  # the pair's first tile

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    head_mask = heads < group
    group_mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    read = tl.zeros((BLOCK_N,), tl.int32)
    for index in range(first_pair, stop_pair):
        pair = tl.zeros((), tl.int64) + index
        row = pair // kv_heads
        head = pair % kv_heads
        run_count = tl.load(run_counts_ptr + pair)
        start = tl.load(start_ptr + row)
        end = tl.load(end_ptr + row)
        context_start = tl.load(context_start_ptr + row).to(tl.int64)
        context_tiles, tail_tiles = _tiles_of(run_count, start, end, RUNS, BLOCK_N)
        begin = tl.maximum(first - pair_first, 0)
        stop = tl.minimum(last - pair_first, context_tiles + tail_tiles)
        pair_first += context_tiles + tail_tiles

        query_at = query_ptr + row * query_stride_b + (head * group + heads)[:, None] * query_stride_h
        q = tl.load(query_at + dims[None, :] * query_stride_d, mask=group_mask, other=0.0).to(DOT_DTYPE)
        run_starts_at = run_starts_ptr + row * run_starts_stride_b + head * run_starts_stride_h
        token_order_at = token_order_ptr + row * token_order_stride_b + head * token_order_stride_h
        running_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        running_sum = tl.zeros((BLOCK_G,), tl.float32)
        out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)

        context_keys_at = context_keys_ptr + row * context_keys_stride_b + head * context_keys_stride_h
        context_values_at = context_values_ptr + row * context_values_stride_b + head * context_values_stride_h
        # Indices, starts and tokens depend on one another. They are loaded one tile apart, so that no tile waits for
        # more than its keys and values.
        indices_at = run_indices_ptr + pair * runs
        run = _load_runs(indices_at, begin, run_count, MAX_RUN, BLOCK_N)
        run_first, run_stop = _load_bounds(run_starts_at, run)
        run = _load_runs(indices_at, begin + 1, run_count, MAX_RUN, BLOCK_N)
        token = run
        if ORDERED:
            token = _load_tokens(token_order_at, run_first, run_stop, MAX_RUN, BLOCK_N)
            run_first, run_stop = _load_bounds(run_starts_at, run)
            run = _load_runs(indices_at, begin + 2, run_count, MAX_RUN, BLOCK_N)
        for tile in tl.range(begin, tl.minimum(stop, context_tiles), num_stages=STAGES):
            if ORDERED:
                valid = token >= 0
                position = context_start + token
                token = _load_tokens(token_order_at, run_first, run_stop, MAX_RUN, BLOCK_N)
            else:
                valid = run_first + lanes % MAX_RUN < run_stop
                position = context_start + run_first + lanes % MAX_RUN
            run_first, run_stop = _load_bounds(run_starts_at, run)
            run = _load_runs(indices_at, tile + (3 if ORDERED else 2), run_count, MAX_RUN, BLOCK_N)
            running_max, running_sum, out = _attend_to_tile(
                q,
                context_keys_at + position * context_keys_stride_n,
                context_values_at + position * context_values_stride_n,
                valid,
                running_max,
                running_sum,
                out,
                scale_log2,
                HEAD_DIM,
                BLOCK_D,
                DOT_DTYPE,
            )
            if COUNT:
                read += valid.to(tl.int32)

        keys_at = keys_ptr + row * keys_stride_b + head * keys_stride_h
        values_at = values_ptr + row * values_stride_b + head * values_stride_h
        for tile in tl.range(tl.maximum(begin, context_tiles), stop, num_stages=STAGES):
            position = start.to(tl.int64) + (tile - context_tiles) * BLOCK_N + lanes
            valid = position < end
            running_max, running_sum, out = _attend_to_tile(
                q,
                keys_at + position * keys_stride_n,
                values_at + position * values_stride_n,
                valid,
                running_max,
                running_sum,
                out,
                scale_log2,
                HEAD_DIM,
                BLOCK_D,
                DOT_DTYPE,
            )
            if COUNT:
                read += valid.to(tl.int32)

        at = (program + pair) * group + heads
        tl.store(partial_max_ptr + at, running_max, mask=head_mask)
        tl.store(partial_sum_ptr + at, running_sum, mask=head_mask)
        tl.store(partial_out_ptr + at[:, None] * HEAD_DIM + dims[None, :], out, mask=group_mask)

    if COUNT:
        tl.atomic_add(counter_ptr, tl.sum(read, axis=0).to(tl.int64), sem="relaxed")
        if program == tl.num_programs(0) - 1:  # which never has more tiles than the others
            every = tl.arange(0, PAIRS)
            row = every // kv_heads
            lengths_at = lengths_ptr + row * lengths_stride_b + every % kv_heads * lengths_stride_h
            context = tl.load(lengths_at, mask=every < pairs, other=0)
            start = tl.load(start_ptr + row, mask=every < pairs, other=0)
            end = tl.load(end_ptr + row, mask=every < pairs, other=0)
            dense = context.to(tl.int64) + tl.maximum(end - start, 0)
            tl.atomic_add(counter_ptr + 1, tl.sum(dense, axis=0), sem="relaxed")
            tl.atomic_add(counter_ptr + 3, tl.full((), 1, tl.int64), sem="relaxed")


@triton.jit
def _program_of(tile, each, more):
    """Return the program with this tile, if the first `more` programs have each + 1 tiles and the others `each`."""
    long = more * (each + 1)
    return tl.where(tile < long, tile // (each + 1), more + (tile - long) // tl.maximum(each, 1))


@triton.jit
def merge_partials_kernel(
    run_counts_ptr,  # [pairs]
    start_ptr,  # [batch], like the next
    end_ptr,
    partial_max_ptr,  # [programs + pairs, group], in units of log2
    partial_sum_ptr,  # [programs + pairs, group]
    partial_out_ptr,  # [programs + pairs, group, HEAD_DIM]
    out_ptr,  # [batch * q_heads, HEAD_DIM]
    lse_ptr,  # [batch * q_heads]
    kv_heads,
    group,
    pairs,
    programs,
    HEAD_DIM: tl.constexpr,
    MAX_RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partial results of a query head by their log-sum-exp, BLOCK_S at a time; grid (pairs, group)."""
    # The kernel before this one, which computes the partial results, does not write the counts. Kernels before that one
    # have finished and are visible: each of its programs waits for them before it lets this kernel start.
    pair = tl.program_id(0)
    query_head = tl.program_id(1)
    ends = _tile_ends(run_counts_ptr, start_ptr, end_ptr, kv_heads, pairs, BLOCK_N // MAX_RUN, BLOCK_N, PAIRS)
    every = tl.arange(0, PAIRS)
    first = tl.max(tl.where(every < pair, ends, 0), axis=0)
    last = tl.max(tl.where(every <= pair, ends, 0), axis=0)
    total = tl.max(ends, axis=0)
    each = total // programs
    more = total % programs
    first_slot = _program_of(first, each, more) + pair
    stop_slot = tl.where(first < last, _program_of(last - 1, each, more) + pair + 1, first_slot)

    wait_for_previous_kernel(PDL)
    lanes = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM
    top = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((), tl.float32)
    out = tl.zeros((BLOCK_D,), tl.float32)
    for slot in range(first_slot, stop_slot, BLOCK_S):
        some = slot + lanes
        mask = some < stop_slot
        at = some.to(tl.int64) * group + query_head
        parts_at = partial_out_ptr + at[:, None] * HEAD_DIM + dims[None, :]
        parts = tl.load(parts_at, mask=mask[:, None] & dim_mask[None, :], other=0.0)  # [BLOCK_S, BLOCK_D]
        maxima = tl.load(partial_max_ptr + at, mask=mask, other=float("-inf"))
        part_sums = tl.load(partial_sum_ptr + at, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(maxima, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(maxima - shift)
        decay = tl.exp2(top - shift)
        sums = sums * decay + sum_of_products(part_sums, weights, 0)
        out = out * decay + sum_of_products(parts, weights[:, None], 0)
        top = new_top
    safe_sum = tl.where(sums == 0, 1.0, sums)
    out = out / safe_sum
    out_at = pair.to(tl.int64) * group + query_head
    tl.store(out_ptr + out_at * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dim_mask)
    tl.store(lse_ptr + out_at, (top + tl.log2(safe_sum)) * 0.6931471805599453)
