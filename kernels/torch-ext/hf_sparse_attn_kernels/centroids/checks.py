"""Argument checks shared by the ops on clusters."""

import torch

from .._check import (
    check_device,
    check_dims,
    check_dtype,
    check_float,
    check_group,
    check_int32,
    check_last_stride,
    check_like,
    check_shape,
)
from .._reference import compute_dtype

CENTROID_AXES = "batch, kv_heads, clusters, head_dim"
CLUSTER_AXES = "batch, kv_heads, clusters"
COARSE_AXES = "batch, kv_heads, coarse clusters"


def _check_ints(
    name: str, tensor: torch.Tensor, axes: str, shape: tuple[int, ...], other_name: str, other: torch.Tensor
) -> None:
    """Check an int32 tensor that kernels read along its last dimension."""
    check_int32(name, tensor, axes, shape, other_name, other)
    check_last_stride(name, tensor)


def check_centroids(query: torch.Tensor, centroids: torch.Tensor, cluster_sizes: torch.Tensor) -> None:
    """Check queries, and centroids and cluster sizes against them."""
    check_dims("query", query, "batch, q_heads, queries, head_dim")
    check_float("query", query)
    check_last_stride("query", query)
    check_dims("centroids", centroids, CENTROID_AXES)
    shape = (query.shape[0], *centroids.shape[1:3], query.shape[3])
    check_shape("centroids", centroids, CENTROID_AXES, shape)
    check_like("centroids", centroids, "query", query)
    check_last_stride("centroids", centroids)
    check_group(query.shape[1], centroids.shape[1])
    _check_ints("cluster_sizes", cluster_sizes, CLUSTER_AXES, shape[:3], "query", query)


def check_num_queries(query: torch.Tensor, num_queries: torch.Tensor | None) -> None:
    """Check the number of queries that count in each row."""
    if num_queries is not None:
        check_int32("num_queries", num_queries, "batch", (query.shape[0],), "query", query)


def check_parents(
    query: torch.Tensor,
    cluster_sizes: torch.Tensor,
    parents: torch.Tensor | None,
    parent_weights: torch.Tensor | None,
    parent_threshold: torch.Tensor | None,
) -> None:
    """Check the first level of a hierarchical lookup: all three tensors, or none."""
    given = {"parents": parents, "parent_weights": parent_weights, "parent_threshold": parent_threshold}
    missing = [name for name, tensor in given.items() if tensor is None]
    if len(missing) == len(given):
        return
    if parents is None or parent_weights is None or parent_threshold is None:
        raise ValueError(f"{', '.join(missing)} is None; allowed: all of {', '.join(given)}, or none")
    _check_ints("parents", parents, CLUSTER_AXES, tuple(cluster_sizes.shape), "query", query)
    check_dims("parent_weights", parent_weights, COARSE_AXES)
    check_shape("parent_weights", parent_weights, COARSE_AXES, (*cluster_sizes.shape[:2], parent_weights.shape[2]))
    check_dtype("parent_weights", parent_weights, compute_dtype(query.dtype))
    check_last_stride("parent_weights", parent_weights)
    check_dtype("parent_threshold", parent_threshold, torch.float32)
    check_shape("parent_threshold", parent_threshold, "batch", (query.shape[0],))
    for name, tensor in (("parent_weights", parent_weights), ("parent_threshold", parent_threshold)):
        check_device(name, tensor, "query", query)


def check_weights(weights: torch.Tensor, cluster_sizes: torch.Tensor) -> None:
    """Check the clusters' weights and sizes."""
    check_dims("weights", weights, CLUSTER_AXES)
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"weights has dtype {weights.dtype}; allowed: torch.float32, torch.float64")
    check_last_stride("weights", weights)
    _check_ints("cluster_sizes", cluster_sizes, CLUSTER_AXES, tuple(weights.shape), "weights", weights)


def check_runs(
    cluster_sizes: torch.Tensor,
    run_starts: torch.Tensor,
    run_clusters: torch.Tensor,
    other_name: str,
    other: torch.Tensor,
) -> None:
    """Check the runs of a context against its clusters, and their device against another argument's."""
    check_dims("run_clusters", run_clusters, "batch, kv_heads, runs")
    shape = (*cluster_sizes.shape[:2], run_clusters.shape[2])
    _check_ints("run_clusters", run_clusters, "batch, kv_heads, runs", shape, other_name, other)
    axes = "batch, kv_heads, runs + 1"
    _check_ints("run_starts", run_starts, axes, (*shape[:2], shape[2] + 1), other_name, other)


def check_bounds(
    threshold: torch.Tensor, max_tokens: torch.Tensor | None, batch: int, other_name: str, other: torch.Tensor
) -> None:
    """Check what limits the choice of each row."""
    for name, tensor, dtype in (("threshold", threshold, torch.float32), ("max_tokens", max_tokens, torch.int32)):
        if tensor is not None:
            check_dtype(name, tensor, dtype)
            check_shape(name, tensor, "batch", (batch,))
            check_device(name, tensor, other_name, other)
