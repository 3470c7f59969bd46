"""Torch references of the ops of k-means clustering."""

import torch

from .._reference import compute_dtype

SCORES_AT_ONCE = 1 << 22  # values of the matrix of scores in memory


def nearest_centres(points: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.nearest_centres`."""
    groups, n, _ = points.shape
    dtype = compute_dtype(points.dtype)
    labels = torch.empty((groups, n), dtype=torch.int32, device=points.device)
    distances = torch.empty((groups, n), dtype=dtype, device=points.device)
    at_once = max(1, SCORES_AT_ONCE // centres.shape[1])
    for group in range(groups):
        c = centres[group].to(dtype)
        half_norms = c.square().sum(dim=1) / 2
        for first in range(0, n, at_once):
            x = points[group, first : first + at_once].to(dtype)
            best, label = torch.addmm(half_norms, x, c.T, beta=-1).max(dim=1)  # the first maximum
            labels[group, first : first + at_once] = label
            distances[group, first : first + at_once] = (x.square().sum(dim=1) - 2 * best).clamp_(min=0)
    return labels, distances


def cluster_sums(points: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.cluster_sums`."""
    sums = points.new_empty(
        (*offsets.shape[:1], offsets.shape[1] - 1, points.shape[2]), dtype=compute_dtype(points.dtype)
    )
    for group in range(len(points)):
        members = points[group].index_select(0, order[group]).to(sums.dtype)
        sums[group] = torch.segment_reduce(members, "sum", offsets=offsets[group].long(), axis=0)
    return sums
