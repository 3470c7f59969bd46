"""`centroid_weights` of one query per row: scores, split over the clusters, then their normalization.

`lookup_runs` takes the same scores and normalizes them while it chooses runs.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._triton import (
    cdiv,
    dot_dtype,
    launch_options,
    multiprocessors,
    next_power_of_2,
    sum_of_products,
    wait_for_previous_kernel,
)
from .clusters import LOWEST, Clusters, sizes_taking_part

# Several programs share a multiprocessor, each with a few tiles of centroids in flight.
SCORED = {"block_c": 64, "per_multiprocessor": 4, "warps": 4, "stages": 3, "block_g": 8}
TILE_BYTES = 16384  # of centroids, at most
PREFETCHED_TILES = 2
"""Tiles of centroids that a program requests before the previous kernel has finished."""
NORMALIZED = {"block_c": 512, "warps": 4}
LINE_BYTES = tl.constexpr(128)  # of the L2 cache
FIXED_POINT = tl.constexpr(2.0**31)


class Scores(NamedTuple):
    """Scores of all clusters, and what their normalization needs of each split of the clusters."""

    scores: torch.Tensor  # float32 [batch * q_heads, width], in units of log2; -inf for clusters not taking part
    maxima: torch.Tensor  # float32 [batch * q_heads, splits], of the scores of a split
    sums: torch.Tensor  # float32 [batch * q_heads, splits], of size * 2 ** (score - maximum)
    counts: torch.Tensor  # int32 [pairs, splits], of clusters that take part
    chosen: torch.Tensor  # int32 [pairs, tiles of runs]: -1, for the number of runs that a later kernel chooses in each

    @property
    def width(self) -> int:
        """Return the clusters, rounded up to whole tiles."""
        return self.scores.shape[1]

    @property
    def splits(self) -> int:
        """Return into how many parts the clusters of a pair are divided."""
        return self.maxima.shape[1]


@triton.jit
def _prefetch(pointers):
    """Request lines from memory into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def decode_scores_kernel(
    query_ptr,
    centroids_ptr,
    sizes_ptr,
    parents_ptr,
    parent_weights_ptr,
    parent_threshold_ptr,
    sizes_stride_b,
    sizes_stride_h,
    parents_stride_b,
    parents_stride_h,
    parent_weights_stride_b,
    parent_weights_stride_h,
    scores_ptr,  # [pairs * group, width], as in `Scores`
    maxima_ptr,  # [pairs * group, splits]
    sums_ptr,  # [pairs * group, splits]
    counts_ptr,  # [pairs, splits]
    chosen_ptr,  # [pairs, run_tiles]
    kv_heads,
    group,
    clusters,
    width,
    run_tiles,
    scale_log2,
    query_stride_b,
    query_stride_h,
    centroids_stride_b,
    centroids_stride_h,
    centroids_stride_c,
    HEAD_DIM: tl.constexpr,
    PARENTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PREFETCHED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score one split of the clusters for all query heads of a pair of row and KV head; grid (splits, pairs)."""
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    in_group = heads < group
    in_head = dims < HEAD_DIM
    tiles = tl.cdiv(clusters, BLOCK_C)
    first_tile = split * tiles // splits
    end_tile = (split + 1) * tiles // splits
    centroids_ptr += row * centroids_stride_b + head * centroids_stride_h
    if PDL and not PARENTS and PREFETCHED > 0:
        # The previous kernel may still run, and may even write centroids. Nothing is loaded before it has finished,
        # only brought into the L2 cache, which every write passes through.
        ahead = first_tile * BLOCK_C + tl.arange(0, PREFETCHED * BLOCK_C)
        ahead = tl.minimum(ahead, clusters - 1).to(tl.int64)
        step: tl.constexpr = LINE_BYTES // (centroids_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.arange(0, BLOCK_D // step if step < BLOCK_D else 1) * step
        _prefetch(centroids_ptr + ahead[:, None] * centroids_stride_c + tl.minimum(lines, HEAD_DIM - 1)[None, :])
    # Programs of the next kernel that wait find room: all programs of this one run at once. After the wait, so that
    # the next kernel starts when everything before this one has finished.
    wait_for_previous_kernel(PDL)
    query_ptr += row * query_stride_b + head * group * query_stride_h
    query_at = query_ptr + heads[None, :] * query_stride_h + dims[:, None]
    q = tl.load(query_at, mask=in_group[None, :] & in_head[:, None], other=0.0).to(DOT_DTYPE)  # [BLOCK_D, BLOCK_G]
    scores_ptr += pair * group * width
    running_max = tl.full((BLOCK_C, BLOCK_G), LOWEST, tl.float32)
    running_sum = tl.zeros((BLOCK_C, BLOCK_G), tl.float32)
    counted = tl.zeros((BLOCK_C,), tl.int32)
    for tile in range(first_tile, end_tile):
        cluster = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        exists = cluster < clusters
        sizes = sizes_taking_part(
            row,
            head,
            cluster,
            exists,
            sizes_ptr,
            parents_ptr,
            parent_weights_ptr,
            parent_threshold_ptr,
            sizes_stride_b,
            sizes_stride_h,
            parents_stride_b,
            parents_stride_h,
            parent_weights_stride_b,
            parent_weights_stride_h,
            PARENTS,
        )
        # Without parents, almost all clusters take part, and loading their centroids need not wait for their sizes.
        is_read = sizes > 0 if PARENTS else exists
        centroid_at = centroids_ptr + cluster.to(tl.int64)[:, None] * centroids_stride_c + dims[None, :]
        centroid = tl.load(centroid_at, mask=is_read[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(centroid.to(DOT_DTYPE), q, input_precision="ieee") * scale_log2  # [BLOCK_C, BLOCK_G]
        scores = tl.where((sizes > 0)[:, None], scores, float("-inf"))
        counted += (sizes > 0).to(tl.int32)
        tl.store(scores_ptr + heads[None, :] * width + cluster[:, None], scores, mask=in_group[None, :])
        # Each lane keeps its own maximum and sum until the last tile, which avoids exchange between threads.
        grows = scores > running_max
        decay = tl.exp2(-tl.abs(scores - running_max))
        keys = sizes.to(tl.float32)[:, None]
        running_sum = tl.where(grows, running_sum * decay + keys, running_sum + decay * keys)
        running_max = tl.where(grows, scores, running_max)
    maxima = tl.max(running_max, axis=0)
    sums = sum_of_products(running_sum, tl.exp2(running_max - maxima[None, :]), 0)
    at = (pair * group + heads) * splits + split
    tl.store(maxima_ptr + at, maxima, mask=in_group)
    tl.store(sums_ptr + at, sums, mask=in_group)
    tl.store(counts_ptr + pair * splits + split, tl.sum(counted))
    if BLOCK_T > 0:
        tile = split + tl.arange(0, BLOCK_T) * splits
        tl.store(chosen_ptr + pair * run_tiles + tile, tl.full((BLOCK_T,), -1, tl.int32), mask=tile < run_tiles)


@triton.jit
def normalizers(maxima_ptr, sums_ptr, pair, group, splits, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the greatest score of each query head of a pair, and the factor of its exponentials, [BLOCK_G] each.

    They do not depend on the shape of a kernel: the sum is one of integers, the same in any order.
    """
    heads = tl.arange(0, BLOCK_G)
    every = tl.arange(0, BLOCK_S)
    at = (pair * group + heads)[:, None] * splits + every[None, :]
    mask = (heads < group)[:, None] & (every < splits)[None, :]
    maxima = tl.load(maxima_ptr + at, mask=mask, other=LOWEST)
    sums = tl.load(sums_ptr + at, mask=mask, other=0.0)
    tops = tl.max(maxima, axis=1)
    # Not less than 1 and not more than the number of keys, which is below 2 ** 31; 0 if no cluster takes part.
    terms = sums * tl.exp2(maxima - tops[:, None]) * FIXED_POINT
    terms = tl.where(terms == terms, terms, 0.0)  # of a NaN query, whose scores are NaN too
    total = tl.sum(terms.to(tl.int64), axis=1).to(tl.float32) * (1.0 / FIXED_POINT)
    return tops, 1.0 / (tl.where(total == 0.0, 1.0, total) * group)


@triton.jit
def weights_of(cluster, mask, scores_ptr, width, tops, shares, group, BLOCK_G: tl.constexpr):
    """Return the weights of clusters, 0 outside the mask: the mean over a pair's query heads, in their order."""
    heads = tl.arange(0, BLOCK_G)
    weights = tl.zeros(cluster.shape, tl.float32)
    for head in tl.static_range(BLOCK_G):
        top = tl.sum(tl.where(heads == head, tops, 0.0))
        share = tl.sum(tl.where(heads == head, shares, 0.0))
        in_group = tl.zeros(cluster.shape, tl.int32) + head < group
        score = tl.load(scores_ptr + head * width + cluster, mask=mask & in_group, other=float("-inf"))
        weights += tl.exp2(score - top) * share
    return weights


@triton.jit
def decode_weights_kernel(
    scores_ptr,  # [pairs * group, width]
    maxima_ptr,  # [pairs * group, splits]
    sums_ptr,  # [pairs * group, splits]
    num_queries_ptr,  # [batch], for COUNTED only
    weights_ptr,  # [pairs, clusters]
    kv_heads,
    group,
    clusters,
    width,
    splits,
    COUNTED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Average the normalized weights of a tile of clusters over the query heads of a pair; grid (tiles, pairs)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = cluster < clusters
    tops, shares = normalizers(maxima_ptr, sums_ptr, pair, group, splits, BLOCK_G, BLOCK_S)
    weights = weights_of(cluster, exists, scores_ptr + pair * group * width, width, tops, shares, group, BLOCK_G)
    if COUNTED:
        weights = tl.where(tl.load(num_queries_ptr + pair // kv_heads) > 0, weights, 0.0)
    tl.store(weights_ptr + pair * clusters + cluster, weights, mask=exists)


def score_clusters(
    query: torch.Tensor, centroids: torch.Tensor, clusters: Clusters, scale: float, run_tiles: int = 0
) -> Scores:
    """Launch the kernel that scores all clusters for a query [batch, q_heads, 1, head_dim]."""
    batch, q_heads, _, head_dim = query.shape
    kv_heads, num_clusters = centroids.shape[1:3]
    pairs, group, device = batch * kv_heads, q_heads // kv_heads, query.device
    block_d = max(16, next_power_of_2(head_dim))
    block_c = max(16, min(SCORED["block_c"], TILE_BYTES // (block_d * query.element_size())))
    tiles = cdiv(num_clusters, block_c)
    splits = max(1, min(tiles, SCORED["per_multiprocessor"] * multiprocessors(device) // pairs))
    maxima, sums = torch.empty((2, batch * q_heads, splits), dtype=torch.float32, device=device)
    scored = Scores(
        torch.empty((batch * q_heads, tiles * block_c), dtype=torch.float32, device=device),
        maxima,
        sums,
        torch.empty((pairs, splits), dtype=torch.int32, device=device),
        torch.empty((pairs, run_tiles), dtype=torch.int32, device=device),
    )
    block_g = max(SCORED["block_g"], next_power_of_2(group))
    decode_scores_kernel[(splits, pairs)](
        query,
        centroids,
        *clusters.arguments(),
        *scored,
        kv_heads,
        group,
        num_clusters,
        scored.width,
        run_tiles,
        scale * math.log2(math.e),
        *query.stride()[:2],
        *centroids.stride()[:3],
        HEAD_DIM=head_dim,
        PARENTS=clusters.parents is not None,
        BLOCK_C=block_c,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        DOT_DTYPE=dot_dtype(query.dtype),
        PREFETCHED=PREFETCHED_TILES,
        BLOCK_T=next_power_of_2(cdiv(run_tiles, splits)) if run_tiles else 0,
        num_warps=SCORED["warps"] if block_g <= 16 else 2 * SCORED["warps"],
        num_stages=2 if query.element_size() == 4 else SCORED["stages"],
        **launch_options(device),
    )
    return scored


def normalize(scored: Scores, num_queries: torch.Tensor | None, batch: int, num_clusters: int) -> torch.Tensor:
    """Launch the kernel that makes weights [batch, kv_heads, num_clusters] of scores."""
    pairs, splits = scored.counts.shape
    kv_heads, group, device = pairs // batch, len(scored.scores) // pairs, scored.scores.device
    weights = torch.empty((batch, kv_heads, num_clusters), dtype=torch.float32, device=device)
    block_n = min(NORMALIZED["block_c"], next_power_of_2(num_clusters))
    decode_weights_kernel[(cdiv(num_clusters, block_n), pairs)](
        *scored[:3],
        scored.counts if num_queries is None else num_queries,
        weights,
        kv_heads,
        group,
        num_clusters,
        scored.width,
        splits,
        COUNTED=num_queries is not None,
        BLOCK_C=block_n,
        BLOCK_G=next_power_of_2(group),
        BLOCK_S=next_power_of_2(splits),
        num_warps=NORMALIZED["warps"],
        **launch_options(device),
    )
    return weights


def decode_weights(
    query: torch.Tensor,
    centroids: torch.Tensor,
    clusters: Clusters,
    num_queries: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Launch the kernels for a query [batch, q_heads, 1, head_dim]."""
    scored = score_clusters(query, centroids, clusters, scale)
    return normalize(scored, num_queries, len(query), centroids.shape[2])
