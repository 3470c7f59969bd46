"""`append_and_attend_tokens` as one launch on thread-block clusters, for compute capability 9.0 and later."""

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
from .choose import MOST_LOCAL_PAGES, choice_bytes
from .rotation import rotation_levels

SOURCES = ("_cluster.cuh", "codes/bits.cuh", "_cluster_step.cuh", "codes/choice.cuh", "codes/cluster.cu")
REDUCTIONS = {"softmax": 0, "max": 2}  # by their numbers in the kernel
HEAD_DIM, PAGE, BITS, PLANES = 128, 64, 1, 6
MOST_GROUP, MOST_TOKENS = 8, 4096
ARGUMENTS = struct.Struct("19P13q6i3f4x")
STAGES = ("query", "centres", "scan", "exchange", "keys", "edge", "list", "attend", "merge", "write", "code")
"""Stages of the kernel, whose clocks a benchmark may ask for: the kernel's own enumeration starts with their start."""


def limit(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    bits: int,
    correction: str,
    query_centre: torch.Tensor | None,
    group_reduce: str,
    num_tokens: int | None,
    by_name: bool,
    **_: object,
) -> Exception | None:
    """Return the error of a call that this implementation does not serve, or None.

    If `by_name` is False, a call that another implementation serves faster is not served either.
    """
    tokens = codes.shape[2] if num_tokens is None else num_tokens
    # First, since it costs little: other devices have no choice of clusters.
    if not by_name and query.is_cuda and _choice_of(query, keys, tokens)["cluster"] == 0:
        return ValueError("they are as fast at this shape, or clusters have not been measured")
    refused = unequal(
        ("dtype", query.dtype, "query", torch.bfloat16),
        ("head_dim", query.shape[2], "query", HEAD_DIM),
        ("page_size", page_size, None, PAGE),
        ("bits", bits, None, BITS),
    )
    if refused is not None:
        return refused
    if query_centre is None:
        return ValueError("query_centre=None; allowed for impl='cluster': a tensor")
    refused = exceeding(
        ("group", query.shape[1] // keys.shape[1], MOST_GROUP), ("max_tokens", max_tokens, MOST_TOKENS)
    ) or misplaced(
        {"keys": keys, "values": values, "new_key": new_key, "new_value": new_value},
        {"codes": codes, "factors": factors, "centres": centres},
    )
    if refused is not None:
        return refused
    return unlaunchable(query, keys, lambda: plan_of(query, keys, tokens, group_reduce, correction), by_name)


def append_and_attend_tokens(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    sink_tokens: int,
    bits: int,
    correction: str,
    query_centre: torch.Tensor | None,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the whole step in one launch."""
    assert query_centre is not None
    batch, kv_heads, _, head_dim = keys.shape
    num_tokens = codes.shape[2] if num_tokens is None else num_tokens
    plan = plan_of(query, keys, num_tokens, group_reduce, correction)
    assert isinstance(plan, Plan)
    scale = head_dim**-0.5 if scale is None else scale
    score_scale = scale * math.log2(math.e) if group_reduce == "softmax" and query.shape[1] > kv_heads else scale
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    block_indices = seq_end.new_empty((batch, kv_heads, max_tokens))
    block_counts = seq_end.new_empty((batch, kv_heads))
    signs, _ = rotation_levels(head_dim, query.device)
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    tensors = (query, new_key, new_value, keys, values, codes, factors, centres, centre_scale, coded, query_centre)
    arguments = ARGUMENTS.pack(
        *map(torch.Tensor.data_ptr, (*tensors, signs, *row_bounds)),
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
        kv_heads,
        codes.shape[2] // PAGE,
        num_tokens,
        max_tokens,
        sink_tokens,
        plan.local_pages,
        scale,
        score_scale,
        score_scale * head_dim**0.5,
    )
    plan.kernel((kv_heads, batch), plan.shared, torch.cuda.current_stream(query.device).cuda_stream, arguments)
    return out, lse, block_indices, block_counts


def _choice_of(query: torch.Tensor, keys: torch.Tensor, tokens: int) -> dict[str, int]:
    batch, kv_heads = keys.shape[:2]
    return choice_of(query.device, batch * kv_heads, query.shape[1] // kv_heads, tokens)


def choice_of(device: torch.device, pairs: int, group: int, tokens: int) -> dict[str, int]:
    """Return the launch choice of a shape: rows times KV heads, query heads per KV head, and capacity."""
    return choice("code_step", device, pairs=pairs, group=group, head_dim=HEAD_DIM, tokens=tokens)


def plan_of(
    query: torch.Tensor, keys: torch.Tensor, tokens: int, group_reduce: str, correction: str
) -> Plan | RuntimeError:
    """Return how a call is launched, or why it is not.

    A benchmark may force a choice with `clocks` of 1: the blocks then store the clocks of their stages.
    """
    config = _choice_of(query, keys, tokens)
    group = query.shape[1] // keys.shape[1]
    size, clocks = config["cluster"] or PORTABLE_CLUSTER, config.get("clocks", 0)
    return _plan(query.device, group, group_reduce, correction, tokens, size, config["threads"], clocks)


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device,
    group: int,
    group_reduce: str,
    correction: str,
    tokens: int,
    cluster: int,
    threads: int,
    clocks: int,
) -> Plan | RuntimeError:
    reduction, least_squares = REDUCTIONS[group_reduce], correction == "least_squares"
    return plan_launch(
        device,
        cluster,
        threads,
        lambda size, most_shared: _room(size, threads, group, group_reduce, tokens, most_shared),
        lambda size: _kernel(device, size, threads, group, reduction, clocks, least_squares),
    )


def local_pages_of(tokens: int, cluster: int) -> int:
    """Return the pages of a block."""
    return max(1, cdiv(cdiv(tokens, PAGE), cluster))


def _room(
    cluster: int, threads: int, group: int, group_reduce: str, tokens: int, most_shared: int
) -> Room | RuntimeError:
    local_pages = local_pages_of(tokens, cluster)
    shared = shared_bytes(cluster, threads, group, group_reduce, local_pages)
    for what, value, most in (
        ("bytes of shared memory", shared, most_shared),
        ("pages", local_pages, MOST_LOCAL_PAGES),
    ):
        if value > most:
            return RuntimeError(
                f"num_tokens={tokens} takes {value} {what} of a block of impl='cluster'; allowed: at most {most}"
            )
    return Room(shared, local_pages)


@lru_cache(maxsize=256)
def _kernel(
    device: torch.device, cluster: int, threads: int, group: int, reduction: int, clocks: int, least_squares: bool
) -> ClusterKernel:
    macros = kernel_macros(cluster, threads, group, reduction, clocks, least_squares)
    with torch.cuda.device(device):
        return ClusterKernel(SOURCES, macros, "key_codes_step", cluster=cluster, threads=threads)


def kernel_macros(
    cluster: int, threads: int, group: int, reduction: int = 0, clocks: int = 0, least_squares: bool = False
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with; `reduction` is a number of `REDUCTIONS`."""
    fixed_bytes = _fixed_shared_bytes(cluster, threads, group)
    least = int(least_squares)
    return step_macros(cluster, threads, group, reduction, fixed_bytes, clocks, LEAST_SQUARES=least)


def shared_bytes(cluster: int, threads: int, group: int, group_reduce: str, local_pages: int) -> int:
    """Return the shared memory of a block: the kernel's `Shared`, then keys of scores, or the warps' outputs."""
    heads = group if group < 3 else 4 * cdiv(group, 4)
    keys = 2 * local_pages * PAGE + 16 * cdiv(4 * local_pages * heads, 16)
    if group_reduce == "softmax" and group > 1:
        keys += 2 * local_pages * PAGE * heads
    outputs = threads // 32 * group * HEAD_DIM * 4
    return _fixed_shared_bytes(cluster, threads, group) + max(keys, outputs)


def _fixed_shared_bytes(cluster: int, threads: int, group: int) -> int:
    """Return the bytes set apart for the kernel's struct `Shared`, which asserts that it fits."""
    warps, columns = threads // 32, 8 * cdiv(group, 4)
    arrays = (
        choice_bytes(cluster, warps),
        cluster * cdiv(group * HEAD_DIM // 4, cluster) * 16,  # output_in
        columns * HEAD_DIM,  # parts
        group * (HEAD_DIM + 8) * 2,  # query
        group * PLANES * HEAD_DIM // 8,  # planes
        5 * 8,  # barriers
        8 * group * (2 * warps + 2 * cluster),  # warp_lse, lse_in, warp_output, sums_in
        4 * group * 4,  # centre_unit, slope, lse, sum
        cdiv(MOST_TOKENS // 16, cluster) * 16 * 4,  # tokens
    )
    return cdiv(sum(arrays) + 64, 128) * 128  # with the struct's padding
