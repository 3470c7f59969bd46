"""Tensors that outlive a forward pass: writable in any mode, at addresses that compiled steps rely on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def mark_static(tensor: torch.Tensor, dynamic_dims: Iterable[int] = ()) -> torch.Tensor:
    """Tell ``torch.compile`` that a tensor keeps its address, and which of its sizes may differ in another cache.

    Without the mark a CUDA graph would copy the tensor at every replay, or not be recorded at all because the step
    writes to it. A tensor of another address or size is recorded again, but not compiled again.
    """
    torch._dynamo.mark_static_address(tensor, guard=False)
    for dim in dynamic_dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def mark_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that takes the place of another one as that one is marked."""
    if hasattr(other, "_dynamo_static_input_type"):
        mark_static(tensor, getattr(other, "_dynamo_weak_dynamic_indices", ()))
    return tensor


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Create tensors that may be written both inside and outside ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.no_grad():
        yield
