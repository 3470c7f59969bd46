"""The kernels behind `sparse_prefill`: one packs the tokens that a chunk attends to, the other attends to them."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._rope import load_rotated
from .._triton import wait_for_previous_kernel


@triton.jit
def _own_tokens(start_ptr, end_ptr, row, queries):
    """Return the start and end of the row, and the number of its own tokens among the queries: the last ones."""
    start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    return start, end, tl.minimum(tl.maximum(end - start, 0), queries)


@triton.jit
def pack_tokens_kernel(
    keys_ptr,
    values_ptr,
    indices_ptr,  # [batch * kv_heads, most_chosen] or, if SHARED, [batch, most_chosen]
    counts_ptr,  # [batch * kv_heads] or [batch]
    start_ptr,
    end_ptr,
    rope_cos_ptr,  # [slots, HEAD_DIM // 2], for ROPE, like the next
    rope_sin_ptr,
    packed_keys_ptr,  # [batch * kv_heads, packed_slots, 2 * BLOCK_H], like the next
    packed_values_ptr,
    kv_heads,
    most_chosen,
    queries,
    packed_slots,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pack the chosen tokens, then the chunk's, followed by zeros; grid (tiles of slots, pairs).

    Each half of the channels of keys and values takes BLOCK_H columns, padded with 0.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    selection = row if SHARED else pair
    start, end, own = _own_tokens(start_ptr, end_ptr, row, queries)
    count = tl.load(counts_ptr + selection)
    slot = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_chosen = slot < count
    chosen = tl.load(indices_ptr + selection * most_chosen + slot, mask=is_chosen & (slot < most_chosen), other=-1)
    token = tl.where(is_chosen, chosen, end - start - own + slot - count)
    valid = (token >= 0) & (token < end - start)
    position = start.to(tl.int64) + token.to(tl.int64)

    HALF: tl.constexpr = (HEAD_DIM + 1) // 2
    dims = tl.arange(0, BLOCK_H)
    first_mask = valid[:, None] & (dims < HALF)[None, :]
    second_mask = valid[:, None] & (dims < HEAD_DIM - HALF)[None, :]
    keys_at = keys_ptr + row * keys_stride_b + head * keys_stride_h + position[:, None] * keys_stride_n
    values_at = values_ptr + row * values_stride_b + head * values_stride_h + position[:, None] * values_stride_n
    if ROPE:
        k1, k2 = load_rotated(keys_at, 1, slot, valid, rope_cos_ptr, rope_sin_ptr, HEAD_DIM, BLOCK_H)
    else:
        k1 = tl.load(keys_at + dims[None, :], mask=first_mask, other=0.0)
        k2 = tl.load(keys_at + dims[None, :] + HALF, mask=second_mask, other=0.0)
    v1 = tl.load(values_at + dims[None, :], mask=first_mask, other=0.0)
    v2 = tl.load(values_at + dims[None, :] + HALF, mask=second_mask, other=0.0)
    packed_at = (pair * packed_slots + slot)[:, None] * (2 * BLOCK_H) + dims[None, :]
    # Packed tokens fill whole tiles.
    tl.store(packed_keys_ptr + packed_at, k1)
    tl.store(packed_keys_ptr + packed_at + BLOCK_H, k2)
    tl.store(packed_values_ptr + packed_at, v1)
    tl.store(packed_values_ptr + packed_at + BLOCK_H, v2)


@triton.jit
def _attend_to_tile(
    q,  # [BLOCK_M, 2 * BLOCK_H]
    k,  # [BLOCK_N, 2 * BLOCK_H], like the next
    v,
    running_max,  # [BLOCK_M], in units of log2
    running_sum,  # [BLOCK_M]
    out,  # [BLOCK_M, 2 * BLOCK_H]
    slot,  # [BLOCK_M], of the queries
    first,  # slot of the first key
    scale_log2,
    CAUSAL: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Add a tile of keys and values to the running maximum, sum and output of the queries."""
    scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if CAUSAL:
        later = (first + tl.arange(0, k.shape[0]))[None, :] > slot[:, None]
        scores = tl.where(later, float("-inf"), scores * scale_log2)
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # padding may see no token
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
def prefill_attention_kernel(
    query_ptr,
    packed_keys,  # descriptor of [batch * kv_heads * packed_slots, 2 * BLOCK_H], like the next
    packed_values,
    counts_ptr,  # [batch * kv_heads] or, if SHARED, [batch]
    start_ptr,
    end_ptr,
    rope_cos_ptr,  # [slots, HEAD_DIM // 2], for ROPE, like the next
    rope_sin_ptr,
    out_ptr,  # [batch * q_heads, queries, HEAD_DIM]
    lse_ptr,  # [batch * q_heads, queries]
    kv_heads,
    group,
    queries,
    packed_slots,
    scale_log2,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend causally over packed tokens; grid (tiles, pairs). A tile has queries of all heads of the group."""
    wait_for_previous_kernel(PDL)
    # The last queries attend to the most tokens: they start first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    _, _, own = _own_tokens(start_ptr, end_ptr, row, queries)
    count = tl.load(counts_ptr + (row if SHARED else pair))
    # Lane i is a query of head i % group; a query has the slot of its token.
    first_slot = count - (queries - own)
    lanes = tile + tl.arange(0, BLOCK_M)
    query = lanes // group
    query_head = head * group + lanes % group
    slot = first_slot + query
    exists = query < queries
    valid = exists & (slot >= count)

    HALF: tl.constexpr = (HEAD_DIM + 1) // 2
    columns = tl.arange(0, 2 * BLOCK_H)
    lane = columns % BLOCK_H
    dims = tl.where(columns < BLOCK_H, lane, lane + HALF)
    dim_mask = (lane < HALF) & (dims < HEAD_DIM)
    query_at = query_ptr + row * query_stride_b + query_head.to(tl.int64) * query_stride_h
    query_at += query.to(tl.int64) * query_stride_n
    mask = valid[:, None] & dim_mask[None, :]
    q = tl.load(query_at[:, None] + dims[None, :], mask=mask, other=0.0)
    if ROPE:
        partners = tl.where(columns < BLOCK_H, lane + HALF, lane)
        partner = tl.load(query_at[:, None] + partners[None, :], mask=mask, other=0.0)
        at = slot.to(tl.int64)[:, None] * HALF + lane[None, :]
        cos = tl.load(rope_cos_ptr + at, mask=mask, other=0.0)
        sin = tl.load(rope_sin_ptr + at, mask=mask, other=0.0)
        sin = tl.where((columns < BLOCK_H)[None, :], -sin, sin)
        q = (q.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(q.dtype)
    # Make the scale non-negative below, so that it keeps the maximum where it is.
    q = q.to(DOT_DTYPE)  # [BLOCK_M, 2 * BLOCK_H]
    q = tl.where(scale_log2 < 0, -q, q)
    scale_log2 = tl.abs(scale_log2)

    # Every lane attends to all tiles before `shared`, and up to its own slot in the tiles up to `stop`.
    last_query = tl.minimum((tile + BLOCK_M - 1) // group, queries - 1)
    shared = tl.maximum(first_slot + tile // group + 1, 0) // BLOCK_N * BLOCK_N
    stop = first_slot + last_query + 1
    first_packed = (pair * packed_slots).to(tl.int32)
    running_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, 2 * BLOCK_H), tl.float32)
    for first in range(0, shared, BLOCK_N):
        k = packed_keys.load([first_packed + first, 0])
        v = packed_values.load([first_packed + first, 0])
        running_max, running_sum, out = _attend_to_tile(
            q, k, v, running_max, running_sum, out, slot, first, scale_log2, False, DOT_DTYPE
        )
    for first in range(shared, stop, BLOCK_N):
        k = packed_keys.load([first_packed + first, 0])
        v = packed_values.load([first_packed + first, 0])
        running_max, running_sum, out = _attend_to_tile(
            q, k, v, running_max, running_sum, out, slot, first, scale_log2, True, DOT_DTYPE
        )

    out = tl.where(valid[:, None], out / tl.where(running_sum == 0, 1.0, running_sum)[:, None], 0.0)
    at = (row * kv_heads * group + query_head) * queries + query
    tl.store(
        out_ptr + at[:, None] * HEAD_DIM + dims[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=exists[:, None] & dim_mask[None, :],
    )
    lse = (running_max + tl.log2(tl.where(running_sum == 0, 1.0, running_sum))) * 0.6931471805599453
    tl.store(lse_ptr + at, tl.where(valid, lse, float("-inf")), mask=exists)
