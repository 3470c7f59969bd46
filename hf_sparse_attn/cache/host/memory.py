"""Host memory as tensors of a device. What is particular to CUDA's unified addressing is here and in ``managed``."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_sparse_attn.cache.host.managed import managed_bytes
from hf_sparse_attn.cache.host.release import release, release_postponed
from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.offload.transfers import pinned_empty

ALIGNMENT = 16
"""Bytes of which the addresses of keys and values are multiples, as compiled steps require of their inputs."""
PORTABLE, MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
PAGE_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK")  # fewer pages to pin, which a forked process must not copy
MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")
CONTROL_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and use of memory, in versions 2 and 1."""


class HostTokens(NamedTuple):
    """Keys and values in one block of host memory, seen from both sides.

    The key and the value of a token are neighbours, so that half as many addresses have to be translated.
    """

    host: torch.Tensor
    """[batch, kv_heads, capacity, 2, head_dim] on the CPU, for copies by the device's copy engines."""
    keys: torch.Tensor
    """[batch, kv_heads, capacity, head_dim], as a tensor of the device at the same address, for kernels."""
    values: torch.Tensor
    """Like :attr:`keys`. Neither is a view of the other, or has its storage: compiled steps write to both."""


class PinnedPages:
    """Pages of host memory that a CUDA device can address, of zeros.

    They have exactly the size asked for: PyTorch's own pinned allocator rounds up to a power of two, which may double
    the gigabytes of a long context, so it is used only where the driver refuses other ways. They are freed, or
    unpinned, once no tensor shows them.

    Parameters
    ----------
    num_bytes
        Size, at least 1.
    device
        The device.

    Raises
    ------
    RuntimeError
        The memory cannot be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        release_postponed()
        host = managed_bytes(num_bytes, device)
        if host is None:
            host = self._registered_bytes(num_bytes, device)
        if host is None:
            host = self._bytes_of_torch(num_bytes, device)
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }

    def _registered_bytes(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        """Allocate pages and pin them for as long as this object lives; return None if the driver refuses."""
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in PAGE_ADVICE:
            if hasattr(mmap, advice):
                with suppress(OSError):  # a kernel without it
                    pages.madvise(getattr(mmap, advice))
        host = torch.frombuffer(pages, dtype=torch.uint8)
        if not _register(host, device):
            return None
        weakref.finalize(self, release, partial(_unregister, host), device).atexit = False
        return host

    def _bytes_of_torch(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocate zeros by PyTorch's pinned allocator, which gets them back after the work that may use them."""
        host = _pinned_by_torch(num_bytes)
        weakref.finalize(self, release, partial(_drop, host), device).atexit = False
        return host


def _register(host: torch.Tensor, device: torch.device) -> bool:
    """Pin memory, and return whether the driver allowed it."""
    with torch.cuda.device(device):
        runtime = _runtime()
        error = runtime.cudaHostRegister(host.data_ptr(), host.numel(), PORTABLE | MAPPED)
        if error == runtime.cudaError.success:
            return True
        with suppress(RuntimeError):  # CUDA reports its last error once more, to the next launch
            torch.zeros(1, device=device)
    return False


def _unregister(host: torch.Tensor) -> None:
    _runtime().cudaHostUnregister(host.data_ptr())


def _drop(host: torch.Tensor) -> None:
    """Do nothing: what was held for this call is freed after it."""


def _pinned_by_torch(num_bytes: int) -> torch.Tensor:
    """Allocate zeros by PyTorch's pinned allocator, where pages of one's own cannot be pinned."""
    try:
        return pinned_empty((num_bytes,), torch.uint8).zero_()
    except RuntimeError as error:
        raise RuntimeError(
            f"kv_storage='host': {num_bytes / 2**30:.2f} GiB of host memory cannot be pinned "
            f"({str(error).splitlines()[0]}): free host memory, raise the limit on locked memory (ulimit -l), lower "
            "the batch or the context, or use kv_storage='device'"
        ) from error


def _runtime() -> Any:
    cudart: Any = torch.cuda.cudart  # untyped
    return cudart()


def host_tokens(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> HostTokens:
    """Allocate lasting host memory of zeros for a device's keys and values, under an address that its kernels use too.

    Parameters
    ----------
    shape
        That of the keys, and of the values: batch, kv_heads, capacity, head_dim.
    dtype
        Their dtype.
    device
        The device.

    Raises
    ------
    ValueError
        The device is neither CUDA nor a CPU.
    RuntimeError
        The memory cannot be pinned, or has another address on the device.
    """
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"kv_storage='host' needs a model on CUDA or on a CPU, got {device}")
    tokens, head_dim = shape[:3], shape[3]
    width = _width(head_dim, dtype)
    with lasting_tensors():
        host, aliases = _host_bytes(max(1, host_bytes(shape, dtype)), device)
        strides = torch.empty((*tokens, 2 * width), device="meta").stride()
        keys, values = (
            torch.empty(0, dtype=dtype, device=device).set_(alias.untyped_storage(), begin, shape, strides)
            for alias, begin in zip(aliases, (0, width), strict=True)
        )
        return HostTokens(host.view(dtype).view(*tokens, 2, width)[..., :head_dim], keys, values)


def host_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes that :func:`host_tokens` allocates for keys of a shape and their values."""
    return prod(shape[:3]) * 2 * _width(shape[3], dtype) * dtype.itemsize


def _width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the numbers between the beginnings of a key and its value."""
    return -(-head_dim * dtype.itemsize // ALIGNMENT) * ALIGNMENT // dtype.itemsize


def _host_bytes(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return bytes of the host, and twice the same memory as bytes of the device, each with a storage of its own."""
    if device.type == "cpu":
        pages = mmap.mmap(-1, num_bytes)
        return torch.frombuffer(pages, dtype=torch.uint8), [torch.frombuffer(pages, dtype=torch.uint8) for _ in "kv"]
    pinned: Any = PinnedPages(num_bytes, device)  # to which each alias holds a reference
    aliases = [torch.as_tensor(pinned, device=device) for _ in "kv"]
    if any(alias.data_ptr() != pinned.host.data_ptr() for alias in aliases):
        raise RuntimeError(f"kv_storage='host' needs unified addressing of pinned host memory, which {device} lacks")
    return pinned.host, aliases


def available_bytes() -> int | None:
    """Return the bytes of host memory that can still be allocated, in a container too; None if Linux does not say."""
    found = [left for left in (_left_in_system(), _left_in_container()) if left is not None]
    return min(found, default=None)


def _left_in_system() -> int | None:
    with suppress(OSError, KeyError):
        return _fields(MEMORY_INFO)["MemAvailable:"] * 1024
    return None


def _left_in_container() -> int | None:
    """Return what the process's control group leaves of its limit; cached files count as free. None without a limit."""
    for limit, used in CONTROL_GROUP_FILES:
        with suppress(OSError, KeyError, ValueError):  # another version of control groups, or no limit: "max"
            cached = _fields((CONTROL_GROUP / used).with_name("memory.stat"))["inactive_file"]
            return int((CONTROL_GROUP / limit).read_text()) - int((CONTROL_GROUP / used).read_text()) + cached
    return None


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines() if line}
