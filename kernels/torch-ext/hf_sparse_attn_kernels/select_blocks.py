"""Triton kernel of `select_blocks`: top-k by bisection over the scores' bits, then an ordered compaction."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

ONE_TILE_LIMIT = 8192  # scores that one program keeps in registers


@triton.jit
def _load_keys(scores_ptr, blocks, num_blocks, sink_blocks, recent_blocks):
    """Scores as int32 of the same order: forced blocks above every score, blocks that are not there below."""
    exists = blocks < num_blocks
    score = tl.load(scores_ptr + blocks, mask=exists, other=0.0)
    score = tl.where(score == score, score, float("-inf"))  # NaN ranks with the lowest
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 ties with 0.0
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    forced = (blocks < sink_blocks) | (blocks >= num_blocks - recent_blocks)
    key = tl.where(forced, 0x7FFFFFFF, key)
    return tl.where(exists, key, -0x80000000)


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
    """One row and KV head; grid (batch * kv_heads,)."""
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    length = tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0)
    num_blocks = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, width)
    count = tl.minimum(num_blocks, max_blocks)
    tl.store(counts_ptr + pair, count)
    scores_ptr += pair * width
    indices_ptr += pair * max_blocks
    lanes = tl.arange(0, BLOCK_N)
    kept_keys = _load_keys(scores_ptr, lanes, num_blocks, sink_blocks, recent_blocks)

    # The count-th largest key: the largest one that at least `count` keys reach. Where every block is selected,
    # any bound below all keys does.
    low = tl.full((), -0x7FFFFFFF, tl.int64)
    high = tl.where(count < num_blocks, tl.full((), 0x7FFFFFFF, tl.int64), low)
    while low < high:
        middle = (low + high + 1) >> 1
        bound = middle.to(tl.int32)
        if ONE_TILE:
            reached = tl.sum((kept_keys >= bound).to(tl.int32))
        else:
            reached = tl.sum((kept_keys >= bound).to(tl.int32))
            for first in range(BLOCK_N, num_blocks, BLOCK_N):
                keys = _load_keys(scores_ptr, first + lanes, num_blocks, sink_blocks, recent_blocks)
                reached += tl.sum((keys >= bound).to(tl.int32))
        low = tl.where(reached >= count, middle, low)
        high = tl.where(reached > count, high, tl.where(reached == count, middle, middle - 1))
    bound = low.to(tl.int32)

    above = 0
    for first in range(0, num_blocks, BLOCK_N):
        keys = _load_keys(scores_ptr, first + lanes, num_blocks, sink_blocks, recent_blocks)
        above += tl.sum((keys > bound).to(tl.int32))
    ties_left = count - above  # how many of the keys equal to the bound are taken, lowest index first
    written = 0
    for first in range(0, num_blocks, BLOCK_N):
        keys = _load_keys(scores_ptr, first + lanes, num_blocks, sink_blocks, recent_blocks)
        tied = (keys == bound).to(tl.int32)
        taken = (keys > bound) | ((keys == bound) & (tl.cumsum(tied, axis=0) <= ties_left))
        slots = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(indices_ptr + slots, first + lanes, mask=taken)
        written += tl.sum(taken.to(tl.int32))
        ties_left -= tl.sum(tied)
    for first in range(0, max_blocks, BLOCK_N):
        slots = first + lanes
        tl.store(indices_ptr + slots, tl.full((BLOCK_N,), -1, tl.int32), mask=(slots >= count) & (slots < max_blocks))


def select_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
    sink_blocks: int = 0,
    recent_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `select_blocks_kernel`; see `hf_sparse_attn_kernels.select_blocks`."""
    batch, kv_heads, width = scores.shape
    indices = torch.empty((batch, kv_heads, max_blocks), dtype=torch.int32, device=scores.device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=scores.device)
    block_n = min(ONE_TILE_LIMIT, max(128, triton.next_power_of_2(width)))
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
        num_warps=8 if block_n >= 2048 else 4,
    )
    return indices, counts
