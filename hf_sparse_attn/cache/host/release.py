"""Memory of the host that a device's queued work may still use when its last tensor is freed."""

from __future__ import annotations

from collections.abc import Callable

import torch

_postponed: list[tuple[Callable[[], object], torch.device]] = []
"""Releases that a recording of a CUDA graph postponed."""


def release(free: Callable[[], object], device: torch.device) -> None:
    """Call ``free`` after the device's queued work; while a CUDA graph is being recorded, leave it for later."""
    if torch.cuda.is_current_stream_capturing():
        _postponed.append((free, device))
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        free()


def release_postponed() -> None:
    """Free what was left for later, if it can be freed now."""
    postponed = _postponed.copy()
    _postponed.clear()
    for free, device in postponed:
        release(free, device)
