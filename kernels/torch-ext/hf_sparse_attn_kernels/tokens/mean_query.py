"""Triton kernel of `mean_query`: one program for each row and query head."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._triton import launch_options, next_power_of_2, wait_for_previous_kernel

BLOCK_N = 64  # queries at a time
WARPS = 8


@triton.jit
def mean_query_kernel(
    query_ptr,
    rope_cos_ptr,  # [slots, HEAD_DIM // 2], like the next
    rope_sin_ptr,
    out_ptr,  # [batch * q_heads, HEAD_DIM]
    q_heads,
    queries,
    first_slot,
    last_slot,  # of the table
    query_stride_b,
    query_stride_h,
    query_stride_n,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Average the queries of a row and head, each rotated to its slot, in float32; grid (batch * q_heads,)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    query_ptr += pair // q_heads * query_stride_b + pair % q_heads * query_stride_h
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)[None, :]
    first_sum = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    second_sum = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for begin in range(0, queries, BLOCK_N):
        query = begin + tl.arange(0, BLOCK_N)[:, None]
        mask = (query < queries) & (dims < HALF)
        at = query_ptr + query.to(tl.int64) * query_stride_n + dims
        first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        angle_at = tl.minimum(first_slot + query, last_slot) * HALF + dims
        cos = tl.load(rope_cos_ptr + angle_at, mask=mask, other=0.0)
        sin = tl.load(rope_sin_ptr + angle_at, mask=mask, other=0.0)
        first_sum += first * cos - second * sin
        second_sum += second * cos + first * sin
    out_at = out_ptr + pair * HEAD_DIM + tl.arange(0, BLOCK_H)
    out_mask = tl.arange(0, BLOCK_H) < HALF
    tl.store(out_at, (tl.sum(first_sum, axis=0) / queries).to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(out_at + HALF, (tl.sum(second_sum, axis=0) / queries).to(out_ptr.dtype.element_ty), mask=out_mask)


def mean_query(query: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, *, first_slot: int) -> torch.Tensor:
    """Launch `mean_query_kernel`."""
    check_triton("query", query)
    batch, q_heads, queries, head_dim = query.shape
    out = query.new_empty((batch, q_heads, head_dim))
    mean_query_kernel[(batch * q_heads,)](
        query,
        rope_cos,
        rope_sin,
        out,
        q_heads,
        queries,
        first_slot,
        rope_cos.shape[0] - 1,
        *query.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK_N=BLOCK_N,
        BLOCK_H=max(16, next_power_of_2(head_dim // 2)),
        num_warps=WARPS,
        **launch_options(query.device),
    )
    return out
