"""Merge of the splits of a row and KV head by their log-sum-exp."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from ._triton import finished_last, sum_of_products, wait_for_previous_kernel


@triton.jit
def merge_if_last(
    finished_ptr,  # of the row and KV head, like all pointers here
    partial_max_ptr,
    partial_sum_ptr,
    partial_out_ptr,
    out_ptr,
    lse_ptr,
    group,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Merge the splits if this is the last of their programs."""
    if finished_last(finished_ptr, splits):
        merge_splits(
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


@triton.jit
def merge_splits(
    partial_max_ptr,  # of the row and KV head, like all pointers here
    partial_sum_ptr,
    partial_out_ptr,
    out_ptr,
    lse_ptr,
    group,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Merge the splits of a group of query heads by their log-sum-exp, BLOCK_S splits at a time."""
    top, total, out = no_splits(BLOCK_D, MERGE_G)
    for first in range(0, splits, BLOCK_S):
        every = first + tl.arange(0, BLOCK_S)
        top, total, out = add_splits(
            partial_max_ptr,
            partial_sum_ptr,
            partial_out_ptr,
            every,
            every < splits,
            top,
            total,
            out,
            group,
            HEAD_DIM,
            BLOCK_D,
            MERGE_G,
        )
    write_merged(out_ptr, lse_ptr, top, total, out, group, HEAD_DIM, BLOCK_D, MERGE_G)


@triton.jit
def no_splits(BLOCK_D: tl.constexpr, MERGE_G: tl.constexpr):
    """Return the running maximum, sum and output before the first split."""
    top = tl.full((MERGE_G,), float("-inf"), tl.float32)
    return top, tl.zeros((MERGE_G,), tl.float32), tl.zeros((MERGE_G, BLOCK_D), tl.float32)


@triton.jit
def add_splits(
    partial_max_ptr,  # of the row and KV head, like all pointers here
    partial_sum_ptr,
    partial_out_ptr,
    splits,  # indices of those to add
    is_split,  # which of them exist
    top,
    total,
    out,
    group,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Return the running maximum, sum and output after some more splits."""
    heads = tl.arange(0, MERGE_G)
    dims = tl.arange(0, BLOCK_D)
    at = splits[:, None] * group + heads[None, :]  # [splits, MERGE_G]
    mask = is_split[:, None] & (heads < group)[None, :]
    part_mask = mask[:, :, None] & (dims < HEAD_DIM)[None, None, :]
    part_at = partial_out_ptr + at[:, :, None] * HEAD_DIM + dims[None, None, :]
    parts = tl.load(part_at, mask=part_mask, other=0.0, cache_modifier=".cg")
    maxima = tl.load(partial_max_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(partial_sum_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    new_top = tl.maximum(top, tl.max(maxima, axis=0))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(maxima - shift[None, :])
    decay = tl.exp2(top - shift)
    total = total * decay + sum_of_products(sums, weights, 0)
    out = out * decay[:, None] + sum_of_products(parts, weights[:, :, None], 0)
    return new_top, total, out


@triton.jit
def write_merged(
    out_ptr,  # of the row and KV head, like the next
    lse_ptr,
    top,
    total,
    out,
    group,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_G: tl.constexpr,
):
    """Divide the output by the sum, and write it and the log-sum-exp."""
    heads = tl.arange(0, MERGE_G)
    dims = tl.arange(0, BLOCK_D)
    safe_total = tl.where(total == 0, 1.0, total)
    out = out / safe_total[:, None]
    mask = (heads < group)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + heads, (top + tl.log2(safe_total)) * 0.6931471805599453, mask=heads < group)


@triton.jit
def merge_splits_kernel(
    partial_max_ptr,  # [batch * kv_heads, splits, group], in units of log2
    partial_sum_ptr,  # [batch * kv_heads, splits, group]
    partial_out_ptr,  # [batch * kv_heads, splits, group, HEAD_DIM]
    out_ptr,  # [batch * q_heads, HEAD_DIM]
    lse_ptr,  # [batch * q_heads]
    group,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge all splits of a query head at once; grid (batch * kv_heads, group)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    query_head = tl.program_id(1)
    every = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    mask = every < splits
    dim_mask = dims < HEAD_DIM
    at = (pair * splits + every) * group + query_head
    part_at = partial_out_ptr + at[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(part_at, mask=mask[:, None] & dim_mask[None, :], other=0.0)  # [BLOCK_S, BLOCK_D]
    maxima = tl.load(partial_max_ptr + at, mask=mask, other=float("-inf"))
    sums = tl.load(partial_sum_ptr + at, mask=mask, other=0.0)
    top = tl.max(maxima, axis=0)
    weights = tl.exp2(maxima - tl.where(top == float("-inf"), 0.0, top))
    total = sum_of_products(sums, weights, 0)
    safe_total = tl.where(total == 0, 1.0, total)
    out = sum_of_products(parts, weights[:, None], 0) / safe_total
    out_at = pair * group + query_head
    tl.store(out_ptr + out_at * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dim_mask)
    tl.store(lse_ptr + out_at, (top + tl.log2(safe_total)) * 0.6931471805599453)
