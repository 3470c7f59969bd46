"""The kernels of `centroid_weights` for many queries.

The first lists the clusters that take part, so that the others read no centroid in vain. The next two find the
log-sum-exp of each query, the last averages the weights of each cluster over the queries. All scores are in units of
log2. A row is a query of one of the group's heads.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._topk import _ranks
from .._triton import wait_for_previous_kernel
from .clusters import LOWEST, sizes_taking_part


@triton.jit
def list_clusters_kernel(
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
    num_queries_ptr,  # [batch], for COUNTED only
    listed_ptr,  # [pairs, list_width]
    log_sizes_ptr,  # [pairs, list_width]
    counts_ptr,  # [pairs]
    kv_heads,
    num_clusters,
    list_width,
    COUNTED: tl.constexpr,
    PARENTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the clusters of a pair that take part, with log2 of their sizes; none without queries; grid (pairs,).

    A last tile of up to BLOCK_FILL clusters is filled up with one of them, of which -inf as log2 of the size makes a
    cluster without keys.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    listed_ptr += pair * list_width
    log_sizes_ptr += pair * list_width
    listed = 0
    last = 0
    for first in range(0, num_clusters, BLOCK_C):
        cluster = first + tl.arange(0, BLOCK_C)
        sizes = sizes_taking_part(
            row,
            head,
            cluster,
            cluster < num_clusters,
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
        takes_part = sizes > 0
        at = listed + _ranks(takes_part, BLOCK_C)
        tl.store(listed_ptr + at, cluster, mask=takes_part)
        tl.store(log_sizes_ptr + at, tl.log2(tl.maximum(sizes, 1).to(tl.float32)), mask=takes_part)
        listed += tl.sum(takes_part.to(tl.int32))
        last = tl.maximum(last, tl.max(tl.where(takes_part, cluster, 0)))
    fill = listed + tl.arange(0, BLOCK_FILL)
    tl.store(listed_ptr + fill, last + tl.zeros_like(fill), mask=fill < list_width)
    tl.store(log_sizes_ptr + fill, tl.full((BLOCK_FILL,), float("-inf"), tl.float32), mask=fill < list_width)
    if COUNTED:
        listed = tl.where(tl.load(num_queries_ptr + row) > 0, listed, 0)
    tl.store(counts_ptr + pair, listed)


@triton.jit
def _first_counted(num_queries_ptr, row, queries, COUNTED: tl.constexpr):
    """Return the first query of a row that counts."""
    first = 0
    if COUNTED:
        first = tl.maximum(queries - tl.load(num_queries_ptr + row), 0)
    return first


@triton.jit
def query_sums_kernel(
    rows_ptr,
    centroids_ptr,
    listed_ptr,  # [pairs, list_width]
    log_sizes_ptr,  # [pairs, list_width]
    counts_ptr,  # [pairs]
    num_queries_ptr,  # [batch], for COUNTED only
    partial_lse_ptr,  # [splits, pairs, width]
    kv_heads,
    queries,
    num_rows,
    list_width,
    width,
    tiles,  # of rows
    splits,
    scale_log2,
    rows_stride_b,
    rows_stride_h,
    rows_stride_n,
    centroids_stride_b,
    centroids_stride_h,
    centroids_stride_c,
    HEAD_DIM: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the log-sum-exp of a tile of rows over one split of the listed clusters; grid (tiles * splits, pairs)."""
    wait_for_previous_kernel(PDL)
    first_row = tl.program_id(0) % tiles * BLOCK_M
    split = tl.program_id(0) // tiles
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    lanes = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    valid = (lanes < num_rows) & (lanes % queries >= _first_counted(num_queries_ptr, row, queries, COUNTED))
    rows_ptr += row * rows_stride_b + head * rows_stride_h
    rows_at = rows_ptr + lanes.to(tl.int64)[:, None] * rows_stride_n + dims[None, :]
    q = tl.load(rows_at, mask=valid[:, None] & in_head[None, :], other=0.0).to(DOT_DTYPE)
    count = tl.where(tl.max(valid.to(tl.int32)) > 0, tl.load(counts_ptr + pair), 0)  # queries that do not count
    cluster_tiles = tl.cdiv(count, BLOCK_N)
    listed_ptr += pair * list_width
    log_sizes_ptr += pair * list_width
    centroids_ptr += row * centroids_stride_b + head * centroids_stride_h
    running_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    running_sum = tl.zeros((BLOCK_M,), tl.float32)
    for tile in range(split * cluster_tiles // splits, (split + 1) * cluster_tiles // splits):
        cluster = tl.load(listed_ptr + tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        log_sizes = tl.load(log_sizes_ptr + tile * BLOCK_N + tl.arange(0, BLOCK_N))
        centroids_at = centroids_ptr + cluster[:, None] * centroids_stride_c + dims[None, :]
        centroid = tl.load(centroids_at, mask=in_head[None, :], other=0.0).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(centroid), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = scores * scale_log2 + log_sizes[None, :]
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        running_sum = running_sum * tl.exp2(running_max - new_max) + tl.sum(weights, axis=1)
        running_max = new_max
    # Without clusters the sum is 0 and the log-sum-exp so low that it adds nothing to those of other splits.
    lse = running_max + tl.log2(tl.where(running_sum == 0.0, 1.0, running_sum))
    tl.store(partial_lse_ptr + (split * tl.num_programs(1) + pair) * width + lanes, lse)


@triton.jit
def merge_sums_kernel(
    partial_lse_ptr,  # [splits, pairs, width]
    num_queries_ptr,  # [batch], for COUNTED only
    lse_ptr,  # [pairs, width]
    kv_heads,
    group,
    queries,
    num_rows,
    width,
    splits,
    COUNTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the log-sum-exps of all splits, plus log2 of the rows to average over; grid (tiles, pairs).

    Rows that do not count get infinity, so that all their weights are 0.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    lanes = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    every = tl.arange(0, BLOCK_S)[:, None]
    partial_at = partial_lse_ptr + (every * tl.num_programs(1) + pair) * width + lanes[None, :]
    partial = tl.load(partial_at, mask=(every < splits) & (lanes < width)[None, :], other=LOWEST)
    top = tl.max(partial, axis=0)
    lse = top + tl.log2(tl.sum(tl.exp2(partial - top[None, :]), axis=0))
    first = _first_counted(num_queries_ptr, pair // kv_heads, queries, COUNTED)
    counted = tl.maximum(queries - first, 1) * group
    valid = (lanes < num_rows) & (lanes % queries >= first)
    lse = tl.where(valid, lse + tl.log2(counted.to(tl.float32)), float("inf"))
    tl.store(lse_ptr + pair * width + lanes, lse, mask=lanes < width)


@triton.jit
def cluster_sums_kernel(
    rows_ptr,
    centroids_ptr,
    listed_ptr,  # [pairs, list_width]
    counts_ptr,  # [pairs]
    lse_ptr,  # [pairs, width]
    weights_ptr,  # [splits, pairs, num_clusters], 0 before
    kv_heads,
    num_clusters,
    list_width,
    width,
    tiles,  # of clusters
    splits,
    scale_log2,
    rows_stride_b,
    rows_stride_h,
    rows_stride_n,
    centroids_stride_b,
    centroids_stride_h,
    centroids_stride_c,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the weights of a tile of listed clusters, summed over one split of the rows; grid (tiles * splits, pairs).

    The average over rows is a sum, because their log-sum-exps contain the number of rows.
    """
    wait_for_previous_kernel(PDL)
    position = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(0) // tiles
    pair = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + pair)
    if tl.program_id(0) % tiles * BLOCK_M < count:
        row = pair // kv_heads
        head = pair % kv_heads
        dims = tl.arange(0, BLOCK_D)
        in_head = dims < HEAD_DIM
        is_listed = position < count
        cluster = tl.load(listed_ptr + pair * list_width + position, mask=is_listed, other=0)
        centroids_ptr += row * centroids_stride_b + head * centroids_stride_h
        centroids_at = centroids_ptr + cluster.to(tl.int64)[:, None] * centroids_stride_c + dims[None, :]
        centroid = tl.load(centroids_at, mask=is_listed[:, None] & in_head[None, :], other=0.0).to(DOT_DTYPE)
        rows_ptr += row * rows_stride_b + head * rows_stride_h
        lse_ptr += pair * width
        row_tiles = width // BLOCK_N
        sums = tl.zeros((BLOCK_M,), tl.float32)
        for tile in range(split * row_tiles // splits, (split + 1) * row_tiles // splits):
            lanes = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            lse = tl.load(lse_ptr + tile * BLOCK_N + tl.arange(0, BLOCK_N))
            rows_at = rows_ptr + lanes.to(tl.int64)[:, None] * rows_stride_n + dims[None, :]
            mask = (lse < float("inf"))[:, None] & in_head[None, :]
            q = tl.load(rows_at, mask=mask, other=0.0).to(DOT_DTYPE)  # [BLOCK_N, BLOCK_D]
            scores = tl.dot(centroid, tl.trans(q), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
            sums += tl.sum(tl.exp2(scores * scale_log2 - lse[None, :]), axis=1)
        at = (split * tl.num_programs(1) + pair) * num_clusters + cluster
        tl.store(weights_ptr + at, sums, mask=is_listed)
