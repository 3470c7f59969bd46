"""`append_and_attend_progressively` as one launch on thread-block clusters, for compute capability 9.0 and later."""

import math
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

SOURCES = ("_cluster.cuh", "_cluster_step.cuh", "_cluster_pages.cuh", "psa/cluster.cu")
REDUCTIONS = ("softmax", "mean", "max")  # by their numbers in the kernel
STATISTICS = ("cuboid_mean", "minmax")
HEAD_DIM, PAGE, TILE, BINS, LISTED = 128, 32, 16, 512, 1024
MOST_GROUP, MOST_MICROBATCH, MOST_PAGES = 8, 32, 65536
LANES = 32  # of a warp, which looks at so many microbatches at once
ARGUMENTS = struct.Struct("16P19q14i2f")
STAGES = ("query", "scores", "exchange", "bins", "list", "rank", "attend", "stop", "merge", "write")
"""Stages of the kernel, as in `quest.cluster`; of those that come several times, the last one counts."""


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
    microbatch: int,
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
    # First, since it costs little.
    if not by_name and query.is_cuda and _choice_of(query, keys, pages)["cluster"] == 0:
        return ValueError("they are as fast at this shape, or clusters have not been measured")
    refused = unequal(
        ("dtype", query.dtype, "query", torch.bfloat16),
        ("dtype", page_min.dtype, "page_min", torch.int8),
        ("head_dim", query.shape[2], "query", HEAD_DIM),
        ("page_size", page_size, None, PAGE),
    )
    if refused is not None:
        return refused
    if statistic not in STATISTICS:
        names = " or ".join(map(repr, STATISTICS))
        return ValueError(f"statistic={statistic!r}; allowed for impl='cluster': {names}")
    refused = exceeding(
        ("group", query.shape[1] // keys.shape[1], MOST_GROUP),
        ("microbatch", microbatch, MOST_MICROBATCH),
        ("num_pages", pages, MOST_PAGES),
    ) or misplaced({"keys": keys, "values": values, "page_min": page_min, "page_max": page_max}, {})
    if refused is not None:
        return refused
    return unlaunchable(query, keys, lambda: plan_of(query, keys, pages, group_reduce, microbatch), by_name)


def append_and_attend_progressively(
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
    microbatch: int,
    threshold: float,
    max_blocks: int | None,
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    rest: str,
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
    max_blocks = num_pages if max_blocks is None else max_blocks
    plan = plan_of(query, keys, num_pages, group_reduce, microbatch)
    assert isinstance(plan, Plan)
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    block_order = seq_end.new_empty((batch, kv_heads, max_blocks))
    read_counts = seq_end.new_empty((batch, kv_heads))
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    tensors = (query, new_key, new_value, keys, values, page_min, page_max, page_exponent, channel_exponent)
    arguments = ARGUMENTS.pack(
        *map(torch.Tensor.data_ptr, (*tensors, *row_bounds)),
        0 if counter is None else counter.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        block_order.data_ptr(),
        read_counts.data_ptr(),
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
        microbatch,
        *waves_of(plan.cluster, plan.threads, microbatch),
        sink_blocks + recent_blocks,
        rest == "last",
        statistic == "minmax",
        head_dim**-0.5 if scale is None else scale,
        math.log2(threshold) - math.log1p(-threshold) / math.log(2) if threshold < 1 else math.inf,
    )
    plan.kernel((kv_heads, batch), plan.shared, torch.cuda.current_stream(query.device).cuda_stream, arguments)
    return out, lse, block_order, read_counts


def waves_of(cluster: int, threads: int, microbatch: int) -> tuple[int, int]:
    """Return the blocks of tokens in the first wave and in others: whole microbatches, of half or one block a warp."""
    warps = cluster * threads // LANES
    first, other = (min(blocks, LANES * microbatch) // microbatch * microbatch for blocks in (warps // 2, warps))
    return first, other


def _choice_of(query: torch.Tensor, keys: torch.Tensor, pages: int) -> dict[str, int]:
    batch, kv_heads = keys.shape[:2]
    return choice_of(query.device, batch * kv_heads, query.shape[1] // kv_heads, pages * PAGE)


def choice_of(device: torch.device, pairs: int, group: int, tokens: int) -> dict[str, int]:
    """Return the launch choice of a shape: rows times KV heads, query heads per KV head, and capacity."""
    return choice("progressive_step", device, pairs=pairs, group=group, head_dim=HEAD_DIM, tokens=tokens)


def plan_of(
    query: torch.Tensor, keys: torch.Tensor, pages: int, group_reduce: str, microbatch: int
) -> Plan | RuntimeError:
    """Return how a call is launched, or why it cannot be.

    A benchmark may force a choice with `clocks` of 1: the blocks then store the clocks of their stages.
    """
    config = _choice_of(query, keys, pages)
    group = query.shape[1] // keys.shape[1]
    cluster, clocks = config["cluster"] or PORTABLE_CLUSTER, config.get("clocks", 0)
    return _plan(query.device, group, group_reduce, pages, microbatch, cluster, config["threads"], clocks)


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device,
    group: int,
    group_reduce: str,
    pages: int,
    microbatch: int,
    cluster: int,
    threads: int,
    clocks: int,
) -> Plan | RuntimeError:
    reduction = REDUCTIONS.index(group_reduce)
    return plan_launch(
        device,
        cluster,
        threads,
        lambda size, most_shared: _room(size, threads, group, pages, microbatch, most_shared),
        lambda size: _kernel(device, size, threads, group, reduction, clocks),
    )


def _room(cluster: int, threads: int, group: int, pages: int, microbatch: int, most_shared: int) -> Room | RuntimeError:
    local_pages = local_pages_of(pages, cluster)
    shared = shared_bytes(cluster, threads, group, local_pages)
    if shared > most_shared:
        return RuntimeError(
            f"num_pages={pages} takes {shared} bytes of a block's shared memory in impl='cluster'; "
            f"allowed: at most {most_shared}"
        )
    if not waves_of(cluster, threads, microbatch)[0]:
        return RuntimeError(
            f"microbatch={microbatch}; impl='cluster' attends to fewer at once in clusters of {cluster}"
        )
    return Room(shared, local_pages)


def local_pages_of(pages: int, cluster: int) -> int:
    """Return the most pages that a block scores, in whole warps."""
    return cdiv(cdiv(cdiv(pages, TILE), cluster) * TILE, LANES) * LANES


@lru_cache(maxsize=256)
def _kernel(device: torch.device, cluster: int, threads: int, group: int, reduction: int, clocks: int) -> ClusterKernel:
    macros = kernel_macros(cluster, threads, group, reduction, clocks)
    with torch.cuda.device(device):
        return ClusterKernel(SOURCES, macros, "progressive_step", cluster=cluster, threads=threads)


def kernel_macros(
    cluster: int, threads: int, group: int, reduction: int = 0, clocks: int = 0
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with; `reduction` counts `REDUCTIONS`."""
    return step_macros(cluster, threads, group, reduction, _fixed_shared_bytes(cluster, threads, group), clocks)


def shared_bytes(cluster: int, threads: int, group: int, local_pages: int) -> int:
    """Return the shared memory of a block: the kernel's `Shared`, then scores, or the warps' outputs."""
    scores = 4 * group * (local_pages + 8)
    outputs = threads // LANES * group * HEAD_DIM * 4
    return _fixed_shared_bytes(cluster, threads, group) + max(scores, outputs)


def _fixed_shared_bytes(cluster: int, threads: int, group: int) -> int:
    """Return the bytes set apart for the kernel's struct `Shared`, which asserts that it fits."""
    warps, columns = threads // LANES, 8 * cdiv(group, 4)
    arrays = (
        2 * cluster * BINS * 2,  # counts_in
        cluster * cdiv(group * HEAD_DIM // 4, cluster) * 16,  # output_in
        2 * columns * HEAD_DIM,  # query_bytes
        group * (HEAD_DIM + 8) * 2,  # query
        PAGE * HEAD_DIM * 2,  # page_keys
        2 * LISTED * 8,  # listed, sorted
        7 * 8,  # barriers
        8 * group * (2 * warps + 1 + 2 * cluster),  # warp_lse, lse_in, warp_output, sums_in
        2 * group * cluster * warps * 4,  # weights_in
        3 * HEAD_DIM * 4,  # lower, upper, channel_exponent
        3 * group * 4,  # unit, lse, greatest
        4 * (4 * group + 4 + 2 * group),  # largest, page_largest, enough
        BINS * 4 + (2 * BINS + 1) * 4,  # histogram, first, place
        4 * (warps + 3),  # warp_total, edge, above, level
    )
    return cdiv(sum(arrays) + 64, 128) * 128  # with the struct's padding
