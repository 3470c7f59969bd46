"""Counts of what moves between host and device, for a layer whose keys and values are offloaded."""

from __future__ import annotations

import copy
from typing import Any

MOST_PENDING = 256


class Traffic:
    """Blocks read from the pool, bytes moved, and the time that attention waited for loads. Totals of one layer."""

    def __init__(self) -> None:
        self.blocks_read = 0
        """Blocks that decode steps read from the pool, summed over rows and KV heads."""
        self.blocks_hit = 0
        """Those of them that were there when they were looked up."""
        self.bytes_loaded = 0
        """Bytes copied from the host to the device."""
        self.step_bytes_loaded = 0
        """Those of them that were copied for decode steps."""
        self.bytes_stored = 0
        """Bytes copied from the device to the host."""
        self._stall_seconds = 0.0
        self._waits: list[tuple[Any, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Traffic:
        """Return a record with the same totals. Waits for the device."""
        self._collect_all()
        twin = copy.copy(self)
        twin._waits = []
        return twin

    def stalled(self, seconds: float) -> None:
        """Add time that the model waited for loads."""
        self._stall_seconds += seconds

    def stalled_between(self, begin: Any, end: Any) -> None:
        """Add the time between two CUDA events, once both have happened."""
        self._waits.append((begin, end))
        if len(self._waits) > MOST_PENDING:
            self._collect([wait for wait in self._waits if wait[1].query()])

    def totals(self, kv_bytes: int) -> dict[str, Any]:
        """Return the totals by the names of the fields of ``LayerStats``. Waits for the device.

        ``kv_bytes`` are those that decode steps have read, wherever they were.
        """
        self._collect_all()
        names = ("blocks_read", "blocks_hit", "bytes_loaded", "step_bytes_loaded", "bytes_stored")
        return {"stall_seconds": self._stall_seconds, **{name: getattr(self, name) for name in names}}

    def _collect_all(self) -> None:
        for _, end in self._waits:
            end.synchronize()
        self._collect(self._waits)

    def _collect(self, finished: list[tuple[Any, Any]]) -> None:
        self._stall_seconds += sum(begin.elapsed_time(end) for begin, end in finished) / 1000
        self._waits = [wait for wait in self._waits if wait not in finished]
