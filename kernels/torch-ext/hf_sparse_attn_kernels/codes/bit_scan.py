"""Launcher of the scan in CUDA C++, which multiplies bits: for compute capability 9.0 and later."""

from __future__ import annotations

import logging
import struct
from functools import lru_cache

import torch

from .._cluster import ALIGNMENT, LEAST_CAPABILITY, ClusterKernel
from .._nvrtc import CudaError
from .._triton import cdiv, multiprocessors
from .._tuning import choice
from . import SHIFTS, UNIT_PLACE
from .prepared import Prepared, Scanned

SOURCES = ("_cluster.cuh", "codes/bits.cuh", "codes/scan.cu")
HEAD_DIM, PAGE, MOST_GROUP = 128, 64, 8
THREADS, BLOCKS = 128, 4
"""Of a block, and blocks that a multiprocessor has registers for."""
SHARED = 2048
"""Bytes of a block's shared memory: the kernel asserts that they hold what it keeps there."""
ARGUMENTS = struct.Struct("10P5if")
DOUBLINGS = sum((UNIT_PLACE - bit - shift) << (4 * bit) for bit, shift in enumerate(SHIFTS[0]))
"""How often the channels that meet bit i of a byte are doubled, in four bits each."""

logger = logging.getLogger(__name__)


def scan(
    prepared: Prepared,
    codes: torch.Tensor,
    factors: torch.Tensor,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    num_tokens: int,
    first_page: int,
) -> Scanned | None:
    """Launch the scan, or return None for a call that it does not serve, or that Triton's kernel serves faster."""
    if not serves(prepared, codes, factors):
        return None
    batch, kv_heads, capacity = codes.shape[:3]
    pairs, device, heads, columns = batch * kv_heads, codes.device, prepared.sizes["HEADS"], prepared.sizes["GROUP"]
    most_blocks = blocks_of(device, pairs=pairs, group=heads, tokens=num_tokens)
    kernel = _kernel(device, heads, prepared.softmax) if most_blocks and pairs * num_tokens else None
    if kernel is None:
        return None
    # No more blocks than the choice has: they end together, and one more would start when the others end.
    pages = cdiv(num_tokens, PAGE)
    block_pages = cdiv(pages, max(1, most_blocks // pairs))
    blocks = cdiv(pages, block_pages)
    scores = torch.empty((batch, kv_heads, num_tokens), dtype=torch.float16, device=device)
    estimates = block_lse = None
    if prepared.softmax:
        estimates = torch.empty((pairs, num_tokens, columns), dtype=torch.float16, device=device)
        block_lse = torch.empty((pairs, blocks, columns), dtype=torch.float32, device=device)
    tensors = (codes, factors, *prepared[:3], *row_bounds, scores, estimates, block_lse)
    arguments = ARGUMENTS.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        kv_heads,
        capacity // PAGE,
        num_tokens,
        first_page,
        block_pages,
        prepared.scale * HEAD_DIM**0.5,
    )
    kernel((blocks, pairs), SHARED, _stream(device), arguments)
    if estimates is None:
        return Scanned(scores, heads=heads)
    return Scanned(scores, estimates, block_lse, block_pages * PAGE, heads)


def serves(prepared: Prepared, codes: torch.Tensor, factors: torch.Tensor) -> bool:
    """Return whether the kernel serves codes of this shape at these addresses. A key's factors are loaded at once."""
    sizes = prepared.sizes
    return (
        8 * codes.shape[4] == HEAD_DIM
        and (sizes["PAGE_SIZE"], sizes["BITS"], sizes["OFFSETS"]) == (PAGE, 1, True)
        and sizes["HEADS"] <= MOST_GROUP
        and codes.data_ptr() % ALIGNMENT == 0
        and factors.data_ptr() % 4 == 0
    )


def blocks_of(device: torch.device, *, pairs: int, group: int, tokens: int) -> int:
    """Return how many blocks the launch choice has; 0 where it is Triton's kernel, and on other devices."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return 0
    config = choice("bit_scan", device, pairs=pairs, group=group, head_dim=HEAD_DIM, tokens=tokens)
    return config["per_multiprocessor"] * multiprocessors(device)


def _stream(device: torch.device) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


@lru_cache
def _kernel(device: torch.device, heads: int, softmax: bool) -> ClusterKernel | None:
    """Return the kernel, or None where it cannot be compiled or loaded."""
    try:
        with torch.cuda.device(device):
            return ClusterKernel(SOURCES, kernel_macros(heads, softmax), "scan_codes", cluster=1, threads=THREADS)
    except CudaError as error:
        logger.debug("codes are scanned by Triton's kernel: %s", error)
        return None


def kernel_macros(heads: int, softmax: bool) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with, for so many query heads of a group."""
    macros = {
        "THREADS": THREADS,
        "BLOCKS": BLOCKS,
        "AHEAD": 4 if heads <= 4 else 3,
        "PRESENT": heads,
        "COLUMNS": 4 if heads <= 4 else 8,
        "GROUP": max(heads, 3) if softmax else heads,  # estimates have a place for every column
        "SOFTMAX": int(softmax),
        "DOUBLINGS": DOUBLINGS,
        "UNITS_OF_BIT": 1 << UNIT_PLACE,
        "FIXED_BYTES": SHARED,
    }
    return tuple(macros.items())
