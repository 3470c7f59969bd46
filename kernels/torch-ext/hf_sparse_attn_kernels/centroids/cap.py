"""The token budget of `select_runs`: raises a head's threshold until its clusters fit."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._triton import launch_options, next_power_of_2, wait_for_previous_kernel

TILE = {"block": 8192, "warps": 16}


@triton.jit
def raise_bounds_kernel(
    weights_ptr,
    sizes_ptr,
    starts_ptr,
    clusters_ptr,
    bounds_ptr,
    raised_ptr,  # [pairs]
    kv_heads,
    num_clusters,
    num_runs,
    max_tokens,
    bounds_stride_b,
    bounds_stride_h,
    weights_stride_b,
    weights_stride_h,
    sizes_stride_b,
    sizes_stride_h,
    starts_stride_b,
    starts_stride_h,
    clusters_stride_b,
    clusters_stride_h,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the pair's bound, or the smallest one above it at which its clusters fit; grid (pairs,)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    weights_ptr += row * weights_stride_b + head * weights_stride_h
    sizes_ptr += row * sizes_stride_b + head * sizes_stride_h
    starts_ptr += row * starts_stride_b + head * starts_stride_h
    clusters_ptr += row * clusters_stride_b + head * clusters_stride_h
    bound = tl.load(bounds_ptr + row * bounds_stride_b + head * bounds_stride_h)
    lanes = tl.arange(0, BLOCK)

    always_read = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_runs, BLOCK):
        runs = first + lanes
        is_always_read = tl.load(clusters_ptr + runs, mask=runs < num_runs, other=0) < 0
        start = tl.load(starts_ptr + runs, mask=is_always_read, other=0)
        always_read += tl.load(starts_ptr + runs + 1, mask=is_always_read, other=0) - start
    room = max_tokens - tl.sum(always_read)

    weights, sizes = _load_clusters(lanes, weights_ptr, sizes_ptr, num_clusters)
    tokens = tl.where(weights > bound, sizes, 0)
    greatest = weights
    if not ONE_TILE:
        for first in range(BLOCK, num_clusters, BLOCK):
            more_weights, more_sizes = _load_clusters(first + lanes, weights_ptr, sizes_ptr, num_clusters)
            tokens += tl.where(more_weights > bound, more_sizes, 0)
            greatest = tl.maximum(greatest, more_weights)
    if tl.sum(tokens) > room:
        # The bits of floats that are not negative have the floats' order. The least bits at which clusters fit are in
        # [low, high]: above the greatest weight there is nothing. Each step tries the quarters of this range.
        largest = tl.max(greatest)
        low = tl.where(bound > 0.0, bound, 0.0).to(tl.int32, bitcast=True)  # not -0.0, whose bits are not 0
        high = tl.where(largest > 0.0, largest, 0.0).to(tl.int32, bitcast=True)
        while low < high:
            quarter = (high - low) // 4
            first_try = low + quarter
            second_try = low + (high - low) // 2
            third_try = second_try + quarter
            first_bound = first_try.to(tl.float32, bitcast=True)
            second_bound = second_try.to(tl.float32, bitcast=True)
            third_bound = third_try.to(tl.float32, bitcast=True)
            first_tokens = tl.where(weights > first_bound, sizes, 0)
            second_tokens = tl.where(weights > second_bound, sizes, 0)
            third_tokens = tl.where(weights > third_bound, sizes, 0)
            if not ONE_TILE:
                for first in range(BLOCK, num_clusters, BLOCK):
                    more_weights, more_sizes = _load_clusters(first + lanes, weights_ptr, sizes_ptr, num_clusters)
                    first_tokens += tl.where(more_weights > first_bound, more_sizes, 0)
                    second_tokens += tl.where(more_weights > second_bound, more_sizes, 0)
                    third_tokens += tl.where(more_weights > third_bound, more_sizes, 0)
            first_fits = tl.sum(first_tokens) <= room
            second_fits = tl.sum(second_tokens) <= room
            third_fits = tl.sum(third_tokens) <= room
            low_above = tl.where(third_fits, second_try + 1, third_try + 1)
            low = tl.where(first_fits, low, tl.where(second_fits, first_try + 1, low_above))
            high_above = tl.where(third_fits, third_try, high)
            high = tl.where(first_fits, first_try, tl.where(second_fits, second_try, high_above))
        bound = high.to(tl.float32, bitcast=True)
    tl.store(raised_ptr + pair, bound)


@triton.jit
def _load_clusters(clusters, weights_ptr, sizes_ptr, num_clusters):
    """Return weights, with NaN as -inf, and sizes of a tile of clusters."""
    mask = clusters < num_clusters
    weights = tl.load(weights_ptr + clusters, mask=mask, other=float("-inf"))
    sizes = tl.load(sizes_ptr + clusters, mask=mask, other=0)
    return tl.where(weights == weights, weights, float("-inf")), sizes


def raise_bounds(
    weights: torch.Tensor,
    cluster_sizes: torch.Tensor,
    run_starts: torch.Tensor,
    run_clusters: torch.Tensor,
    bounds: torch.Tensor,
    max_tokens: int,
) -> torch.Tensor:
    """Return the bounds [batch, kv_heads], raised for the heads that would read more than `max_tokens`."""
    batch, kv_heads, num_clusters = weights.shape
    block = max(128, min(TILE["block"], next_power_of_2(num_clusters)))
    raised = torch.empty((batch, kv_heads), dtype=torch.float32, device=weights.device)
    tensors = (bounds, weights, cluster_sizes, run_starts, run_clusters)
    raise_bounds_kernel[(batch * kv_heads,)](
        weights,
        cluster_sizes,
        run_starts,
        run_clusters,
        bounds,
        raised,
        kv_heads,
        num_clusters,
        run_clusters.shape[2],
        max_tokens,
        *[stride for tensor in tensors for stride in tensor.stride()[:2]],
        BLOCK=block,
        ONE_TILE=num_clusters <= block,
        num_warps=TILE["warps"] if block >= 2048 else 4,
        **launch_options(weights.device),
    )
    return raised
