"""`centroid_weights` of one query per row: scores, split over the clusters, then their normalization."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2, wait_for_previous_kernel
from .clusters import LOWEST, Clusters, sizes_taking_part

# Several programs share a multiprocessor, each with a few tiles of centroids in flight.
SCORED = {"block_c": 64, "per_multiprocessor": 3, "warps": 4, "stages": 4, "block_g": 8}
TILE_BYTES = 16384  # of centroids, at most
NORMALIZED = {"block_c": 512, "warps": 4}


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
    scores_ptr,  # [pairs * group, width], in units of log2; -inf for clusters that do not take part
    maxima_ptr,  # [pairs * group, splits], of the scores of a split
    sums_ptr,  # [pairs * group, splits], of size * 2 ** (score - maximum)
    kv_heads,
    group,
    clusters,
    width,
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
    PDL: tl.constexpr,
):
    """Score one split of the clusters for all query heads of a pair of row and KV head; grid (splits, pairs)."""
    if PDL:
        gdc_wait()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    in_group = heads < group
    in_head = dims < HEAD_DIM
    query_ptr += row * query_stride_b + head * group * query_stride_h
    query_at = query_ptr + heads[None, :] * query_stride_h + dims[:, None]
    q = tl.load(query_at, mask=in_group[None, :] & in_head[:, None], other=0.0).to(DOT_DTYPE)  # [BLOCK_D, BLOCK_G]
    centroids_ptr += row * centroids_stride_b + head * centroids_stride_h
    scores_ptr += pair * group * width
    running_max = tl.full((BLOCK_C, BLOCK_G), LOWEST, tl.float32)
    running_sum = tl.zeros((BLOCK_C, BLOCK_G), tl.float32)
    tiles = tl.cdiv(clusters, BLOCK_C)
    for tile in range(split * tiles // splits, (split + 1) * tiles // splits):
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
        tl.store(scores_ptr + heads[None, :] * width + cluster[:, None], scores, mask=in_group[None, :])
        # Each lane keeps its own maximum and sum until the last tile, which avoids exchange between threads.
        grows = scores > running_max
        decay = tl.exp2(-tl.abs(scores - running_max))
        keys = sizes.to(tl.float32)[:, None]
        running_sum = tl.where(grows, running_sum * decay + keys, running_sum + decay * keys)
        running_max = tl.where(grows, scores, running_max)
    if PDL:
        gdc_launch_dependents()  # not earlier: waiting programs take room from those that read
    maxima = tl.max(running_max, axis=0)
    sums = tl.sum(running_sum * tl.exp2(running_max - maxima[None, :]), axis=0)
    at = (pair * group + heads) * splits + split
    tl.store(maxima_ptr + at, maxima, mask=in_group)
    tl.store(sums_ptr + at, sums, mask=in_group)


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
    heads = tl.arange(0, BLOCK_G)
    in_group = heads < group
    lines = pair * group + heads
    every = tl.arange(0, BLOCK_S)[None, :]
    mask = in_group[:, None] & (every < splits)
    scores_at = scores_ptr + lines[:, None] * width + cluster[None, :]
    exists = cluster < clusters
    scores = tl.load(scores_at, mask=in_group[:, None] & exists[None, :], other=float("-inf"))
    maxima = tl.load(maxima_ptr + lines[:, None] * splits + every, mask=mask, other=LOWEST)
    sums = tl.load(sums_ptr + lines[:, None] * splits + every, mask=mask, other=0.0)
    top = tl.max(maxima, axis=1)
    total = tl.sum(sums * tl.exp2(maxima - top[:, None]), axis=1)
    # A total of 0 means that no cluster takes part, and then all scores are -inf.
    share = 1.0 / (tl.where(total == 0.0, 1.0, total) * group)
    weights = tl.sum(tl.exp2(scores - top[:, None]) * share[:, None], axis=0)
    if COUNTED:
        weights = tl.where(tl.load(num_queries_ptr + pair // kv_heads) > 0, weights, 0.0)
    tl.store(weights_ptr + pair * clusters + cluster, weights, mask=exists)


def decode_weights(
    query: torch.Tensor,
    centroids: torch.Tensor,
    clusters: Clusters,
    num_queries: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Launch the kernels for a query [batch, q_heads, 1, head_dim]."""
    batch, q_heads, _, head_dim = query.shape
    kv_heads, num_clusters = centroids.shape[1:3]
    pairs, group, device = batch * kv_heads, q_heads // kv_heads, query.device
    block_d = max(16, next_power_of_2(head_dim))
    block_c = max(16, min(SCORED["block_c"], TILE_BYTES // (block_d * query.element_size())))
    tiles = cdiv(num_clusters, block_c)
    splits = max(1, min(tiles, SCORED["per_multiprocessor"] * multiprocessors(device) // pairs))
    width = tiles * block_c
    scores = torch.empty((batch * q_heads, width), dtype=torch.float32, device=device)
    maxima, sums = torch.empty((2, batch * q_heads, splits), dtype=torch.float32, device=device)
    weights = torch.empty((batch, kv_heads, num_clusters), dtype=torch.float32, device=device)
    options = launch_options(device)
    block_g = max(SCORED["block_g"], next_power_of_2(group))
    decode_scores_kernel[(splits, pairs)](
        query,
        centroids,
        *clusters.arguments(),
        scores,
        maxima,
        sums,
        kv_heads,
        group,
        num_clusters,
        width,
        scale * math.log2(math.e),
        *query.stride()[:2],
        *centroids.stride()[:3],
        HEAD_DIM=head_dim,
        PARENTS=clusters.parents is not None,
        BLOCK_C=block_c,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=SCORED["warps"] if block_g <= 16 else 2 * SCORED["warps"],
        num_stages=2 if query.element_size() == 4 else SCORED["stages"],
        **options,
    )
    block_n = min(NORMALIZED["block_c"], next_power_of_2(num_clusters))
    decode_weights_kernel[(cdiv(num_clusters, block_n), pairs)](
        scores,
        maxima,
        sums,
        query if num_queries is None else num_queries,
        weights,
        kv_heads,
        group,
        num_clusters,
        width,
        splits,
        COUNTED=num_queries is not None,
        BLOCK_C=block_n,
        BLOCK_G=next_power_of_2(group),
        BLOCK_S=next_power_of_2(splits),
        num_warps=NORMALIZED["warps"],
        **options,
    )
    return weights
