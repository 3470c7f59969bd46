"""Copies between a device and host memory. All that is particular to CUDA, streams and events, is in this file."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.traffic import Traffic


class Transfers:
    """Copies from and to the host, on two streams of their own; plain copies if the device is a CPU.

    The current stream, on which the model runs, is called the main stream. A copy from the device follows the work
    queued there before it. A copy to the device, a load, has a number: :meth:`wait` lets the work queued there later
    follow it. The host waits only in :meth:`read`, to learn which blocks it must load, and before it touches host
    memory that copies use.

    Parameters
    ----------
    device
        The device of the layers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.pins = self.is_cuda
        """Whether host memory is pinned: False on a CPU, and after pinning has failed."""
        self.reads_host = self.is_cuda and find_spec("triton") is not None
        """Whether kernels read the host memory of :meth:`host_empty`: only if it is pinned."""
        self.last_load = 0
        """Number of the last load queued."""
        self.arrived = 0
        """Number of the last load that the main stream has waited for: it and those before it may be read there."""
        self._loaded: dict[int, Any] = {}
        self._stored: Any = None
        if self.is_cuda:
            new_stream: Any = torch.cuda.Stream  # untyped
            self._loads, self._stores = new_stream(device), new_stream(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Transfers:
        """Return the object itself: streams have no state to copy."""
        return self

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate lasting host memory, pinned if possible."""
        with lasting_tensors():
            if self.pins:
                try:
                    return pinned_empty(shape, dtype)
                except RuntimeError as error:
                    self.pins = self.reads_host = False
                    gib = np.prod(shape) * dtype.itemsize / 2**30
                    warnings.warn(
                        f"offload: {gib:.1f} GiB of host memory cannot be pinned ({str(error).splitlines()[0]}); using "
                        "pageable memory: its copies are slower and make the host wait, so loads no "
                        "longer overlap with attention; raise the limit on locked memory (ulimit -l) to avoid this",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            return torch.empty(shape, dtype=dtype)

    def landing(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate short-lived host memory. Pinned memory stays reserved until the copies from it have ended."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.pins)

    def read(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Return a device tensor's contents on the host, waiting for the main stream to compute it."""
        if not self.is_cuda:
            return tensor.detach().numpy()
        landing = self.landing(tuple(tensor.shape), tensor.dtype)
        landing.copy_(tensor, non_blocking=True)
        event = _event()
        event.record(torch.cuda.current_stream(self.device))
        event.synchronize()
        return landing.numpy()

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a device tensor with the contents of a host array."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if not self.is_cuda:
            return tensor
        return (tensor.pin_memory() if self.pins else tensor).to(self.device, non_blocking=True)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return device memory that copies will use: once freed, it is reused only after copies still queued then."""
        if self.is_cuda:
            tensor.record_stream(self._loads)
            tensor.record_stream(self._stores)
        return tensor

    def load(self, copy: Callable[[], None], traffic: Traffic, num_bytes: int) -> int:
        """Run ``copy``, which queues copies to the device, on the load stream; return the load's number.

        The load begins after the work queued on the main stream so far, which may read what is overwritten, and after
        all earlier loads. Nothing may read what it writes before :meth:`wait`.
        """
        traffic.bytes_loaded += num_bytes
        self.last_load += 1
        if not self.is_cuda:
            begin = time.perf_counter()
            copy()
            traffic.stalled(time.perf_counter() - begin)
            self.arrived = self.last_load
            return self.last_load
        self._loads.wait_stream(torch.cuda.current_stream(self.device))
        self._loads.wait_stream(self._stores)
        self._loaded[self.last_load] = event = _event()
        try:
            with torch.cuda.stream(self._loads):
                copy()
        finally:
            event.record(self._loads)
        return self.last_load

    def wait(self, load: int, traffic: Traffic) -> None:
        """Let work queued later on the main stream follow a load and all before it, if it does not yet."""
        if load <= self.arrived:
            return
        main = torch.cuda.current_stream(self.device)
        begin_wait, end_wait = _event(enable_timing=True), _event(enable_timing=True)
        begin_wait.record(main)
        main.wait_event(self._loaded[load])
        end_wait.record(main)
        traffic.stalled_between(begin_wait, end_wait)
        self.arrived = load
        self._loaded = {number: event for number, event in self._loaded.items() if number > load}

    def store(self, copy: Callable[[], None], traffic: Traffic, num_bytes: int) -> None:
        """Run ``copy``, which queues copies to the host, on the store stream, after the work queued so far."""
        traffic.bytes_stored += num_bytes
        if not self.is_cuda:
            copy()
            return
        self._stores.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stores):
            copy()
        self._stored = _event()
        self._stored.record(self._stores)

    def protect_stored(self) -> None:
        """Let later work on the main stream, which may overwrite what is being stored, wait for the stores."""
        if self._stored is not None:
            torch.cuda.current_stream(self.device).wait_event(self._stored)

    def finish_stores(self) -> None:
        """Let the host wait until everything stored has arrived."""
        if self._stored is not None:
            self._stored.synchronize()
            self._stored = None

    def finish(self) -> None:
        """Let the host wait until no copy uses host memory any more, nor device memory about to be freed."""
        self.finish_stores()
        if self.is_cuda:
            self._loads.synchronize()


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned host memory; raise ``RuntimeError`` if that is not possible."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _event(**options: Any) -> Any:
    event: Any = torch.cuda.Event  # untyped
    return event(**options)
