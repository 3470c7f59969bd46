"""Which implementation an op runs, and how it is called."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch

from . import _checks as checks
from . import reference

try:
    import triton  # noqa: F401 (only asks whether it is there)
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

IMPLS = ("triton", "reference")
NAMESPACE = "hf_sparse_attn_kernels"  # of the torch.library ops

_default_impl: ContextVar[str | None] = ContextVar("hf_sparse_attn_kernels_impl", default=None)


def _check_impl(impl: str | None) -> None:
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl={impl!r}; allowed: None, {', '.join(map(repr, IMPLS))}")


@contextmanager
def use_impl(name: str | None) -> Iterator[None]:
    """Set what `impl=None` means for the ops called inside the `with` block.

    Parameters
    ----------
    name : {"triton", "reference"} or None
        None restores the rule of the package: Triton for CUDA tensors where Triton is installed, else the reference.

    Raises
    ------
    ValueError
        `name` is something else.
    """
    _check_impl(name)
    token = _default_impl.set(name)
    try:
        yield
    finally:
        _default_impl.reset(token)


def resolve_impl(impl: str | None, tensor: torch.Tensor) -> str:
    """Return "triton" or "reference" for an op on `tensor`; what is named but cannot run is an error."""
    _check_impl(impl)
    impl = impl or _default_impl.get()
    if impl is None:
        return "triton" if HAS_TRITON and tensor.is_cuda else "reference"
    if impl == "triton":
        if not HAS_TRITON:
            raise RuntimeError("impl='triton', but triton is not installed; allowed here: impl='reference'")
        if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                f"impl='triton' with tensors on {str(tensor.device)!r}; allowed: CUDA tensors, or any device with "
                "TRITON_INTERPRET=1 set before this package is imported"
            )
    return impl


def run_op(op: str, impl: str | None, *tensors: torch.Tensor, **options: Any) -> Any:
    """Check the arguments of `op`, then call its implementation with the tensors' device as the current one."""
    impl = resolve_impl(impl, tensors[0])
    getattr(checks, op)(*tensors, **options)
    if options.get("num_new") == 0:
        return None  # page_bounds has nothing to update
    function: Callable[..., Any]
    if impl == "reference":
        function = getattr(reference, op)
        return function(*tensors, **options)
    checks.for_triton(op, tensors[0])
    function = getattr(import_module(f".{op}", __package__), op)
    if not tensors[0].is_cuda or tensors[0].get_device() == torch.cuda.current_device():
        return function(*tensors, **options)
    with torch.cuda.device(tensors[0].device):  # Triton launches on the current device
        return function(*tensors, **options)


def call_op(op: str, impl: str | None, *tensors: torch.Tensor, **options: Any) -> Any:
    """Run `op`: under torch.compile as one opaque node of the graph, otherwise directly, which costs less."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.hf_sparse_attn_kernels, op)(*tensors, **options, impl=impl)
    return run_op(op, impl, *tensors, **options)
