"""Triton launcher of `centroid_weights`."""

import torch

from .._check import check_triton
from .clusters import Clusters
from .decode import decode_weights
from .prefill import prefill_weights


def centroid_weights(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_sizes: torch.Tensor,
    *,
    num_queries: torch.Tensor | None,
    parents: torch.Tensor | None,
    parent_weights: torch.Tensor | None,
    parent_threshold: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Launch the kernels of a decode step for one query, those of a prefill for more."""
    check_triton("query", query)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    clusters = Clusters(cluster_sizes, parents, parent_weights, parent_threshold)
    num_queries = None if num_queries is None else num_queries.contiguous()
    run = decode_weights if query.shape[2] == 1 else prefill_weights
    return run(query, centroids, clusters, num_queries, scale)
