"""Launchers of the choice of tokens in two launches: one lists those that may be chosen, one chooses among them.

For compute capability 9.0 and later.
"""

from __future__ import annotations

import logging
import struct
from functools import lru_cache

import torch

from .._cluster import ClusterKernel
from .._nvrtc import CudaError
from .._triton import cdiv, multiprocessors
from .prepared import Scanned

COMMON = ("_cluster.cuh", "codes/bits.cuh", "_cluster_step.cuh", "codes/choice.cuh", "codes/found.cuh")
KEEP, CHOOSE = "keep_candidates", "choose_kept"
SOURCES = {KEEP: (*COMMON, "codes/keep.cu"), CHOOSE: (*COMMON, "codes/choose_kept.cu")}
PAGE, KEYS = 64, 2048
LEAST_SHARE = 8
"""Times as many tokens as are chosen that a row must have: else a sample would leave most of them."""
MOST_KEPT, MOST_LISTS, ROOM = 1 << 14, 32, 1 << 14
"""Tokens of a list, lists of a row and KV head, and tokens of all lists that the second launch holds."""
MOST_SPAN = 1 << 16
"""Tokens of a block, whose places have 16 bits."""
CHOOSING_THREADS = 1024
"""Of a block of the second launch."""
REGISTERS_FOR = 1024
"""Threads that a multiprocessor has registers for."""
KEEP_ARGUMENTS, CHOOSE_ARGUMENTS = struct.Struct("7P8i"), struct.Struct("10P9i4x")

logger = logging.getLogger(__name__)


def choose(
    scanned: Scanned,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
    threads: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Launch both kernels, the first with blocks of so many threads, or return None for a call that they do not serve.

    Other arguments, and results, are those of `select.choose`.
    """
    scores = scanned.scores
    batch, kv_heads, num_tokens = scores.shape
    device, pairs = scores.device, batch * kv_heads
    blocks = max(1, min(MOST_LISTS, multiprocessors(device) * (REGISTERS_FOR // threads) // max(pairs, 1)))
    span = cdiv(cdiv(num_tokens, PAGE), blocks) * PAGE
    if span > MOST_SPAN or LEAST_SHARE * max_tokens > num_tokens:
        return None
    shape = columns_of(scanned)
    keep, choose_kept = _kernel(device, KEEP, threads, *shape), _kernel(device, CHOOSE, CHOOSING_THREADS, *shape)
    if keep is None or choose_kept is None:
        return None
    lists = cdiv(num_tokens, span)
    kept = scores.new_empty((pairs, lists, MOST_KEPT), dtype=torch.int32)
    kept_counts = kept.new_empty((pairs, lists + 1))
    keys = torch.empty((pairs, cdiv(num_tokens, PAGE) * PAGE), dtype=torch.int16, device=device)
    indices, counts = kept.new_empty((batch, kv_heads, max_tokens)), kept.new_empty((batch, kv_heads))
    tensors = (scores, scanned.estimates, scanned.program_lse, *row_bounds, kept, kept_counts)
    found = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = (kv_heads, num_tokens, max_tokens, sink_tokens, page_size, scanned.programs, scanned.tokens_per_program)
    stream = torch.cuda.current_stream(device).cuda_stream
    keep((lists, pairs), shared_bytes(KEEP, threads, span), stream, KEEP_ARGUMENTS.pack(*found, *sizes, span))
    written = (tensor.data_ptr() for tensor in (keys, indices, counts))
    arguments = CHOOSE_ARGUMENTS.pack(*found, *written, *sizes, lists, span)
    choose_kept((pairs, 1), shared_bytes(CHOOSE, CHOOSING_THREADS), stream, arguments)
    return indices, counts


def columns_of(scanned: Scanned) -> tuple[int, int]:
    """Return the query heads that a token's score is reduced from, and its estimates; 1 and 0 for a score as it is."""
    return (1, 0) if scanned.estimates is None else (scanned.heads, scanned.group)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, name: str, threads: int, heads: int, columns: int) -> ClusterKernel | None:
    """Return a kernel, or None where it cannot be compiled or loaded."""
    try:
        with torch.cuda.device(device):
            macros = kernel_macros(name, threads, heads, columns)
            return ClusterKernel(SOURCES[name], macros, name, cluster=1, threads=threads)
    except CudaError as error:
        logger.debug("tokens are not chosen in two launches: %s", error)
        return None


def kernel_macros(name: str, threads: int, heads: int, columns: int) -> tuple[tuple[str, int], ...]:
    """Return the macros that a kernel is compiled with; the last arguments are those of :func:`columns_of`."""
    macros = {
        "CLUSTER": 1,
        "THREADS": threads,
        "BLOCKS": REGISTERS_FOR // threads,
        "GROUP": heads,
        "COLUMNS": columns or 4,
        "SOFTMAX": int(columns > 0),
        "MOST_KEPT": MOST_KEPT,
        "ROOM": ROOM,
        "AHEAD": 4,
        "FIXED_BYTES": shared_bytes(name, threads),
    }
    return tuple(macros.items())


def shared_bytes(name: str, threads: int, span: int = 0) -> int:
    """Return the shared memory of a block: the kernel's `Shared`, then a bit for each token of a span."""
    if name == KEEP:
        fixed = max(4 * KEYS, 2 * MOST_KEPT) + 4 * (threads // 32 + 3 + 8)
    else:
        fixed = 6 * ROOM + 4 * (KEYS + KEYS // 64 + 3 * (threads // 32) + 3 + 8)
    return cdiv(fixed + 64, 128) * 128 + 4 * (span // 32)  # with padding
