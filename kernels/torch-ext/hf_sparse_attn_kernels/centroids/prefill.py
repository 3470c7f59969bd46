"""Launcher of `centroid_weights` for many queries: two passes over the scores, none of which reaches memory."""

import math

import torch

from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2
from .clusters import Clusters
from .prefill_kernels import cluster_sums_kernel, list_clusters_kernel, merge_sums_kernel, query_sums_kernel

# Rows or clusters that a program keeps, and those that pass by it; two programs share a multiprocessor, so that one
# multiplies while the other exponentiates.
TILES = {"kept": 128, "passing": 128, "warps": 8, "stages": 3}
PROGRAMS_PER_MULTIPROCESSOR = 2
WAVES = 4
"""Work is split until the device is filled this many times, which evens out the last one."""
MOST_SPLITS = 128
LISTED_AT_ONCE = 2048
MERGED_AT_ONCE = 32


def _tiles(query: torch.Tensor, kept: int, passing: int) -> dict[str, int]:
    """Choose the sizes of the tiles, for `kept` rows or clusters against `passing` clusters or rows."""
    width = max(16, next_power_of_2(query.shape[3]))
    most_kept, most_passing, warps, stages = TILES["kept"], TILES["passing"], TILES["warps"], TILES["stages"]
    if query.element_size() == 4:  # no tensor cores: products of small tiles
        most_kept, most_passing, warps, stages = 32, 32 if width <= 128 else 16, 4, 2
    elif width > 128:
        most_passing //= 2
    return {
        "BLOCK_M": max(16, min(most_kept, next_power_of_2(kept))),
        "BLOCK_N": max(16, min(most_passing, next_power_of_2(passing))),
        "num_warps": warps,
        "num_stages": stages,
    }


def _splits(programs: int, most: int, device: torch.device) -> int:
    """Return into how many programs each of `programs` is divided."""
    wanted = WAVES * PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)
    return min(most, MOST_SPLITS, cdiv(wanted, programs))


def prefill_weights(
    query: torch.Tensor,
    centroids: torch.Tensor,
    clusters: Clusters,
    num_queries: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Launch the kernels for a query [batch, q_heads, queries, head_dim]."""
    batch, q_heads, queries, head_dim = query.shape
    kv_heads, num_clusters = centroids.shape[1:3]
    pairs, group, device = batch * kv_heads, q_heads // kv_heads, query.device
    rows = query.reshape(batch, kv_heads, group * queries, head_dim)  # copies only if heads do not follow each other
    num_rows = group * queries
    row_tiles = _tiles(query, num_rows, num_clusters)
    cluster_tiles = _tiles(query, num_clusters, num_rows)
    whole = max(row_tiles["BLOCK_M"], cluster_tiles["BLOCK_N"])  # a multiple of both
    width = cdiv(num_rows, whole) * whole
    options = launch_options(device)
    counted = {"COUNTED": num_queries is not None}
    counts_of_rows = clusters.sizes if num_queries is None else num_queries

    list_width = cdiv(num_clusters, TILES["passing"]) * TILES["passing"]
    listed = torch.empty((pairs, list_width), dtype=torch.int32, device=device)
    log_sizes = torch.empty((pairs, list_width), dtype=torch.float32, device=device)
    counts = torch.empty((pairs,), dtype=torch.int32, device=device)
    list_clusters_kernel[(pairs,)](
        *clusters.arguments(),
        counts_of_rows,
        listed,
        log_sizes,
        counts,
        kv_heads,
        num_clusters,
        list_width,
        PARENTS=clusters.parents is not None,
        BLOCK_C=max(32, min(LISTED_AT_ONCE, next_power_of_2(num_clusters))),
        BLOCK_FILL=TILES["passing"],
        num_warps=8,
        **counted,
        **options,
    )

    products = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "DOT_DTYPE": dot_dtype(query.dtype),
        **options,
    }
    scale_log2 = scale * math.log2(math.e)
    strides = (*rows.stride()[:3], *centroids.stride()[:3])
    tiles = cdiv(num_rows, row_tiles["BLOCK_M"])
    splits = _splits(tiles * pairs, cdiv(num_clusters, row_tiles["BLOCK_N"]), device)
    partial_lse = torch.empty((splits, pairs, width), dtype=torch.float32, device=device)
    query_sums_kernel[(tiles * splits, pairs)](
        rows,
        centroids,
        listed,
        log_sizes,
        counts,
        counts_of_rows,
        partial_lse,
        kv_heads,
        queries,
        num_rows,
        list_width,
        width,
        tiles,
        splits,
        scale_log2,
        *strides,
        **counted,
        **row_tiles,
        **products,
    )
    lse = torch.empty((pairs, width), dtype=torch.float32, device=device)
    merge_sums_kernel[(cdiv(width, MERGED_AT_ONCE), pairs)](
        partial_lse,
        counts_of_rows,
        lse,
        kv_heads,
        group,
        queries,
        num_rows,
        width,
        splits,
        BLOCK_M=MERGED_AT_ONCE,
        BLOCK_S=next_power_of_2(splits),
        num_warps=4,
        **counted,
        **options,
    )

    tiles = cdiv(num_clusters, cluster_tiles["BLOCK_M"])
    splits = _splits(tiles * pairs, width // cluster_tiles["BLOCK_N"], device)
    weights = torch.zeros((splits, batch, kv_heads, num_clusters), dtype=torch.float32, device=device)
    cluster_sums_kernel[(tiles * splits, pairs)](
        rows,
        centroids,
        listed,
        counts,
        lse,
        weights,
        kv_heads,
        num_clusters,
        list_width,
        width,
        tiles,
        splits,
        scale_log2,
        *strides,
        **cluster_tiles,
        **products,
    )
    return weights.sum(dim=0) if splits > 1 else weights[0]
