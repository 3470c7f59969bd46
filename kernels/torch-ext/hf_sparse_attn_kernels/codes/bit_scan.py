"""Launcher of the scan in CUDA C++, which multiplies bits: for compute capability 9.0 and later."""

from __future__ import annotations

import logging
import struct
from enum import IntEnum
from functools import lru_cache

import torch

from .._cluster import ALIGNMENT, LEAST_CAPABILITY, ClusterKernel
from .._nvrtc import CudaError
from .._triton import cdiv, multiprocessors
from .._tuning import choice
from . import SHIFTS, UNIT_PLACE
from .prepared import Again, Prepared, Scanned

SOURCES = ("_cluster.cuh", "codes/bits.cuh", "codes/estimates.cuh", "codes/scan.cu")
HEAD_DIM, PAGE, MOST_GROUP = 128, 64, 8
THREADS, BLOCKS = 128, 4
"""Of a block, and blocks that a multiprocessor has registers for."""
SHARED = 2048
"""Bytes of a block's shared memory: the kernel asserts that they hold what it keeps there."""
ARGUMENTS = struct.Struct("11P5if")
DOUBLINGS = sum((UNIT_PLACE - bit - shift) << (4 * bit) for bit, shift in enumerate(SHIFTS[0]))
"""How often the channels that meet bit i of a byte are doubled, in four bits each."""

logger = logging.getLogger(__name__)


class Result(IntEnum):
    """What the scan finds of a token; scan.cu has the same numbers."""

    GREATEST = 0
    """The greatest estimate of the group's heads."""
    ESTIMATES = 1
    """Those of all heads."""
    PROVISIONAL = 2
    """Its score by softmax, with stand-ins for the log-sum-exp of the heads."""


def scan(
    prepared: Prepared,
    codes: torch.Tensor,
    factors: torch.Tensor,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    num_tokens: int,
    first_page: int,
    provisional: bool,
) -> Scanned | None:
    """Launch the scan, or return None for a call that it does not serve, or that Triton's kernel serves faster.

    With `provisional`, scores by softmax are provisional, for a choice that then estimates few tokens again.
    """
    if not serves(prepared, codes):
        return None
    batch, kv_heads, capacity = codes.shape[:3]
    pairs, device, heads, columns = batch * kv_heads, codes.device, prepared.sizes["HEADS"], prepared.sizes["GROUP"]
    most_blocks = blocks_of(device, pairs=pairs, group=heads, tokens=num_tokens)
    result = Result.GREATEST
    if prepared.softmax:
        result = Result.PROVISIONAL if provisional else Result.ESTIMATES
    kernel = _kernel(device, heads, result) if most_blocks and pairs * num_tokens else None
    if kernel is None:
        return None
    # No more blocks than the choice has: they end together, and one more would start when the others end.
    pages = cdiv(num_tokens, PAGE)
    block_pages = cdiv(pages, max(1, most_blocks // pairs))
    blocks = cdiv(pages, block_pages)
    scores = torch.empty((batch, kv_heads, num_tokens), dtype=torch.float16, device=device)
    estimates = block_lse = stand_ins = None
    if result == Result.ESTIMATES:
        estimates = torch.empty((pairs, num_tokens, columns), dtype=torch.float16, device=device)
    if result != Result.GREATEST:
        block_lse = torch.empty((pairs, blocks, columns), dtype=torch.float32, device=device)
    if result == Result.PROVISIONAL:
        stand_ins = torch.empty((pairs, columns), dtype=torch.float32, device=device)
    offset_scale = prepared.scale * HEAD_DIM**0.5
    tensors = (codes, factors, *prepared[:3], *row_bounds, scores, estimates, block_lse, stand_ins)
    arguments = ARGUMENTS.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        kv_heads,
        capacity // PAGE,
        num_tokens,
        first_page,
        block_pages,
        offset_scale,
    )
    kernel((blocks, pairs), SHARED, _stream(device), arguments)
    again = None if stand_ins is None else Again(stand_ins, codes, factors, *prepared[:3], offset_scale)
    return Scanned(scores, estimates, block_lse, block_pages * PAGE, heads, again)


def serves(prepared: Prepared, codes: torch.Tensor) -> bool:
    """Return whether the kernel serves codes of this shape at this address."""
    sizes = prepared.sizes
    return (
        8 * codes.shape[4] == HEAD_DIM
        and (sizes["PAGE_SIZE"], sizes["BITS"], sizes["OFFSETS"]) == (PAGE, 1, True)
        and sizes["HEADS"] <= MOST_GROUP
        and codes.data_ptr() % ALIGNMENT == 0
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
def _kernel(device: torch.device, heads: int, result: Result) -> ClusterKernel | None:
    """Return the kernel, or None where it cannot be compiled or loaded."""
    try:
        with torch.cuda.device(device):
            return ClusterKernel(SOURCES, kernel_macros(heads, result), "scan_codes", cluster=1, threads=THREADS)
    except CudaError as error:
        logger.debug("codes are scanned by Triton's kernel: %s", error)
        return None


def kernel_macros(heads: int, result: Result) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with, for so many query heads of a group."""
    macros = {
        "THREADS": THREADS,
        "BLOCKS": BLOCKS,
        "AHEAD": 4 if heads <= 4 else 3,
        "RESULT": int(result),
        "GROUP": max(heads, 3) if result == Result.ESTIMATES else heads,  # estimates have a place for every column
        "FIXED_BYTES": SHARED,
        **estimate_macros(heads),
    }
    return tuple(macros.items())


def estimate_macros(heads: int) -> dict[str, int]:
    """Return the macros of estimates.cuh, but for GROUP."""
    return {
        "PRESENT": heads,
        "COLUMNS": 4 if heads <= 4 else 8,
        "DOUBLINGS": DOUBLINGS,
        "UNITS_OF_BIT": 1 << UNIT_PLACE,
    }
