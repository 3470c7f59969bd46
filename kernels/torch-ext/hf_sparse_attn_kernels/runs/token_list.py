"""Chosen runs as a dense list of buffer positions: the first two kernels of `runs_prefill`, and their launcher."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._triton import cdiv, launch_options, next_power_of_2, wait_for_previous_kernel
from . import MAX_RUN

RUNS_AT_ONCE = 256  # runs in a tile of the two kernels


@triton.jit
def _load_runs(run_starts_ptr, indices_ptr, count, tile, BLOCK_R: tl.constexpr):
    """Return the first slot and the number of slots of a tile of chosen runs, 0 past the last one."""
    listed = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = listed < count
    run = tl.load(indices_ptr + listed, mask=mask, other=0)
    first = tl.load(run_starts_ptr + run, mask=mask, other=0)
    last = tl.load(run_starts_ptr + run + 1, mask=mask, other=0)
    return first, last - first


@triton.jit
def count_tokens_kernel(
    run_starts_ptr,
    indices_ptr,  # [batch * kv_heads, runs]
    counts_ptr,  # [batch * kv_heads]
    tile_tokens_ptr,  # int32 [batch * kv_heads, tiles]
    kv_heads,
    runs,
    starts_stride_b,
    starts_stride_h,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the tokens of every tile of chosen runs; grid (tiles, pairs)."""
    wait_for_previous_kernel(PDL)
    tile = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    run_starts_ptr += pair // kv_heads * starts_stride_b + pair % kv_heads * starts_stride_h
    _, length = _load_runs(run_starts_ptr, indices_ptr + pair * runs, tl.load(counts_ptr + pair), tile, BLOCK_R)
    tl.store(tile_tokens_ptr + pair * tl.num_programs(0) + tile, tl.sum(length))


@triton.jit
def list_tokens_kernel(
    run_starts_ptr,
    indices_ptr,  # [batch * kv_heads, runs]
    counts_ptr,  # [batch * kv_heads]
    tile_tokens_ptr,  # [batch * kv_heads, tiles]
    context_start_ptr,  # [batch]
    order_ptr,  # token of each slot, for ORDERED
    positions_ptr,  # int32 [batch * kv_heads, most_listed]
    token_counts_ptr,  # int32 [batch * kv_heads]
    kv_heads,
    runs,
    most_listed,
    starts_stride_b,
    starts_stride_h,
    order_stride_b,
    order_stride_h,
    ORDERED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the buffer positions of the chosen runs' tokens, filled up to a multiple of PADDING; grid (tiles, pairs)."""
    wait_for_previous_kernel(PDL)
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    run_starts_ptr += row * starts_stride_b + head * starts_stride_h
    order_ptr += row * order_stride_b + head * order_stride_h
    positions_ptr += pair * most_listed
    context_start = tl.load(context_start_ptr + row)
    first, length = _load_runs(run_starts_ptr, indices_ptr + pair * runs, tl.load(counts_ptr + pair), tile, BLOCK_R)
    every = tl.arange(0, BLOCK_T)
    tile_tokens = tl.load(tile_tokens_ptr + pair * tiles + every, mask=every < tiles, other=0)
    before = tl.sum(tl.where(every < tile, tile_tokens, 0))
    listed_at = before + tl.cumsum(length) - length

    lanes = tl.arange(0, BLOCK_S)
    mask = lanes[None, :] < length[:, None]
    token = first[:, None] + lanes[None, :]  # [BLOCK_R, BLOCK_S]
    if ORDERED:
        token = tl.load(order_ptr + token, mask=mask, other=0)
    tl.store(positions_ptr + listed_at[:, None] + lanes[None, :], context_start + token, mask=mask)
    total = tl.sum(tile_tokens)
    if tile == 0:
        tl.store(token_counts_ptr + pair, total)
    if (before == 0) & (tl.sum(length) > 0):
        # The attention loads whole tiles of the list, so it repeats a token that may be read: the first of all.
        numbers = tl.arange(0, BLOCK_R)
        leading = tl.min(tl.where(length > 0, numbers, BLOCK_R))
        spare = tl.sum(tl.where(numbers == leading, first, 0))
        if ORDERED:
            spare = tl.load(order_ptr + spare)
        filler = total + tl.arange(0, PADDING)
        tl.store(positions_ptr + filler, context_start + spare, mask=filler < tl.cdiv(total, PADDING) * PADDING)


def list_tokens(
    context_keys: torch.Tensor,
    context_start: torch.Tensor,
    run_starts: torch.Tensor,
    run_indices: torch.Tensor,
    run_counts: torch.Tensor,
    token_order: torch.Tensor | None,
    padding: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the chosen tokens of every pair of row and KV head.

    Returns positions in the context's buffers, int32 [batch, kv_heads, most_listed], and their number, int32
    [batch, kv_heads]. The list of a pair is filled up to a multiple of `padding`, a power of two, with one of its
    tokens.
    """
    batch, kv_heads, runs = run_indices.shape
    pairs = batch * kv_heads
    tiles = cdiv(runs, RUNS_AT_ONCE)
    most_listed = cdiv(min(runs * MAX_RUN, context_keys.shape[2]), padding) * padding
    tile_tokens = run_counts.new_empty((pairs, tiles))
    positions = run_counts.new_empty((batch, kv_heads, most_listed))
    token_counts = run_counts.new_empty((batch, kv_heads))
    order = run_starts if token_order is None else token_order
    options = {"BLOCK_R": RUNS_AT_ONCE, "num_warps": 4, **launch_options(run_counts.device)}
    count_tokens_kernel[(tiles, pairs)](
        run_starts,
        run_indices,
        run_counts,
        tile_tokens,
        kv_heads,
        runs,
        *run_starts.stride()[:2],
        **options,
    )
    list_tokens_kernel[(tiles, pairs)](
        run_starts,
        run_indices,
        run_counts,
        tile_tokens,
        context_start,
        order,
        positions,
        token_counts,
        kv_heads,
        runs,
        most_listed,
        *run_starts.stride()[:2],
        *order.stride()[:2],
        ORDERED=token_order is not None,
        BLOCK_S=next_power_of_2(MAX_RUN),
        BLOCK_T=next_power_of_2(tiles),
        PADDING=padding,
        **options,
    )
    return positions, token_counts
