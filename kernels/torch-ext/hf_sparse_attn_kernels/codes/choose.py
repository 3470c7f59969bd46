"""Launcher of the choice of tokens in CUDA C++, on thread-block clusters or in two launches.

For compute capability 9.0 and later.
"""

from __future__ import annotations

import logging
import struct
from functools import lru_cache

import torch

from .._cluster import ALIGNMENT, ClusterKernel, Plan, Room, plan_launch
from .._triton import cdiv
from .._tuning import choice
from . import keep
from .keep import COMMON, PAGE, columns_of
from .prepared import Scanned

SOURCES = (*COMMON, "codes/choose.cu")
HEAD_DIM, BINS, LOWER_BINS, MOST_LISTED = 128, 512, 128, 256
MOST_GROUP, REGISTERS_FOR = 8, 1024
"""Query heads of a group, and threads that a multiprocessor has registers for."""
MOST_LOCAL_PAGES = 65535 // PAGE
"""Pages of a block, whose counts have 16 bits."""
NEIGHBOURS = 8
"""Scores that a thread loads at once: 16 bytes."""
ARGUMENTS = struct.Struct("7P7i4x")

logger = logging.getLogger(__name__)


def choose(
    scanned: Scanned,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Launch the kernels, or return None for a call that they do not serve, or that Triton's kernels serve faster.

    Arguments and results are those of `select.choose`.
    """
    scores = scanned.scores
    batch, kv_heads, num_tokens = scores.shape
    estimates = 1 if scanned.estimates is None else scanned.heads
    if estimates > MOST_GROUP or num_tokens % NEIGHBOURS or scores.data_ptr() % ALIGNMENT:
        return None
    config = choice_of(scores.device, batch * kv_heads, scanned.heads, num_tokens)
    if config["keep"]:
        options = {"max_tokens": max_tokens, "sink_tokens": sink_tokens, "page_size": page_size}
        chosen = keep.choose(scanned, row_bounds, threads=config["keep"], **options)
        if chosen is not None:
            return chosen
    plan = plan_of(scores.device, scanned, num_tokens, config)
    if plan is None:
        return None
    indices = torch.empty((batch, kv_heads, max_tokens), dtype=torch.int32, device=scores.device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=scores.device)
    tensors = (scores, scanned.estimates, scanned.program_lse, *row_bounds, indices, counts)
    arguments = ARGUMENTS.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        kv_heads,
        num_tokens,
        max_tokens,
        sink_tokens,
        page_size,
        scanned.programs,
        scanned.tokens_per_program,
    )
    plan.kernel((1, batch * kv_heads), plan.shared, torch.cuda.current_stream(scores.device).cuda_stream, arguments)
    return indices, counts


def plan_of(device: torch.device, scanned: Scanned, tokens: int, config: dict[str, int]) -> Plan | None:
    """Return how the choice is launched, or None where the launch choice is Triton's kernels, or there is no room."""
    if not config["cluster"]:
        return None
    plan = _plan(device, *columns_of(scanned), tokens, config["cluster"], config["threads"])
    return plan if isinstance(plan, Plan) else None


def choice_of(device: torch.device, pairs: int, group: int, tokens: int) -> dict[str, int]:
    """Return the launch choice of a shape: rows times KV heads, query heads per KV head, and capacity."""
    return choice("token_choice", device, pairs=pairs, group=group, head_dim=HEAD_DIM, tokens=tokens)


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device, heads: int, columns: int, tokens: int, cluster: int, threads: int
) -> Plan | RuntimeError:
    plan = plan_launch(
        device,
        cluster,
        threads,
        lambda size, most_shared: _room(size, threads, tokens, most_shared),
        lambda size: _kernel(device, size, threads, heads, columns),
    )
    if not isinstance(plan, Plan):
        logger.debug("tokens are chosen by Triton's kernels: %s", plan)
    return plan


def _room(cluster: int, threads: int, tokens: int, most_shared: int) -> Room | RuntimeError:
    local_pages = cdiv(cdiv(tokens, PAGE), cluster)
    shared = _fixed_shared_bytes(cluster, threads) + 2 * local_pages * PAGE
    if local_pages > MOST_LOCAL_PAGES or shared > most_shared:
        return RuntimeError(
            f"num_tokens={tokens} is too much for clusters of {cluster} blocks: {local_pages} pages and {shared} bytes "
            f"of a block; allowed: at most {MOST_LOCAL_PAGES} and {most_shared}"
        )
    return Room(shared, local_pages)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, cluster: int, threads: int, heads: int, columns: int) -> ClusterKernel:
    macros = kernel_macros(cluster, threads, heads, columns)
    with torch.cuda.device(device):
        return ClusterKernel(SOURCES, macros, "choose_by_score", cluster=cluster, threads=threads)


def kernel_macros(cluster: int, threads: int, heads: int, columns: int) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with; the last arguments are those of :func:`keep.columns_of`."""
    macros = {
        "CLUSTER": cluster,
        "THREADS": threads,
        "BLOCKS": REGISTERS_FOR // threads,
        "GROUP": heads,
        "COLUMNS": columns or 4,
        "SOFTMAX": int(columns > 0),
        "FIXED_BYTES": _fixed_shared_bytes(cluster, threads),
    }
    return tuple(macros.items())


def choice_bytes(cluster: int, warps: int) -> int:
    """Return the bytes of the kernels' struct `Choice`."""
    arrays = (
        max(cluster * BINS * 2, warps * MOST_LISTED * 2),  # counts_in, listed
        cluster * LOWER_BINS * 2,  # lower_counts_in
        BINS * 4,  # histogram
        4 * (warps + 2 * cluster + 3),  # warp_total, above_of, level_of, edge, above, level
    )
    return cdiv(sum(arrays), 16) * 16


def _fixed_shared_bytes(cluster: int, threads: int) -> int:
    """Return the bytes set apart for the kernel's struct `Shared`, which asserts that it fits."""
    return cdiv(choice_bytes(cluster, threads // 32) + 5 * 8 + 4 * MOST_GROUP + 64, 128) * 128  # with padding
