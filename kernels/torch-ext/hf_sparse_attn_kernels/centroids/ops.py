"""The ops that choose what to read of a clustered context."""

import torch

from .._check import check_dims, check_scale
from .._op import op, output, selection_output
from .._reference import compute_dtype
from .checks import check_bounds, check_centroids, check_num_queries, check_parents, check_runs, check_weights


@op(launcher="weights")
def centroid_weights(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_sizes: torch.Tensor,
    *,
    num_queries: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    parent_weights: torch.Tensor | None = None,
    parent_threshold: torch.Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Estimate the attention weight of a key of each cluster from the cluster's centroid.

    Squeezed Attention (arXiv 2411.09688, appendix B). For a query q and a cluster i with centroid C_i
    and N_i keys, the estimate is exp(scale q.C_i) / sum_j N_j exp(scale q.C_j), computed with the maximum subtracted.
    The weight of the cluster is its mean over the queries that count and the query heads of the group. Query head h
    belongs to KV head h // group, group = q_heads // kv_heads.

    With `parents`, only clusters take part whose coarse cluster weighs more than `parent_threshold`: the second level
    of the hierarchical lookup. The others have weight 0 and are left out of the sum, and their centroids are not read.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, queries, head_dim]; float32, bfloat16 or float16 (float64 in the reference); the last stride
        is 1. One query takes the path of a decode step: centroids are read once. More take the tensor cores.
    centroids : torch.Tensor
        [batch, kv_heads, clusters, head_dim], of the dtype of `query`: the mean key of each cluster. The last stride is
        1, the others are free: a batch stride of 0 shares the centroids.
    cluster_sizes : torch.Tensor
        int32 [batch, kv_heads, clusters], the last stride is 1: the number of keys N_i. A cluster of size 0 never takes
        part, and its centroid never influences a result.
    num_queries : torch.Tensor, optional
        int32 [batch]: only the last num_queries[b] queries of row b count; 0 gives weights 0. Default: all of them.
    parents : torch.Tensor, optional
        int32 [batch, kv_heads, clusters], the last stride is 1: index of the coarse cluster of each cluster; arbitrary
        for clusters of size 0. This argument and the next two are given together.
    parent_weights : torch.Tensor, optional
        float32 [batch, kv_heads, coarse clusters] (float64 for float64), the last stride is 1: weights of the coarse
        clusters.
    parent_threshold : torch.Tensor, optional
        float32 [batch].
    scale : float, optional
        Factor on q.C. Default: head_dim ** -0.5.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    torch.Tensor
        float32 [batch, kv_heads, clusters] (float64 for float64); 0 for clusters that do not take part.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_centroids(query, centroids, cluster_sizes)
    check_num_queries(query, num_queries)
    check_parents(query, cluster_sizes, parents, parent_weights, parent_threshold)
    check_scale(scale)
    return output(query, cluster_sizes.shape, compute_dtype(query.dtype))


