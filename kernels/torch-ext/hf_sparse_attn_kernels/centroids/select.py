"""Triton kernels of `select_runs`: tiles of runs side by side, each of which knows how many were chosen before it."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._topk import _ranks
from .._triton import cdiv, launch_options, next_power_of_2, wait_for_previous_kernel
from .cap import raise_bounds

TILE = {"block_r": 2048, "warps": 8}
COUNTED_FROM = 8
"""Tiles of a pair from which a launch of its own counts the chosen runs of each tile. With fewer, each program counts
those of the tiles before its own."""


@triton.jit
def _chosen_runs(runs, num_runs, weights_ptr, starts_ptr, clusters_ptr, bound):
    """Return which runs of a tile are chosen; pointers are those of the pair."""
    exists = runs < num_runs
    start = tl.load(starts_ptr + runs, mask=exists, other=0)
    end = tl.load(starts_ptr + runs + 1, mask=exists, other=0)
    has_tokens = end > start
    cluster = tl.load(clusters_ptr + runs, mask=exists, other=0)
    weight = tl.load(weights_ptr + cluster, mask=has_tokens & (cluster >= 0), other=0.0)
    return has_tokens & ((cluster < 0) | (weight > bound))


@triton.jit
def count_runs_kernel(
    weights_ptr,
    starts_ptr,
    clusters_ptr,
    bounds_ptr,
    tile_counts_ptr,  # [pairs, tiles]
    kv_heads,
    num_runs,
    bounds_stride_b,
    bounds_stride_h,
    weights_stride_b,
    weights_stride_h,
    starts_stride_b,
    starts_stride_h,
    clusters_stride_b,
    clusters_stride_h,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the chosen runs of each tile; grid (tiles, pairs)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    chosen = _chosen_runs(
        tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R),
        num_runs,
        weights_ptr + row * weights_stride_b + head * weights_stride_h,
        starts_ptr + row * starts_stride_b + head * starts_stride_h,
        clusters_ptr + row * clusters_stride_b + head * clusters_stride_h,
        tl.load(bounds_ptr + row * bounds_stride_b + head * bounds_stride_h),
    )
    tl.store(tile_counts_ptr + pair * tl.num_programs(0) + tl.program_id(0), tl.sum(chosen.to(tl.int32)))


@triton.jit
def write_runs_kernel(
    weights_ptr,
    starts_ptr,
    clusters_ptr,
    bounds_ptr,
    tile_counts_ptr,  # [pairs, tiles], for COUNTED only
    indices_ptr,  # [pairs, num_runs]
    counts_ptr,  # [pairs]
    kv_heads,
    num_runs,
    bounds_stride_b,
    bounds_stride_h,
    weights_stride_b,
    weights_stride_h,
    starts_stride_b,
    starts_stride_h,
    clusters_stride_b,
    clusters_stride_h,
    COUNTED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the chosen runs of a tile to the front of the pair's indices, a -1 for each other run to their end.

    Grid (tiles, pairs).
    """
    wait_for_previous_kernel(PDL)
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    weights_ptr += row * weights_stride_b + head * weights_stride_h
    starts_ptr += row * starts_stride_b + head * starts_stride_h
    clusters_ptr += row * clusters_stride_b + head * clusters_stride_h
    bound = tl.load(bounds_ptr + row * bounds_stride_b + head * bounds_stride_h)
    lanes = tl.arange(0, BLOCK_R)
    if COUNTED:
        every = tl.arange(0, BLOCK_T)
        before = tl.sum(tl.load(tile_counts_ptr + pair * tiles + every, mask=every < tile, other=0))
    else:
        counted = tl.zeros((BLOCK_R,), tl.int32)
        for earlier in range(tile):
            runs = earlier * BLOCK_R + lanes
            counted += _chosen_runs(runs, num_runs, weights_ptr, starts_ptr, clusters_ptr, bound).to(tl.int32)
        before = tl.sum(counted)
    runs = tile * BLOCK_R + lanes
    chosen = _chosen_runs(runs, num_runs, weights_ptr, starts_ptr, clusters_ptr, bound)
    rank = before + _ranks(chosen, BLOCK_R)
    # Of the runs up to this one, `runs - rank` are not chosen: that many -1 end the indices.
    slot = tl.where(chosen, rank, num_runs - 1 - (runs - rank))
    tl.store(indices_ptr + pair * num_runs + slot, tl.where(chosen, runs, -1), mask=runs < num_runs)
    if tile == tiles - 1:
        tl.store(counts_ptr + pair, before + tl.sum(chosen.to(tl.int32)))


def select_runs(
    weights: torch.Tensor,
    cluster_sizes: torch.Tensor,
    run_starts: torch.Tensor,
    run_clusters: torch.Tensor,
    threshold: torch.Tensor,
    *,
    max_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    check_triton_dtype("weights", weights, (torch.float32,))
    batch, kv_heads, num_runs = run_clusters.shape
    device = weights.device
    bounds = threshold.contiguous()[:, None].expand(batch, kv_heads)
    if max_tokens is not None:
        bounds = raise_bounds(weights, cluster_sizes, run_starts, run_clusters, bounds, max_tokens)
    block_r = max(32, min(TILE["block_r"], next_power_of_2(num_runs)))
    tiles = cdiv(num_runs, block_r)
    indices = torch.empty((batch, kv_heads, num_runs), dtype=torch.int32, device=device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    strides = [stride for tensor in (bounds, weights, run_starts, run_clusters) for stride in tensor.stride()[:2]]
    options = {"BLOCK_R": block_r, "num_warps": TILE["warps"] if block_r >= 1024 else 4, **launch_options(device)}
    tile_counts = counts
    if tiles >= COUNTED_FROM:
        tile_counts = torch.empty((batch * kv_heads, tiles), dtype=torch.int32, device=device)
        count_runs_kernel[(tiles, batch * kv_heads)](
            weights, run_starts, run_clusters, bounds, tile_counts, kv_heads, num_runs, *strides, **options
        )
    write_runs_kernel[(tiles, batch * kv_heads)](
        weights,
        run_starts,
        run_clusters,
        bounds,
        tile_counts,
        indices,
        counts,
        kv_heads,
        num_runs,
        *strides,
        COUNTED=tiles >= COUNTED_FROM,
        BLOCK_T=next_power_of_2(tiles),
        **options,
    )
    return indices, counts
