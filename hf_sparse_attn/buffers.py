"""Buffers that compiled steps may read and write in place: marked so, and kept at their address."""

from __future__ import annotations

from collections.abc import Iterable

import torch

DOUBLED_UP_TO = 4096


def mark_static(tensor: torch.Tensor, dynamic_dims: Iterable[int] = ()) -> torch.Tensor:
    """Tell ``torch.compile`` that a tensor stays at its address, and which of its sizes another cache may have.

    Without the mark a CUDA graph would copy the tensor at every replay, or not be made at all, since the step writes
    to it. A tensor at another address, or of another size, takes another recording but no other compilation.
    """
    if not torch.compiler.is_compiling():  # the tracer cannot mark, and a prefill is not compiled
        torch._dynamo.mark_static_address(tensor, guard=False)
        for dim in dynamic_dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def roomier(capacity: int) -> int:
    """Tokens to make room for where a buffer of ``capacity`` is full: twice as many, later an eighth more.

    Few copies for short sequences; for long ones, where a buffer takes gigabytes, little that is never used.
    """
    return capacity + max(min(capacity, DOUBLED_UP_TO), capacity // 8)


def replaced(old: torch.Tensor, new: torch.Tensor, static: bool) -> torch.Tensor:
    """Return ``new``, or ``old`` with its contents where a static tensor keeps its shape, and so its address."""
    if not static:
        return new
    if old.shape == new.shape:
        return old.copy_(new)
    return mark_static(new, getattr(old, "_dynamo_weak_dynamic_indices", ()))


def enlarged(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return ``new`` with the contents of ``old`` in its leading part."""
    new[tuple(slice(size) for size in old.shape)] = old
    return new
