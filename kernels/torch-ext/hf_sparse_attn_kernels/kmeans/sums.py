"""Triton kernels of `cluster_sums`: partial sums by equal shares of the sorted points, then a sum per cluster."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._triton import cdiv, launch_options, next_power_of_2, wait_for_previous_kernel

SHARE = 128  # sorted points of a program
BLOCK_N = 16  # points, or partial sums, at a time


@triton.jit
def partial_sums_kernel(
    points_ptr,
    order_ptr,  # [groups, num_points]
    offsets_ptr,  # [groups, num_clusters + 1]
    first_ptr,  # [groups, shares]: cluster of the first point of a share
    last_ptr,  # [groups, shares]: cluster of its last point
    partials_ptr,  # float32 [groups, num_clusters + shares, DIM]
    num_points,
    num_clusters,
    points_stride_g,
    points_stride_n,
    DIM: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the members that each cluster has in a share of the sorted points; grid (shares, groups).

    Shares and clusters both ascend along the sorted points, so no two sums have the same number share + cluster: it is
    the place of the sum.
    """
    wait_for_previous_kernel(PDL)
    share = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    begin = share * SHARE
    stop = tl.minimum(begin + SHARE, num_points)
    points_ptr += group * points_stride_g
    order_ptr += group * num_points
    offsets_ptr += group * (num_clusters + 1)
    partials_ptr += (group * (num_clusters + tl.num_programs(0)) + share) * DIM
    dims = tl.arange(0, BLOCK_D)
    first_cluster = tl.load(first_ptr + group * tl.num_programs(0) + share)
    last_cluster = tl.load(last_ptr + group * tl.num_programs(0) + share)
    partials_ptr += first_cluster.to(tl.int64) * DIM
    for cluster in range(first_cluster, last_cluster + 1):
        members_begin = tl.maximum(tl.load(offsets_ptr + cluster), begin)
        members_stop = tl.minimum(tl.load(offsets_ptr + cluster + 1), stop)
        total = tl.zeros((BLOCK_D,), tl.float32)
        for member in range(members_begin, members_stop, BLOCK_N):
            members = member + tl.arange(0, BLOCK_N)
            mask = members < members_stop
            point = tl.load(order_ptr + members, mask=mask, other=0).to(tl.int64)
            points_at = points_ptr + point[:, None] * points_stride_n + dims[None, :]
            points = tl.load(points_at, mask=mask[:, None] & (dims < DIM)[None, :], other=0.0)
            total += tl.sum(points.to(tl.float32), axis=0)
        tl.store(partials_ptr + dims, total, mask=dims < DIM)
        partials_ptr += DIM


@triton.jit
def merge_sums_kernel(
    partials_ptr,  # float32 [groups, num_clusters + shares, DIM]
    offsets_ptr,  # [groups, num_clusters + 1]
    sums_ptr,  # float32 [groups, num_clusters, DIM]
    num_clusters,
    shares,
    DIM: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the partial sums of a cluster; grid (clusters, groups)."""
    wait_for_previous_kernel(PDL)
    cluster = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    offsets_ptr += group * (num_clusters + 1) + cluster
    begin = tl.load(offsets_ptr)
    stop = tl.load(offsets_ptr + 1)
    first_share = begin // SHARE
    stop_share = tl.where(stop > begin, (stop - 1) // SHARE + 1, first_share)
    partials_ptr += (group * (num_clusters + shares) + cluster) * DIM
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for share in range(first_share, stop_share, BLOCK_N):
        every = share + tl.arange(0, BLOCK_N)
        mask = (every < stop_share)[:, None] & (dims < DIM)[None, :]
        partials = tl.load(partials_ptr + every.to(tl.int64)[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        total += tl.sum(partials, axis=0)
    tl.store(sums_ptr + (group * num_clusters + cluster) * DIM + dims, total, mask=dims < DIM)


def cluster_sums(points: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Launch `partial_sums_kernel` and `merge_sums_kernel`."""
    check_triton("points", points)
    groups, n, dim = points.shape
    num_clusters = offsets.shape[1] - 1
    shares = cdiv(n, SHARE)
    begins = torch.arange(0, n, SHARE, dtype=torch.int32, device=points.device)
    ends = (begins + (SHARE - 1)).clamp_(max=n - 1)
    # The last cluster that begins at or before a point: its own, since an empty one begins where the next does.
    bounds = torch.stack((begins, ends)).repeat(groups, 1, 1).flatten(1)
    first, last = (torch.searchsorted(offsets, bounds, right=True, out_int32=True) - 1).view(groups, 2, -1).unbind(1)
    partials = torch.empty((groups, num_clusters + shares, dim), dtype=torch.float32, device=points.device)
    sums = torch.empty((groups, num_clusters, dim), dtype=torch.float32, device=points.device)
    common = {
        "DIM": dim,
        "SHARE": SHARE,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": max(16, next_power_of_2(dim)),
        "num_warps": 4,
        **launch_options(points.device),
    }
    partial_sums_kernel[(shares, groups)](
        points,
        order,
        offsets,
        first.contiguous(),
        last.contiguous(),
        partials,
        n,
        num_clusters,
        *points.stride()[:2],
        **common,
    )
    merge_sums_kernel[(num_clusters, groups)](partials, offsets, sums, num_clusters, shares, **common)
    return sums
