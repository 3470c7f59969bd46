"""The attention of `runs_prefill`: one program for each unit of work."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel
from .prefill_chunks import chunks_of_pairs, first_slot, store_result


@triton.jit
def _attend_to_tile(
    q,  # [BLOCK_M, BLOCK_D]
    k,  # [BLOCK_N, BLOCK_D], like the next
    v,
    running_max,  # [BLOCK_M], in units of log2
    running_sum,  # [BLOCK_M]
    out,  # [BLOCK_M, BLOCK_D]
    visible,  # [BLOCK_M, BLOCK_N], for MASKED
    scale_log2,
    MASKED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Add a tile of keys and values to the running maximum, sum and output of the queries."""
    scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if MASKED:
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a query may see no token of the tile
        weights = tl.exp2(scores - shift[:, None])
    else:
        new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # every score so far may be -inf
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(running_max - shift)
    running_sum = running_sum * decay + tl.sum(weights, axis=1)
    out = out * decay[:, None]
    out = tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), out, input_precision="ieee")
    return new_max, running_sum, out


@triton.jit
def _load_tokens(
    keys_ptr, values_ptr, position, keys_stride_n, values_stride_n, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load keys and values [BLOCK_N, BLOCK_D] at buffer positions that may all be read; zeros past HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    position = position.to(tl.int64)
    keys_at = keys_ptr + position[:, None] * keys_stride_n + dims[None, :]
    values_at = values_ptr + position[:, None] * values_stride_n + dims[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(keys_at), tl.load(values_at)
    else:
        mask = dims[None, :] < HEAD_DIM
        return tl.load(keys_at, mask=mask, other=0.0), tl.load(values_at, mask=mask, other=0.0)


@triton.jit
def prefill_attention_kernel(
    query_ptr,
    context_keys_ptr,
    context_values_ptr,
    positions_ptr,  # int32 [batch * kv_heads, most_listed], filled up to whole tiles
    token_counts_ptr,  # int32 [batch * kv_heads]
    keys_ptr,
    values_ptr,
    start_ptr,  # int32 [batch]: of the tail, like the next
    end_ptr,
    out_ptr,  # [batch * q_heads, queries, HEAD_DIM]
    lse_ptr,  # [batch * q_heads, queries]
    partial_max_ptr,  # [slots, BLOCK_M], in units of log2
    partial_sum_ptr,  # [slots, BLOCK_M]
    partial_out_ptr,  # [slots, BLOCK_M, BLOCK_D]
    kv_heads,
    group,
    queries,
    pairs,
    columns,  # of a pair
    most_units,
    most_listed,
    scale_log2,  # its absolute value
    query_stride_b,
    query_stride_h,
    query_stride_n,
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
    HEAD_DIM: tl.constexpr,
    NEGATE: tl.constexpr,  # whether the scale is negative
    LEAST_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one chunk of a column; grid (most_units + columns * pairs): programs without a unit do nothing."""
    wait_for_previous_kernel(PDL)
    chunk_tiles, whole, rest = chunks_of_pairs(
        token_counts_ptr, start_ptr, end_ptr, kv_heads, pairs, columns, most_units, LEAST_TILES, BLOCK_N, BLOCK_P
    )
    # The units of whole chunks come first, then those of the shorter ones.
    every = tl.arange(0, BLOCK_P)
    unit = tl.program_id(0)
    whole_units = tl.sum(whole) * columns
    is_rest = unit >= whole_units
    unit = tl.where(is_rest, unit - whole_units, unit)
    here = tl.where(is_rest, rest, whole)
    pair = tl.sum((tl.cumsum(here) * columns <= unit).to(tl.int32))
    if pair >= pairs:
        return
    unit -= tl.sum(tl.where(every < pair, here, 0)) * columns
    chunk = tl.where(is_rest, tl.sum(tl.where(every == pair, whole, 0)), unit // columns)
    column = unit % columns
    number, slot = first_slot(whole, rest, pair, columns, BLOCK_P)
    slot += chunk * columns + column

    # Lane i of the column is a query of head i % group.
    row = (pair // kv_heads).to(tl.int64)
    head = (pair % kv_heads).to(tl.int64)
    start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    chosen = tl.load(token_counts_ptr + pair)
    lanes = column * BLOCK_M + tl.arange(0, BLOCK_M)
    query = lanes // group
    query_head = head * group + lanes % group
    own = end - queries + query  # buffer position
    exists = query < queries
    valid = exists & (own >= start)
    dims = tl.arange(0, BLOCK_D)
    query_at = query_ptr + row * query_stride_b + query_head * query_stride_h
    query_at += query.to(tl.int64) * query_stride_n
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query_at[:, None] + dims[None, :], mask=mask, other=0.0)
    q = q.to(DOT_DTYPE)
    # A non-negative scale keeps the maximum where it is. Without `tl.where`, queries stay in shared memory as they were
    # loaded, and take no registers.
    if NEGATE:
        q = -q

    # The column's tiles: whole ones of the context, those of the tail that all queries see, then those with a mask: the
    # rest of the context, and the tail's up to the last query.
    first_seen = end - queries + column * BLOCK_M // group + 1 - start  # tokens of the tail that the first query sees
    last_seen = end - queries + tl.minimum((column * BLOCK_M + BLOCK_M - 1) // group, queries - 1) + 1 - start
    context_tiles = chosen // BLOCK_N
    context_rest = (chosen % BLOCK_N > 0).to(tl.int32)
    seen_tiles = tl.maximum(first_seen, 0) // BLOCK_N
    tail_tiles = tl.cdiv(tl.maximum(last_seen, 0), BLOCK_N)
    masked_from = context_tiles + seen_tiles
    stop = tl.where(last_seen > 0, context_tiles + context_rest + tail_tiles, 0)  # padding sees nothing
    first = chunk * chunk_tiles
    stop = tl.minimum(stop, first + chunk_tiles)

    tokens = tl.arange(0, BLOCK_N)
    positions_ptr += pair.to(tl.int64) * most_listed
    context_keys_ptr += row * context_keys_stride_b + head * context_keys_stride_h
    context_values_ptr += row * context_values_stride_b + head * context_values_stride_h
    keys_ptr += row * keys_stride_b + head * keys_stride_h
    values_ptr += row * values_stride_b + head * values_stride_h
    running_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for tile in range(first, tl.minimum(stop, context_tiles)):
        position = tl.load(positions_ptr + tile * BLOCK_N + tokens)
        k, v = _load_tokens(
            context_keys_ptr,
            context_values_ptr,
            position,
            context_keys_stride_n,
            context_values_stride_n,
            HEAD_DIM,
            BLOCK_D,
        )
        running_max, running_sum, out = _attend_to_tile(
            q, k, v, running_max, running_sum, out, None, scale_log2, False, DOT_DTYPE
        )
    for tile in tl.range(tl.maximum(first, context_tiles), tl.minimum(stop, masked_from), num_stages=2):
        position = start + (tile - context_tiles) * BLOCK_N + tokens
        k, v = _load_tokens(keys_ptr, values_ptr, position, keys_stride_n, values_stride_n, HEAD_DIM, BLOCK_D)
        running_max, running_sum, out = _attend_to_tile(
            q, k, v, running_max, running_sum, out, None, scale_log2, False, DOT_DTYPE
        )
    for tile in tl.range(tl.maximum(first, masked_from), stop, num_stages=1):
        in_context = tile < masked_from + context_rest
        listed = context_tiles * BLOCK_N + tokens
        listed_position = tl.load(positions_ptr + listed, mask=listed < tl.where(in_context, most_listed, 0), other=0)
        tail_position = start + (tile - context_tiles - context_rest) * BLOCK_N + tokens
        position = tl.where(in_context, listed_position, tl.minimum(tail_position, end - 1))
        k, v = _load_tokens(
            tl.where(in_context, context_keys_ptr, keys_ptr),
            tl.where(in_context, context_values_ptr, values_ptr),
            position,
            tl.where(in_context, context_keys_stride_n, keys_stride_n),
            tl.where(in_context, context_values_stride_n, values_stride_n),
            HEAD_DIM,
            BLOCK_D,
        )
        # Compared with the last token of the context that every query sees, or with the tail's that this one sees.
        key = tl.where(in_context, listed, tail_position)
        most = tl.where(in_context, chosen - 1, own)
        visible = key[None, :] <= most[:, None]
        running_max, running_sum, out = _attend_to_tile(
            q, k, v, running_max, running_sum, out, visible, scale_log2, True, DOT_DTYPE
        )

    if number > 1:
        at = slot * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_max_ptr + at, running_max, mask=exists)
        tl.store(partial_sum_ptr + at, running_sum, mask=exists)
        tl.store(partial_out_ptr + at[:, None] * BLOCK_D + dims[None, :], out, mask=exists[:, None])
    else:
        store_result(
            out_ptr,
            lse_ptr,
            out,
            running_max,
            running_sum,
            row,
            query_head,
            query,
            valid,
            exists,
            kv_heads * group,
            queries,
            HEAD_DIM,
            BLOCK_D,
        )
