"""The precision of what a patched model computes outside its modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def uncast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without ``torch.autocast``, which would change dtypes within a method."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
