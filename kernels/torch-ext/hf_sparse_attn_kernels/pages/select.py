"""Triton kernel of `select_blocks`: one program for each row and KV head."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._topk import load_order_keys, write_top_blocks
from .._triton import next_power_of_2

ONE_TILE_LIMIT = 8192  # scores that one program keeps in registers


@triton.jit
def select_blocks_kernel(
    scores_ptr,  # [batch * kv_heads, width]
    start_ptr,
    end_ptr,
    indices_ptr,  # [batch * kv_heads, max_blocks]
    counts_ptr,  # [batch * kv_heads]
    kv_heads,
    width,
    max_blocks,
    sink_blocks,
    recent_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    """Select the blocks of a row and KV head; grid (batch * kv_heads,)."""
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    length = tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0)
    num_blocks = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, width)
    count = tl.minimum(num_blocks, max_blocks)
    tl.store(counts_ptr + pair, count)
    scores_ptr += pair * width
    keys = load_order_keys(scores_ptr, tl.arange(0, BLOCK_N), num_blocks, sink_blocks, recent_blocks, False)
    write_top_blocks(
        keys,
        tl.arange(0, BLOCK_N),
        -0x80000000,
        scores_ptr,
        indices_ptr + pair * max_blocks,
        num_blocks,
        count,
        max_blocks,
        sink_blocks,
        recent_blocks,
        BLOCK_N,
        ONE_TILE,
        False,
    )


def select_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
    sink_blocks: int,
    recent_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `select_blocks_kernel`."""
    check_triton_dtype("scores", scores, (torch.float32,))
    batch, kv_heads, width = scores.shape
    indices = torch.empty((batch, kv_heads, max_blocks), dtype=torch.int32, device=scores.device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=scores.device)
    block_n = min(ONE_TILE_LIMIT, max(128, next_power_of_2(width)))
    select_blocks_kernel[(batch * kv_heads,)](
        scores.contiguous(),
        seq_start.contiguous(),
        seq_end.contiguous(),
        indices,
        counts,
        kv_heads,
        width,
        max_blocks,
        sink_blocks,
        recent_blocks,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        ONE_TILE=width <= block_n,
        num_warps=16 if block_n >= 4096 else 8,
    )
    return indices, counts
