"""CUDA's managed memory, told to stay on the host.

Kernels that read single tokens out of it, spread over gigabytes, take as long as the link does. Out of host memory that
is pinned (cudaHostRegister, cudaHostAlloc) they took the longer, the wider the tokens were spread, however large the
host's own pages were: the time went into translating addresses.

Never more of it is asked for than the device has free. The driver then always could take it onto the device, and never
has to make room there, which a process cannot rely on: it may stop the device for all of its users.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from functools import lru_cache, partial
from typing import Any

import torch

from hf_sparse_attn.cache.host.release import release

# Of the driver's enumerations.
CONCURRENT_MANAGED_ACCESS = 89
ATTACH_GLOBAL = 1
SET_PREFERRED_LOCATION, SET_ACCESSED_BY = 3, 5
HOST = -1

_managed_bytes: Counter[int] = Counter()
"""Bytes of managed memory that this process holds, by the index of the device that uses them."""


def managed_bytes(num_bytes: int, device: torch.device) -> torch.Tensor | None:
    """Allocate zeros that lie on the host, under an address that a CUDA device's kernels use too.

    Parameters
    ----------
    num_bytes
        Size, at least 1.
    device
        The CUDA device.

    Returns
    -------
    torch.Tensor or None
        uint8 [num_bytes] on the CPU; its memory is freed with its last view. None where the driver offers no such
        memory, or where the host and the device may not use it at the same time, where it does not suffice, or where
        all such memory together would be more than the device has free.
    """
    driver = _driver()
    if driver is None:
        return None
    begin, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        if not _is_concurrent(driver, index) or not _is_free(_managed_bytes[index] + num_bytes, index):
            return None
        if driver.cuMemAllocManaged(ctypes.byref(begin), size, ATTACH_GLOBAL):
            return None
        memory = (ctypes.c_ubyte * num_bytes).from_address(begin.value or 0)
        _managed_bytes[index] += num_bytes
        weakref.finalize(memory, release, partial(_free, driver, begin, num_bytes, index), device).atexit = False
        stream = torch.cuda.current_stream()
        handle = ctypes.c_void_p(stream.cuda_stream)
        # The advice comes first, so that the pages are taken on the host and mapped for the device at once.
        failed = (
            driver.cuMemAdvise(begin, size, SET_PREFERRED_LOCATION, HOST)
            or driver.cuMemAdvise(begin, size, SET_ACCESSED_BY, index)
            or driver.cuMemPrefetchAsync(begin, size, HOST, handle)
            or driver.cuMemsetD8Async(begin, ctypes.c_ubyte(0), size, handle)
        )
        stream.synchronize()
    return None if failed else torch.frombuffer(memory, dtype=torch.uint8)


def _free(driver: Any, begin: ctypes.c_uint64, num_bytes: int, index: int) -> None:
    driver.cuMemFree_v2(begin)
    _managed_bytes[index] -= num_bytes


def _is_free(num_bytes: int, index: int) -> bool:
    """Whether a device has so many bytes free, once PyTorch has given back what it keeps for later if need be."""
    missing = num_bytes - torch.cuda.mem_get_info(index)[0]
    if 0 < missing <= torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index):
        torch.cuda.empty_cache()
        missing = num_bytes - torch.cuda.mem_get_info(index)[0]
    return missing <= 0


@lru_cache
def _driver() -> Any:
    """Return the CUDA driver's library, or None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _is_concurrent(driver: Any, index: int) -> bool:
    """Whether the host may touch managed memory while the device's kernels run."""
    value = ctypes.c_int()
    error = driver.cuDeviceGetAttribute(ctypes.byref(value), CONCURRENT_MANAGED_ACCESS, index)
    return error == 0 and value.value == 1
