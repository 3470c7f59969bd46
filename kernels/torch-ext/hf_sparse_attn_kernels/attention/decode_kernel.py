"""Split-KV attention of one query token per row or a few: `sparse_decode`, `dense_decode` and `dense_prefill`."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._merge import merge_if_last
from .._rope import load_rotated
from .._triton import wait_for_previous_kernel


@triton.jit
def _load_blocks(indices_ptr, token, last, BLOCK_SIZE: tl.constexpr):
    """Load the block of each selected token, counted through all selected blocks; -1 from `last` on."""
    return tl.load(indices_ptr + token // BLOCK_SIZE, mask=token < last, other=-1)


@triton.jit
def decode_attention_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    indices_ptr,  # [batch * kv_heads, max_blocks] or, if SHARED, [batch, max_blocks]; not for DENSE, like the next
    counts_ptr,  # [batch * kv_heads] or [batch]
    start_ptr,
    end_ptr,
    out_ptr,  # [batch * q_heads, head_dim]
    lse_ptr,  # [batch * q_heads]
    partial_max_ptr,  # [batch * kv_heads, splits, group], in units of log2
    partial_sum_ptr,  # [batch * kv_heads, splits, group]
    partial_out_ptr,  # [batch * kv_heads, splits, group, head_dim]
    finished_ptr,  # int32 [batch * kv_heads], 0 before and after
    counter_ptr,
    kv_heads,
    group,  # queries that share a KV head: its query heads, for CAUSAL times `queries`
    queries,  # last tokens of a row that attend, for CAUSAL
    max_blocks,
    scale_log2,
    query_stride_b,
    query_stride_h,
    query_stride_t,
    query_stride_d,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    rope_cos_ptr,  # [slots, HEAD_DIM // 2], for ROPE, like the next
    rope_sin_ptr,
    HEAD_DIM: tl.constexpr,
    DENSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHARED: tl.constexpr,
    ROPE: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE_G: tl.constexpr,
    MERGE_APART: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over one split of a row and KV head, for all query heads of its group; grid (splits, pairs).

    CAUSAL, for DENSE: every query head has `queries` tokens, each of which sees the row up to itself. The last program
    to finish merges the splits, unless a separate kernel does (MERGE_APART).
    """
    wait_for_previous_kernel(PDL)
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    # The splits share all tokens, or the maximum that can be selected, in whole tiles. The number actually selected is
    # not used, so the loads below need not wait for it.
    tokens = tl.maximum(end - start, 0) if DENSE else max_blocks * BLOCK_SIZE
    selection = row if SHARED else pair
    selected = tokens if DENSE else tl.load(counts_ptr + selection) * BLOCK_SIZE
    per_split = tl.cdiv(tl.cdiv(tokens, BLOCK_N), splits) * BLOCK_N
    first = split * per_split
    last = tl.minimum(first + per_split, tokens)

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    head_mask = heads < group
    dim_mask = dims < HEAD_DIM
    group_mask = head_mask[:, None] & dim_mask[None, :]
    if CAUSAL:  # all tokens of a query head, then those of the next
        query_head = head * (group // queries) + heads // queries
        query_at = query_ptr + row * query_stride_b + query_head[:, None] * query_stride_h
        query_at += (heads % queries)[:, None] * query_stride_t
        own_token = tokens - queries + heads % queries  # [BLOCK_G]
    else:
        query_at = query_ptr + row * query_stride_b + (head * group + heads)[:, None] * query_stride_h
    if ROPE:  # halves [BLOCK_G, BLOCK_D // 2], rotated to the slot of the last token selected
        BLOCK_H: tl.constexpr = BLOCK_D // 2
        own_slot = tl.zeros_like(heads) + tl.maximum(selected - 1, 0)
        q1, q2 = load_rotated(
            query_at, query_stride_d, own_slot, head_mask, rope_cos_ptr, rope_sin_ptr, HEAD_DIM, BLOCK_H
        )
    else:
        q = tl.load(query_at + dims[None, :] * query_stride_d, mask=group_mask, other=0.0)
        q = q.to(DOT_DTYPE)  # [BLOCK_G, BLOCK_D]
    keys_ptr += row * keys_stride_b + head * keys_stride_h
    values_ptr += row * values_stride_b + head * values_stride_h
    indices_ptr += selection * max_blocks

    running_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_G,), tl.float32)
    out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    read = tl.zeros((), tl.int64)
    if not DENSE:
        next_block = _load_blocks(indices_ptr, first + lanes, last, BLOCK_SIZE)
    for tile in range(first, last, BLOCK_N):
        token = tile + lanes
        if DENSE:
            position = start.to(tl.int64) + token
            valid = token < last
        else:
            # A tile's blocks are loaded one tile ahead: its keys and values can then be loaded during earlier tiles.
            block = next_block
            next_block = _load_blocks(indices_ptr, token + BLOCK_N, last, BLOCK_SIZE)
            position = start.to(tl.int64) + block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
            valid = (block >= 0) & (position < end) & (token < selected)
        mask = valid[:, None] & dim_mask[None, :]
        keys_at = keys_ptr + position[:, None] * keys_stride_n
        # Masked values must be 0: a weight of 0 times a NaN in the buffer would still be NaN.
        if ROPE:
            k1, k2 = load_rotated(keys_at, 1, token, valid, rope_cos_ptr, rope_sin_ptr, HEAD_DIM, BLOCK_H)
        else:
            k = tl.load(keys_at + dims[None, :], mask=mask, other=0.0)
        v = tl.load(values_ptr + position[:, None] * values_stride_n + dims[None, :], mask=mask, other=0.0)
        if ROPE:
            scores = tl.dot(q1.to(DOT_DTYPE), tl.trans(k1.to(DOT_DTYPE)), input_precision="ieee")
            scores = tl.dot(q2.to(DOT_DTYPE), tl.trans(k2.to(DOT_DTYPE)), scores, input_precision="ieee") * scale_log2
        else:
            scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= own_token[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(running_max - shift)
        running_sum = running_sum * decay + tl.sum(weights, axis=1)
        out = out * decay[:, None]
        out = tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), out, input_precision="ieee")
        running_max = new_max
        if COUNT:
            read += tl.sum(valid.to(tl.int32)).to(tl.int64)

    if COUNT:
        tl.atomic_add(counter_ptr, read, sem="relaxed")
        if split == 0:
            tl.atomic_add(counter_ptr + 1, tl.maximum(end - start, 0).to(tl.int64), sem="relaxed")
            if pair == 0:
                tl.atomic_add(counter_ptr + 3, tl.full((), 1, tl.int64), sem="relaxed")

    out_ptr += pair * group * HEAD_DIM
    lse_ptr += pair * group
    if ONE_SPLIT:
        safe_sum = tl.where(running_sum == 0, 1.0, running_sum)
        out = out / safe_sum[:, None]
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=group_mask)
        lse = (running_max + tl.log2(safe_sum)) * 0.6931471805599453
        tl.store(lse_ptr + heads, lse, mask=head_mask)
    else:
        partial_max_ptr += pair * splits * group
        partial_sum_ptr += pair * splits * group
        partial_out_ptr += pair * splits * group * HEAD_DIM
        at = split * group + heads
        tl.store(partial_max_ptr + at, running_max, mask=head_mask)
        tl.store(partial_sum_ptr + at, running_sum, mask=head_mask)
        tl.store(partial_out_ptr + at[:, None] * HEAD_DIM + dims[None, :], out, mask=group_mask)
        if not MERGE_APART:
            merge_if_last(
                finished_ptr + pair,
                partial_max_ptr,
                partial_sum_ptr,
                partial_out_ptr,
                out_ptr,
                lse_ptr,
                group,
                splits,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_S,
                MERGE_G,
            )
