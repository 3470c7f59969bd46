"""`@op` turns a public function into an op: its signature is the schema, its body the checks and the fake."""

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import lru_cache, wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import torch

from ._check import skip_checks, skipping
from ._nvrtc import CudaError

try:
    import triton  # noqa: F401 (only checks whether it is installed)
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

IMPLS = ("triton", "reference", "cluster")
NAMESPACE = str(__package__)
"""Namespace of the torch.library ops: the name that the package is imported under. Hugging Face's ``kernels`` gives
each build a name of its own, so that several versions can be loaded side by side."""

_default_impl: ContextVar[str | None] = ContextVar("hf_sparse_attn_kernels_impl", default=None)

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def output(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Declare an output of an op, on the device of `like`. Only the fake allocates it."""
    return like, shape, dtype  # type: ignore[return-value]


def selection_output(like: torch.Tensor, batch: int, heads: int, max_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Declare block indices and counts as outputs of an op."""
    return output(like, (batch, heads, max_blocks), torch.int32), output(like, (batch, heads), torch.int32)


def op(*, launcher: str, writes: tuple[str, ...] = (), cluster: str | None = None) -> Callable[[F], F]:
    """Turn a function that checks its arguments and declares its `output`s into an op.

    The function takes tensors, then keyword-only options, the last of which is `impl`. A call runs the function for its
    checks, then an implementation with the same arguments except `impl`, defaults filled in. Under torch.compile the op
    is one opaque node: the annotations are its schema, and its fake allocates the declared outputs.

    Parameters
    ----------
    launcher : str
        Module next to the function's, whose function of the same name launches the Triton kernels. The reference is the
        function of this name in the module `reference`.
    writes : tuple of str
        Arguments written in place.
    cluster : str, optional
        Module next to the function's, whose function of the same name launches one kernel on thread-block clusters. Its
        function `limit`, with the same arguments and `by_name`, returns the error of a call that it does not serve.
        Unless `by_name`, that is also one that the launcher serves faster. The default on CUDA where there is no error.
    """

    def decorate(function: F) -> F:
        name = function.__name__
        parameters = inspect.signature(function).parameters
        defaults = {key: value.default for key, value in parameters.items() if value.default is not value.empty}
        dispatch = Dispatch(function, next(iter(parameters)), launcher, cluster)

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            options = {**defaults, **options}
            if torch.compiler.is_compiling():
                return packet(*arguments, **options)
            return dispatch.run(arguments, options)

        def run_node(*arguments: Any) -> Any:
            return dispatch.run((), dict(zip(parameters, arguments, strict=True)))

        def fake_node(*arguments: Any) -> Any:
            options = dict(zip(parameters, arguments, strict=True))
            if not any(map(_has_symbols, arguments)):
                return _allocate(function(**options))
            with skip_checks():  # each would become guards of the compiled code; the real call checks all
                return _allocate(function(**options))

        schema = _schema(function, writes)
        node = torch.library.custom_op(f"{NAMESPACE}::{name}", run_node, mutates_args=writes, schema=schema)
        node.register_fake(fake_node)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        call.dispatch = dispatch  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


class Dispatch:
    """The way of an uncompiled call of an op: argument checks, the choice of an implementation, the implementation.

    A profile replaces :attr:`check`, :attr:`implementation` and :attr:`run` to time them.

    Parameters
    ----------
    function : callable
        The public function, which checks the arguments.
    first : str
        Name of its first tensor, whose device decides.
    launcher, cluster : str
        As for `op`.
    """

    def __init__(self, function: Callable[..., Any], first: str, launcher: str, cluster: str | None) -> None:
        self.check = function
        self.implementation: Callable[..., Callable[..., Any]] = lru_cache(self._import)
        self._name, self._first = function.__name__, first
        self._package = function.__module__.rpartition(".")[0]
        self._modules = {"reference": "reference", "triton": launcher, "cluster": cluster}

    def run(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Check the arguments, of which `options` has all defaults, and call the implementation."""
        if not skipping.now:
            self.check(*arguments, **options)
        tensor = arguments[0] if arguments else options[self._first]
        impl = options.pop("impl")
        if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
            return self._launch(impl, arguments, options, tensor)
        with torch.cuda.device(tensor.device):  # kernels are launched on the current device
            return self._launch(impl, arguments, options, tensor)

    def _launch(
        self, impl: str | None, arguments: tuple[Any, ...], options: dict[str, Any], tensor: torch.Tensor
    ) -> Any:
        chosen = self._choose(impl, arguments, options, tensor)
        if chosen != "cluster" or impl == "cluster":
            return self.implementation(chosen)(*arguments, **options)
        try:
            return self.implementation(chosen)(*arguments, **options)
        except CudaError as error:  # refused, so nothing has been written
            self._say_separate(error)
        return self.implementation(resolve_impl(impl, tensor))(*arguments, **options)

    def _import(self, impl: str, name: str | None = None) -> Callable[..., Any]:
        """Return the function of an implementation, or another one of its module."""
        module = import_module(f".{self._modules[impl]}", self._package)
        return cast(Callable[..., Any], getattr(module, name or self._name))

    def _choose(
        self, impl: str | None, arguments: tuple[Any, ...], options: dict[str, Any], tensor: torch.Tensor
    ) -> str:
        has_cluster = self._modules["cluster"] is not None
        if impl == "cluster" and not has_cluster:
            raise ValueError(f"impl='cluster' for {self._name}; allowed: None, 'triton', 'reference'")
        resolved = resolve_impl(impl, tensor)
        if not has_cluster or not asks_for_clusters(requested_impl(impl), resolved):
            return resolved
        by_name = impl == "cluster"
        error = self.implementation("cluster", "limit")(*arguments, **options, by_name=by_name)
        if error is None:
            return "cluster"
        if by_name:
            raise copy(error)  # a plan keeps its error, and the one raised would keep the call's tensors with it
        self._say_separate(error)
        return resolved

    def _say_separate(self, error: Exception) -> None:
        _say_once(f"{self._name} runs as separate launches: {error}")


def _schema(function: Callable[..., Any], writes: tuple[str, ...]) -> str:
    """Infer a schema in which all arguments are positional and without defaults.

    The dispatcher drops trailing arguments that equal their defaults. torch 2.11 then fails if one of them is a tensor
    that the op may write.
    """
    signature = inspect.signature(function)
    plain = [
        parameter.replace(kind=parameter.POSITIONAL_OR_KEYWORD, default=parameter.empty)
        for parameter in signature.parameters.values()
    ]

    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(parameters=plain)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=writes)


def _has_symbols(argument: Any) -> bool:
    """Whether a size in an argument of a fake is known as a symbol only."""
    if isinstance(argument, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in argument.shape)
    return isinstance(argument, torch.SymInt)


def _allocate(outputs: Any) -> Any:
    """Allocate the declared outputs of an op."""
    if outputs is None:
        return None
    if isinstance(outputs[0], tuple):
        return tuple(_allocate(each) for each in outputs)
    like, shape, dtype = outputs
    return like.new_empty(shape, dtype=dtype)


@lru_cache(maxsize=64)
def _say_once(text: str) -> None:
    logger.debug(text)


def requested_impl(impl: str | None) -> str | None:
    """Return the implementation that the call or `use_impl` names, or None."""
    _check_impl(impl)
    return impl or _default_impl.get()


def asks_for_clusters(requested: str | None, resolved: str) -> bool:
    """Return whether a call runs on clusters where they serve it: they are named, or nothing is and Triton would run.

    `requested` is the result of `requested_impl`, `resolved` that of `resolve_impl`.
    """
    return requested == "cluster" or (requested is None and resolved == "triton")


def resolve_impl(impl: str | None, tensor: torch.Tensor) -> str:
    """Return "triton" or "reference" for an op on `tensor` without clusters; raise if the requested one cannot run."""
    impl = requested_impl(impl)
    if impl in (None, "cluster"):
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
    """Set the default of `impl` for ops called inside the `with` block.

    Parameters
    ----------
    name : str or None
        "triton", "reference" or "cluster". None restores the package's default: Triton for CUDA tensors if it is
        installed, else the reference. Where Triton would run, ops that have a launch on thread-block clusters take it
        if it serves the call and was measured to be faster; a debug log says once why not. With "cluster" they do so
        without Triton too.

    Raises
    ------
    ValueError
        Unknown name.
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
