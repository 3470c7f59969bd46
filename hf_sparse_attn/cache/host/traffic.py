"""Counts of what decode steps move between host memory and the device, kept on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from hf_sparse_attn.cache.traffic import Traffic


class HostTraffic(Traffic):
    """Traffic between host memory and the device in one layer whose kernels read host memory themselves."""

    counts: torch.Tensor
    """int64 [4], of decode steps: complete blocks read, those of them that the device held, tokens that were read in
    host memory, and tokens that were written there."""

    def __init__(self) -> None:
        super().__init__()
        self._token_bytes = 0
        self.reads_all = False
        """Whether steps read all that they select in host memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> HostTraffic:
        """Return a record with the same totals."""
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, HostTraffic)
        if hasattr(self, "counts"):
            twin.counts = copy.deepcopy(self.counts, memo)
        return twin

    def allocate(self, keys: torch.Tensor, pin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Create the counts on the device of the keys, [..., head_dim]; keep existing ones."""
        self._token_bytes = 2 * keys.shape[-1] * keys.element_size()
        if not hasattr(self, "counts"):
            self.counts = pin(torch.zeros(4, dtype=torch.int64, device=keys.device))

    def totals(self, kv_bytes: int) -> dict[str, Any]:
        """Return the totals by the names of the fields of ``LayerStats``. Waits for the device."""
        totals = super().totals(kv_bytes)
        blocks, hits, loaded, stored = self.counts.tolist() if hasattr(self, "counts") else (0, 0, 0, 0)
        in_steps = loaded * self._token_bytes + kv_bytes * self.reads_all
        return {
            **totals,
            "blocks_read": totals["blocks_read"] + blocks,
            "blocks_hit": totals["blocks_hit"] + hits,
            "bytes_loaded": totals["bytes_loaded"] + in_steps,
            "step_bytes_loaded": totals["step_bytes_loaded"] + in_steps,
            "bytes_stored": totals["bytes_stored"] + stored * self._token_bytes,
        }