@op(launcher="select")
def select_runs(
    weights: torch.Tensor,
    cluster_sizes: torch.Tensor,
    run_starts: torch.Tensor,
    run_clusters: torch.Tensor,
    threshold: torch.Tensor,
    *,
    max_tokens: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the runs of the clusters that weigh more than a threshold, and the runs that are always read.

    Squeezed Attention (arXiv 2411.09688). A run is a range of consecutive slots whose keys belong to one
    cluster; a cluster has one run or several. A run is chosen if it has tokens, and its cluster weighs more than the
    row's threshold or is -1.

    With `max_tokens`, the threshold of a head whose chosen runs have more tokens is raised to the smallest of its
    weights at which they fit. Clusters of equal weight are kept or dropped together. Runs that are always read count,
    but stay even if they alone exceed `max_tokens`; with 0 or less, nothing else is chosen.

    Of the tensors with three dimensions the last stride is 1, the others are free.

    Parameters
    ----------
    weights : torch.Tensor
        float32 [batch, kv_heads, clusters] (float64 in the reference), as `centroid_weights` returns them; not
        negative. NaN is never chosen.
    cluster_sizes : torch.Tensor
        int32 [batch, kv_heads, clusters]: tokens of the cluster, which are those of its runs.
    run_starts : torch.Tensor
        int32 [batch, kv_heads, runs + 1], ascending: run r has the slots run_starts[r] to run_starts[r + 1] - 1.
    run_clusters : torch.Tensor
        int32 [batch, kv_heads, runs]: cluster of the run, or -1 to read it always; arbitrary for runs without tokens.
    threshold : torch.Tensor
        float32 [batch]. A negative one chooses every run with tokens whose weight is not NaN.
    max_tokens : torch.Tensor, optional
        int32 [batch]: greatest number of tokens that a head of the row reads. Default: no limit.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    run_indices : torch.Tensor
        int32 [batch, kv_heads, runs]: the chosen runs, ascending, then -1.
    run_counts : torch.Tensor
        int32 [batch, kv_heads]: number of chosen runs.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_weights(weights, cluster_sizes)
    check_runs(cluster_sizes, run_starts, run_clusters, "weights", weights)
    check_bounds(threshold, max_tokens, weights.shape[0], "weights", weights)
    return selection_output(weights, *run_clusters.shape)


@op(launcher="lookup")
def lookup_runs(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_sizes: torch.Tensor,
    run_starts: torch.Tensor,
    run_clusters: torch.Tensor,
    threshold: torch.Tensor,
    *,
    parents: torch.Tensor | None = None,
    parent_weights: torch.Tensor | None = None,
    parent_threshold: torch.Tensor | None = None,
    max_tokens: torch.Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the runs to read for one query per row: `centroid_weights`, then `select_runs`.

    Squeezed Attention (arXiv 2411.09688), a decode step. The choice is exactly that of the two ops.
    Without `max_tokens` it takes fewer launches, because weights are normalized where they are compared.

    Of the tensors with three or four dimensions the last stride is 1, the others are free.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference); the last stride is 1.
    centroids : torch.Tensor
        [batch, kv_heads, clusters, head_dim], of the dtype of `query`: the mean key of each cluster.
    cluster_sizes : torch.Tensor
        int32 [batch, kv_heads, clusters]: the number of keys of each cluster; one of size 0 never takes part.
    run_starts : torch.Tensor
        int32 [batch, kv_heads, runs + 1], ascending: run r has the slots run_starts[r] to run_starts[r + 1] - 1.
    run_clusters : torch.Tensor
        int32 [batch, kv_heads, runs]: cluster of the run, or -1 to read it always; arbitrary for runs without tokens.
    threshold : torch.Tensor
        float32 [batch]: clusters that weigh more are chosen.
    parents : torch.Tensor, optional
        int32 [batch, kv_heads, clusters]: index of the coarse cluster of each cluster, as in `centroid_weights`. This
        argument and the next two are given together.
    parent_weights : torch.Tensor, optional
        float32 [batch, kv_heads, coarse clusters] (float64 for float64): weights of the coarse clusters.
    parent_threshold : torch.Tensor, optional
        float32 [batch].
    max_tokens : torch.Tensor, optional
        int32 [batch]: greatest number of tokens that a head of the row reads, as in `select_runs`. Default: no limit.
    scale : float, optional
        Factor on q.C. Default: head_dim ** -0.5.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    run_indices : torch.Tensor
        int32 [batch, kv_heads, runs]: the chosen runs, ascending, then -1.
    run_counts : torch.Tensor
        int32 [batch, kv_heads]: number of chosen runs.
    clusters_read : torch.Tensor
        int32 [batch, kv_heads]: number of clusters that take part: those with keys and, with `parents`, a coarse
        cluster that weighs enough.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("query", query, "batch, q_heads, head_dim")
    check_centroids(query[:, :, None], centroids, cluster_sizes)
    check_parents(query, cluster_sizes, parents, parent_weights, parent_threshold)
    check_scale(scale)
    check_runs(cluster_sizes, run_starts, run_clusters, "query", query)
    check_bounds(threshold, max_tokens, query.shape[0], "query", query)
    pair = run_clusters.shape[:2]
    return *selection_output(query, *run_clusters.shape), output(query, pair, torch.int32)
