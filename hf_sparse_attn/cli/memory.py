"""Peak memory of a block of code."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hf_sparse_attn.cli.extras import install_command

if TYPE_CHECKING:
    import torch


class PeakMemory:
    """Peak memory of a ``with`` block: torch's allocations on CUDA, otherwise the sampled resident set size.

    Parameters
    ----------
    device : torch.device
        Device that the model runs on.

    Raises
    ------
    ImportError
        From ``__enter__``, if the device is not CUDA and psutil is missing.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes = 0
        self._device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def measures(self) -> str:
        """The kind of memory that ``peak_bytes`` counts."""
        return "CUDA, allocated" if self._device.type == "cuda" else "process RSS, sampled"

    def __enter__(self) -> PeakMemory:
        """Start measuring."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        try:
            import psutil
        except ImportError as error:
            raise ImportError(f"peak memory on CPU is measured with psutil: {install_command('cli')}") from error
        self._process = psutil.Process()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measuring and set ``peak_bytes``."""
        if self._device.type == "cuda":
            import torch

            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self._done.set()
            self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)
            if self._done.wait(0.02):
                return
