"""The index of clustered keys: centroids, sizes, and the runs that the keys of a cluster are read in."""

from __future__ import annotations

import torch
from hf_sparse_attn_kernels import cluster_sums
from hf_sparse_attn_kernels.runs import MAX_RUN

from hf_sparse_attn.clusters.kmeans import sort_by_cluster

ALWAYS = -1
"""Cluster of a run that is always read."""


def build_index(
    keys: torch.Tensor, labels: torch.Tensor, num_clusters: int, always_read: int = 0
) -> dict[str, torch.Tensor]:
    """Sort keys by cluster, and describe the clusters.

    Parameters
    ----------
    keys
        [heads, tokens, head_dim], after RoPE, not normalised.
    labels
        int32 [heads, tokens]: cluster of every key.
    num_clusters
        Number of clusters, empty ones included.
    always_read
        Tokens after ``keys`` that every query reads; they get runs of their own at the end.

    Returns
    -------
    dict
        ``token_order`` int32 [heads, tokens]: the tokens in cluster order. ``centroids`` [heads, clusters, head_dim]:
        mean key of each cluster, zeros for an empty one. ``cluster_sizes`` int32 [heads, clusters]. ``run_starts``
        int32 [heads, runs + 1]: first place in ``token_order`` of each run; absent runs at the end have no tokens.
        ``run_clusters`` int32 [heads, runs]: cluster of each run, or ``ALWAYS``.
    """
    token_order, cluster_sizes, centroids = _means(keys, labels, num_clusters)
    run_starts, run_clusters = _runs(cluster_sizes, keys.shape[1], always_read)
    return {
        "token_order": token_order,
        "centroids": centroids,
        "cluster_sizes": cluster_sizes,
        "run_starts": run_starts,
        "run_clusters": run_clusters,
    }


def mean_keys(keys: torch.Tensor, labels: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """Return the ``centroids`` of :func:`build_index` alone."""
    return _means(keys, labels, num_clusters)[2]


def add_coarse_level(index: dict[str, torch.Tensor], parents: torch.Tensor, num_coarse: int) -> dict[str, torch.Tensor]:
    """Add the coarse clusters of a hierarchical lookup to an index (arXiv 2411.09688).

    Parameters
    ----------
    index
        The result of :func:`build_index`.
    parents
        int32 [heads, clusters]: coarse cluster of every cluster.
    num_coarse
        Number of coarse clusters.

    Returns
    -------
    dict
        The index, with ``parents``, ``coarse_centroids`` [heads, coarse, head_dim], the mean of all keys below, and
        ``coarse_sizes`` int32 [heads, coarse], their number.
    """
    sizes, centroids = index["cluster_sizes"], index["centroids"]
    coarse_sizes = sizes.new_zeros(len(sizes), num_coarse).scatter_add_(1, parents.long(), sizes)
    sums = cluster_sums(centroids.float() * sizes[..., None], *sort_by_cluster(parents, num_coarse))
    coarse_centroids = (sums / coarse_sizes.clamp_min(1)[..., None]).to(centroids.dtype)
    return {**index, "parents": parents, "coarse_centroids": coarse_centroids, "coarse_sizes": coarse_sizes}


def siblings_together(labels: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Renumber clusters so that those of one coarse cluster follow one another, and are read in one piece.

    Takes and returns the cluster of every token, int32 [heads, tokens], and the coarse cluster of every cluster, int32
    [heads, clusters].
    """
    order = parents.argsort(dim=1, stable=True)
    new_numbers = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return new_numbers.gather(1, labels.long()).int(), parents.gather(1, order)


def _means(
    keys: torch.Tensor, labels: torch.Tensor, num_clusters: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens in cluster order, the cluster sizes, and the mean key of each cluster."""
    order, offsets = sort_by_cluster(labels, num_clusters)
    sizes = offsets.diff(dim=1)
    return order, sizes, (cluster_sums(keys, order, offsets) / sizes.clamp_min(1)[..., None]).to(keys.dtype)


def _offsets(sizes: torch.Tensor) -> torch.Tensor:
    """Return where each cluster begins, and where the last one ends: int32 [heads, clusters + 1]."""
    offsets = sizes.new_zeros(sizes.shape[0], sizes.shape[1] + 1)
    torch.cumsum(sizes, dim=1, out=offsets[:, 1:])
    return offsets


def _runs(cluster_sizes: torch.Tensor, tokens: int, always_read: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the clusters, then the tokens that are always read, into runs of at most ``MAX_RUN``."""
    heads, device = len(cluster_sizes), cluster_sizes.device
    last = torch.full((heads, 1), always_read, dtype=torch.int32, device=device)
    sizes = torch.cat((cluster_sizes, last), dim=1)
    first_slots, first_runs = _offsets(sizes), _offsets(-(-sizes // MAX_RUN))
    total = first_runs[:, -1:]
    runs = torch.arange(int(total.max()), dtype=torch.int32, device=device).expand(heads, -1).contiguous()
    clusters = torch.searchsorted(first_runs, runs, right=True) - 1
    exists = runs < total
    clusters = clusters.clamp_max(sizes.shape[1] - 1)
    starts = first_slots.gather(1, clusters) + MAX_RUN * (runs - first_runs.gather(1, clusters))
    end = tokens + always_read
    starts = torch.cat((starts.where(exists, end), torch.full_like(last, end)), dim=1)
    is_cluster = exists & (clusters < cluster_sizes.shape[1])
    return starts.int(), clusters.int().where(is_cluster, ALWAYS)
