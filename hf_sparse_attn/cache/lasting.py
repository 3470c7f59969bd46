"""Tensors that outlive a forward pass: writable in any mode, and known to compiled steps by their address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def mark_static(tensor: torch.Tensor, dynamic_dims: Iterable[int] = ()) -> torch.Tensor:
    """Tell ``torch.compile`` that a tensor stays at its address, and which of its sizes another cache may have.

    Without the mark a CUDA graph would copy the tensor at every replay, or not be recorded at all, since the step
    writes to it. A tensor at another address, or of another size, takes another recording but no other compilation.
    """
    torch._dynamo.mark_static_address(tensor, guard=False)
    for dim in dynamic_dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Make tensors that may be written outside ``torch.inference_mode()`` too, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield
