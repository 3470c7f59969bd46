"""`append_and_attend` as one launch on thread-block clusters, for compute capability 9.0 and later."""

import struct
from functools import lru_cache

import torch

from .._cluster import (
    PORTABLE_CLUSTER,
    ClusterKernel,
    Plan,
    Room,
    exceeding,
    misplaced,
    plan_launch,
    step_macros,
    unequal,
    unlaunchable,
)
from .._triton import cdiv
from .._tuning import choice

SOURCES = ("_cluster.cuh", "_cluster_step.cuh", "_cluster_pages.cuh", "quest/cluster.cu")
REDUCTIONS = ("softmax", "mean", "max")  # by their numbers in the kernel
HEAD_DIM, PAGE, TILE, BINS = 128, 16, 16, 512
MOST_GROUP, MOST_BLOCKS, MOST_PAGES = 8, 512, 65536
ARGUMENTS = struct.Struct("16P19q8if4x")
STAGES = ("query", "scores", "exchange", "keys", "edge", "list", "rank", "attend", "merge", "write")
"""Stages of the kernel, whose clocks a benchmark may ask for: the kernel's own enumeration starts with their start."""


def limit(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_blocks: int,
    group_reduce: str,
    num_pages: int | None,
    statistic: str,
    by_name: bool,
    **_: object,
) -> Exception | None:
    """Return the error of a call that this implementation does not serve, or None.

    If `by_name` is False, a call that another implementation serves faster is not served either.
    """
    pages = page_min.shape[2] if num_pages is None else num_pages
    # First, since it costs little: other devices have no choice of clusters.
    if not by_name and query.is_cuda and _choice_of(query, keys, pages)["cluster"] == 0:
        return ValueError("they are as fast at this shape, or clusters have not been measured")
    refused = (
        unequal(
            ("dtype", query.dtype, "query", torch.bfloat16),
            ("dtype", page_min.dtype, "page_min", torch.int8),
            ("head_dim", query.shape[2], "query", HEAD_DIM),
            ("page_size", page_size, None, PAGE),
            ("statistic", statistic, None, "minmax"),
        )
        or exceeding(
            ("group", query.shape[1] // keys.shape[1], MOST_GROUP),
            ("max_blocks", max_blocks, MOST_BLOCKS),
            ("num_pages", pages, MOST_PAGES),
        )
        or misplaced({"keys": keys, "values": values, "page_min": page_min, "page_max": page_max}, {})
    )
    if refused is not None:
        return refused
    return unlaunchable(query, keys, lambda: plan_of(query, keys, pages, group_reduce), by_name)


def append_and_attend(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_blocks: int,
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
    statistic: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the whole step in one launch."""
    assert page_exponent is not None
    assert channel_exponent is not None
    batch, kv_heads, capacity, head_dim = keys.shape
    max_pages = page_min.shape[2]
    num_pages = max_pages if num_pages is None else num_pages
    plan = plan_of(query, keys, num_pages, group_reduce)
    assert isinstance(plan, Plan)
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    block_indices = seq_end.new_empty((batch, kv_heads, max_blocks))
    block_counts = seq_end.new_empty((batch, kv_heads))
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    tensors = (query, new_key, new_value, keys, values, page_min, page_max, page_exponent, channel_exponent)
    arguments = ARGUMENTS.pack(
        *map(torch.Tensor.data_ptr, (*tensors, *row_bounds)),
        0 if counter is None else counter.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        block_indices.data_ptr(),
        block_counts.data_ptr(),
        *query.stride(),
        *new_key.stride()[:2],
        *new_value.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *page_min.stride()[:3],
        *page_max.stride()[:3],
        kv_heads,
        capacity,
        max_pages,
        num_pages,
        max_blocks,
        sink_blocks,
        recent_blocks,
        plan.local_pages,
        head_dim**-0.5 if scale is None else scale,
    )
    plan.kernel((kv_heads, batch), plan.shared, torch.cuda.current_stream(query.device).cuda_stream, arguments)
    return out, lse, block_indices, block_counts


def _choice_of(query: torch.Tensor, keys: torch.Tensor, pages: int) -> dict[str, int]:
    batch, kv_heads = keys.shape[:2]
    return choice_of(query.device, batch * kv_heads, query.shape[1] // kv_heads, pages * PAGE)


def choice_of(device: torch.device, pairs: int, group: int, tokens: int) -> dict[str, int]:
    """Return the launch choice of a shape: rows times KV heads, query heads per KV head, and capacity."""
    return choice("cluster_step", device, pairs=pairs, group=group, head_dim=HEAD_DIM, tokens=tokens)


def plan_of(query: torch.Tensor, keys: torch.Tensor, pages: int, group_reduce: str) -> Plan | RuntimeError:
    """Return how a call is launched, or why it cannot be.

    A benchmark may force a choice with `clocks` of 1: the blocks then store the clocks of their stages.
    """
    config = _choice_of(query, keys, pages)
    group = query.shape[1] // keys.shape[1]
    cluster, clocks = config["cluster"] or PORTABLE_CLUSTER, config.get("clocks", 0)
    return _plan(query.device, group, group_reduce, pages, cluster, config["threads"], clocks)


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device, group: int, group_reduce: str, pages: int, cluster: int, threads: int, clocks: int
) -> Plan | RuntimeError:
    reduction = REDUCTIONS.index(group_reduce)
    return plan_launch(
        device,
        cluster,
        threads,
        lambda size, most_shared: _room(size, threads, group, pages, most_shared),
        lambda size: _kernel(device, size, threads, group, reduction, clocks),
    )


def _room(cluster: int, threads: int, group: int, pages: int, most_shared: int) -> Room | RuntimeError:
    local_pages = cdiv(cdiv(cdiv(pages, TILE), cluster) * TILE, 32) * 32
    shared = _shared_bytes(cluster, threads, group, local_pages)
    if shared > most_shared:
        return RuntimeError(
            f"num_pages={pages} takes {shared} bytes of a block's shared memory in impl='cluster'; "
            f"allowed: at most {most_shared}"
        )
    return Room(shared, local_pages)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, cluster: int, threads: int, group: int, reduction: int, clocks: int) -> ClusterKernel:
    macros = kernel_macros(cluster, threads, group, reduction, clocks)
    with torch.cuda.device(device):
        return ClusterKernel(SOURCES, macros, "quest_step", cluster=cluster, threads=threads)


def kernel_macros(
    cluster: int, threads: int, group: int, reduction: int = 0, clocks: int = 0
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with; `reduction` counts `REDUCTIONS`."""
    return step_macros(cluster, threads, group, reduction, _fixed_shared_bytes(cluster, threads, group), clocks)


def _shared_bytes(cluster: int, threads: int, group: int, local_pages: int) -> int:
    """Return the shared memory of a block: the kernel's `Shared`, then scores, or the warps' outputs."""
    words = threads // 32 * cdiv(local_pages, threads)  # of 32 pages, as many in all warps
    scores = 4 * (group * (local_pages + 8) + words)
    outputs = threads // 32 * group * HEAD_DIM * 4
    return _fixed_shared_bytes(cluster, threads, group) + max(scores, outputs)


def _fixed_shared_bytes(cluster: int, threads: int, group: int) -> int:
    """Return the bytes set apart for the kernel's struct `Shared`, which asserts that it fits."""
    warps, columns = threads // 32, 8 * cdiv(group, 4)
    quads_each = cdiv(group * HEAD_DIM // 4, cluster)
    arrays = (
        2 * cluster * BINS * 2,  # counts_in
        cluster * quads_each * 16,  # output_in
        2 * columns * HEAD_DIM,  # query_bytes
        group * (HEAD_DIM + 8) * 2,  # query
        MOST_BLOCKS * 4,  # chosen
        128 * 8,  # candidates
        5 * 8,  # barriers
        8 * group * (2 * warps + 1 + 2 * cluster),  # warp_lse, lse_in, warp_output, sums_in
        2 * group * 4,  # unit, lse
        group * 16 + BINS * 4,  # largest, histogram
        4 * (warps + 2 * cluster + 3),  # warp_total, above_of, level_of, edge, above, level
        cdiv(MOST_BLOCKS, cluster) * 4,  # pages
    )
    return cdiv(sum(arrays) + 64, 128) * 128  # with the struct's padding
