"""`@op` makes an op of a public function: its signature is the schema, its body the checks and the fake."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import torch

try:
    import triton  # noqa: F401 (only asks whether it is installed)
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

IMPLS = ("triton", "reference")
NAMESPACE = "hf_sparse_attn_kernels"  # of the torch.library ops

_default_impl: ContextVar[str | None] = ContextVar("hf_sparse_attn_kernels_impl", default=None)

F = TypeVar("F", bound=Callable[..., Any])


def output(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Declare a tensor that an op returns, on the device of `like`. Only the fake allocates it."""
    return like, shape, dtype  # type: ignore[return-value]


def selection_output(like: torch.Tensor, batch: int, heads: int, max_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Declare the block indices and counts that an op returns."""
    return output(like, (batch, heads, max_blocks), torch.int32), output(like, (batch, heads), torch.int32)


def op(*, launcher: str, writes: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Make an op of a function that checks its arguments and returns the `output`s that it declares.

    The function takes tensors, then keyword-only options, the last of which is `impl`. Called, the op runs the body for
    its checks, then an implementation with the same arguments less `impl`, defaults filled in. Under torch.compile it
    is one opaque node: the annotations are its schema, and its fake allocates what the body declares.

    Parameters
    ----------
    launcher : str
        Module beside the function's, in which the function of the same name launches the Triton kernels. The reference
        is that in `reference`.
    writes : tuple of str
        Arguments written in place.
    """

    def decorate(function: F) -> F:
        name = function.__name__
        parameters = inspect.signature(function).parameters
        first = next(iter(parameters))
        defaults = {key: value.default for key, value in parameters.items() if value.default is not value.empty}

        @lru_cache
        def implementation(impl: str) -> Callable[..., Any]:
            module = "reference" if impl == "reference" else launcher
            package = function.__module__.rpartition(".")[0]
            return cast(F, getattr(import_module(f".{module}", package), name))

        def run(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            function(*arguments, **options)
            tensor = arguments[0] if arguments else options[first]
            impl = resolve_impl(options.pop("impl"), tensor)
            if impl == "reference" or not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
                return implementation(impl)(*arguments, **options)
            with torch.cuda.device(tensor.device):  # Triton launches on the current device
                return implementation(impl)(*arguments, **options)

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            options = {**defaults, **options}
            if torch.compiler.is_compiling():
                return getattr(getattr(torch.ops, NAMESPACE), name)(*arguments, **options)
            return run(arguments, options)

        def run_node(*arguments: Any) -> Any:
            return run((), dict(zip(parameters, arguments, strict=True)))

        def fake_node(*arguments: Any) -> Any:
            return _allocate(function(**dict(zip(parameters, arguments, strict=True))))

        # A second copy of the package takes the names over, as both do the same.
        schema = _schema(function, writes)
        node = torch.library.custom_op(f"{NAMESPACE}::{name}", run_node, mutates_args=writes, schema=schema)
        node.register_fake(fake_node)
        return cast(F, call)

    return decorate


def _schema(function: Callable[..., Any], writes: tuple[str, ...]) -> str:
    """Infer a schema whose arguments all come by position, and have no defaults.

    The dispatcher leaves out arguments at the end that equal a default, and torch 2.11 then fails where one of them is
    a tensor that would have been written.
    """
    signature = inspect.signature(function)
    plain = [
        parameter.replace(kind=parameter.POSITIONAL_OR_KEYWORD, default=parameter.empty)
        for parameter in signature.parameters.values()
    ]

    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(parameters=plain)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=writes)


def _allocate(outputs: Any) -> Any:
    """Allocate the tensors that an op's body declares."""
    if outputs is None:
        return None
    if isinstance(outputs[0], tuple):
        return tuple(_allocate(each) for each in outputs)
    like, shape, dtype = outputs
    return like.new_empty(shape, dtype=dtype)


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


def _check_impl(impl: str | None) -> None:
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl={impl!r}; allowed: None, {', '.join(map(repr, IMPLS))}")
