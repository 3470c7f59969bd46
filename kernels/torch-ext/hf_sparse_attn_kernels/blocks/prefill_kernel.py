"""The kernel behind `block_sparse_prefill`."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel


@triton.jit
def _attend_to_tile(
    q,  # [BLOCK_M, BLOCK_D]
    k,  # [BLOCK_N, BLOCK_D], like the next
    v,
    seen,  # [BLOCK_M, BLOCK_N]
    running_max,  # [BLOCK_M], in units of log2
    running_sum,  # [BLOCK_M]
    out,  # [BLOCK_M, BLOCK_D]
    scale_log2,
    DOT_DTYPE: tl.constexpr,
):
    """Add a tile of keys and values to the running maximum, sum and output of the queries."""
    scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2
    scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a query may have seen no key so far
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(running_max - shift)
    running_sum = running_sum * decay + tl.sum(weights, axis=1)
    out = tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), out * decay[:, None], input_precision="ieee")
    return new_max, running_sum, out


@triton.jit
def block_sparse_prefill_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    indices_ptr,  # [batch * q_heads, query_blocks, most_blocks]
    counts_ptr,  # [batch * q_heads, query_blocks]
    columns_ptr,  # [batch * q_heads, most_columns], for COLUMNS, like the next two
    column_counts_ptr,  # [batch * q_heads]
    members_ptr,  # bool [batch * q_heads, query_blocks, key_blocks]: the blocks of the lists
    start_ptr,
    end_ptr,
    out_ptr,  # [batch * q_heads, queries, HEAD_DIM]
    lse_ptr,  # [batch * q_heads, queries]
    q_heads,
    group,
    queries,
    query_blocks,
    most_blocks,
    most_columns,
    key_blocks,
    window,
    scale_log2,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from a tile of a block of queries; grid (tiles of all blocks, batch * q_heads)."""
    wait_for_previous_kernel(PDL)
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_M
    # The last queries have the most keys before them: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    query_block = tile // TILES
    pair = tl.program_id(1).to(tl.int64)
    row = pair // q_heads
    head = pair % q_heads
    kv_head = head // group
    start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    length = tl.maximum(end - start, 0)

    # Places in the row, of queries and of keys; a query of place p is the (p - length + queries)-th.
    first_block = tl.maximum(length - queries, 0) // BLOCK_SIZE
    place = (first_block + query_block) * BLOCK_SIZE + (tile % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    index = place - length + queries
    is_query = (index >= 0) & (place < length)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = (dims < HEAD_DIM)[None, :]
    query_mask = is_query[:, None] & dim_mask
    query_at = query_ptr + row * query_stride_b + head * query_stride_h + index.to(tl.int64) * query_stride_n
    q = tl.load(query_at[:, None] + dims[None, :], mask=query_mask, other=0.0).to(DOT_DTYPE)
    keys_at = keys_ptr + row * keys_stride_b + kv_head * keys_stride_h
    values_at = values_ptr + row * values_stride_b + kv_head * values_stride_h

    running_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    lanes = tl.arange(0, BLOCK_N)
    listed = pair * query_blocks + query_block
    PARTS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    count = tl.minimum(tl.load(counts_ptr + listed), most_blocks)
    for part in range(count * PARTS):
        block = tl.load(indices_ptr + listed * most_blocks + part // PARTS)
        key_place = block * BLOCK_SIZE + (part % PARTS) * BLOCK_N + lanes
        is_key = (key_place >= 0) & (key_place < length)
        position = (start + key_place).to(tl.int64)
        mask = is_key[:, None] & dim_mask
        k = tl.load(keys_at + position[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
        v = tl.load(values_at + position[:, None] * values_stride_n + dims[None, :], mask=mask, other=0.0)
        seen = is_key[None, :] & (key_place[None, :] <= place[:, None])
        if WINDOW:
            seen = seen & (place[:, None] - key_place[None, :] < window)
        running_max, running_sum, out = _attend_to_tile(
            q, k, v, seen, running_max, running_sum, out, scale_log2, DOT_DTYPE
        )
    if COLUMNS:
        last_place = (first_block + query_block) * BLOCK_SIZE + (tile % TILES) * BLOCK_M + BLOCK_M - 1
        most = tl.minimum(tl.load(column_counts_ptr + pair), most_columns)
        for first in range(0, most, BLOCK_N):
            entry = first + lanes
            key_place = tl.load(columns_ptr + pair * most_columns + entry, mask=entry < most, other=-1)
            is_key = (key_place >= 0) & (key_place < length) & (key_place <= last_place)
            in_block = tl.load(members_ptr + listed * key_blocks + key_place // BLOCK_SIZE, mask=is_key, other=0).to(
                tl.int1
            )
            position = (start + key_place).to(tl.int64)
            if WINDOW:
                seen_in_block = in_block[None, :] & (place[:, None] - key_place[None, :] < window)
                read = is_key
            else:
                read = is_key & ~in_block
                seen_in_block = tl.zeros((BLOCK_M, BLOCK_N), tl.int1)
            mask = read[:, None] & dim_mask
            k = tl.load(keys_at + position[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
            v = tl.load(values_at + position[:, None] * values_stride_n + dims[None, :], mask=mask, other=0.0)
            seen = read[None, :] & (key_place[None, :] <= place[:, None]) & ~seen_in_block
            running_max, running_sum, out = _attend_to_tile(
                q, k, v, seen, running_max, running_sum, out, scale_log2, DOT_DTYPE
            )

    out = out / tl.where(running_sum == 0, 1.0, running_sum)[:, None]
    out_at = out_ptr + (pair * queries + index)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=query_mask)
    lse = (running_max + tl.log2(tl.where(running_sum == 0, 1.0, running_sum))) * 0.6931471805599453
    tl.store(lse_ptr + pair * queries + index, lse, mask=is_query)
