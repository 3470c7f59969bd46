"""Norms, RoPE and products of one row as kernels of their own, in place of many small or less suitable ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from hf_sparse_attn_kernels import combined_one_row_linear, one_row_linear
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from hf_sparse_attn.patch import one_shot
from hf_sparse_attn.patch.combinations import OPERATIONS, Combinations

BACKEND = "inductor"
"""Compiler of the parts, one of torch's backends."""
ROPE = "apply_rotary_pos_emb"
"""The name that Transformers' models give to the function by which they rotate queries and keys."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What the kernel for products of one row multiplies."""


@contextmanager
def fused(model: torch.nn.Module, combinations: Combinations | None = None) -> Iterator[None]:
    """Compile a model's norms and its RoPE while in force, each once for all layers.

    Uncompiled, a norm takes eight kernels and RoPE ten, each a few numbers for a decode step. Modules whose
    ``forward`` is not that of their class, such as those with hooks of accelerate, run as they are, but for the
    products in them: those of one row are made by :func:`hf_sparse_attn_kernels.one_row_linear`. Sums over processes
    go through :func:`~hf_sparse_attn.patch.one_shot.all_reduce`.

    Parameters
    ----------
    model
        The model.
    combinations
        What its passes add to products and sums, or multiply them with, kept from pass to pass; None to make each such
        combination when it is asked for.
    """
    changed = []
    forwards = {kind: _fused_forward(kind) for kind in {type(module) for module in model.modules()}}
    try:
        for module in model.modules():
            forward = forwards[type(module)]
            if forward is not None and "forward" not in vars(module):
                module.forward = MethodType(forward, module)
                changed.append(module)
        with _OneRow(combinations):
            yield
    finally:
        if combinations is not None:
            combinations.end()
        for module in changed:
            del module.forward


def _fused_forward(kind: Any) -> Callable[..., Any] | None:
    """Return the compiled ``forward`` of a class of norms, or that of attention with compiled RoPE; None for others."""
    forward = kind.forward
    if kind.__name__.endswith("Norm") and not kind.__module__.startswith("torch."):  # torch's are one kernel
        return _compiled(forward, BACKEND)
    decorated = inspect.unwrap(forward)
    if isinstance(decorated, FunctionType) and ROPE in decorated.__code__.co_names and ROPE in decorated.__globals__:
        rotating = _with_global(decorated, ROPE, _compiled(decorated.__globals__[ROPE], BACKEND))
        return _with_decorated(forward, decorated, rotating)
    return None


class _OneRow(TorchFunctionMode):
    """Multiply a single row with a matrix by a kernel for that, and add up over processes by one kernel.

    A decode step of one text reads every weight for one row, so it is bound by memory. cuBLAS computes a tile of many
    rows, and may split a sum over two kernels.

    Parameters
    ----------
    combinations
        Of a pass that is not compiled as a whole: they change while it runs, and Dynamo would compare what compiled
        functions have seen.
    """

    def __init__(self, combinations: Combinations | None = None) -> None:
        super().__init__()
        self._combinations = combinations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._combinations is not None:
            if torch.compiler.is_compiling():  # a part of the model that is compiled by itself
                return func(*args, **kwargs)
            return self._combined(self._combinations, func, args, kwargs)
        if func is one_shot.ALL_REDUCE:
            return one_shot.all_reduce(*args, **kwargs)
        if func is linear and _is_of_one_row(*args, **kwargs):
            return _one_row_linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _combined(self, combinations: Combinations, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, or return its result if that is made."""
        combinations.begin_call()
        if func is one_shot.ALL_REDUCE:
            return _all_reduce(combinations, *args, **kwargs)
        if func is linear and _is_of_one_row(*args, **kwargs):
            return _product(combinations, *args, **kwargs)
        by = OPERATIONS.get(func)
        result = None if by is None or kwargs else combinations.take(by, args)
        if result is None:
            result = func(*args, **kwargs)
        combinations.keep(result)
        return result


ONE_ROW = _OneRow()


def _is_of_one_row(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether ``linear`` was given plain tensors of which the input is a single row, and as they are is to use them."""
    given = [input, weight] if bias is None else [input, weight, bias]
    return (
        all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in given)
        and weight.dim() == 2
        and 0 < weight.numel() == weight.shape[0] * input.numel()
        and input.shape[-1:] == weight.shape[1:]
        and all(each.stride(-1) == 1 for each in given)
        and all(each.dtype == input.dtype and each.device == input.device for each in given)
        and input.dtype in DTYPES
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.is_grad_enabled()
    )


def _one_row_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return one_row_linear(input, weight, bias=bias, weight_is_ready=_is_ready(weight))


def _is_ready(weight: torch.Tensor) -> bool:
    """Whether weights were written long before a step. Others may be the result of the kernel before."""
    return isinstance(weight, torch.nn.Parameter)


def _product(
    combinations: Combinations, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply a single row with a matrix, and combine the result with what it will be combined with."""
    other = combinations.other((*input.shape[:-1], weight.shape[0]), input.dtype, input.device)
    if other is None:
        result = _one_row_linear(input, weight, bias)
    else:
        result, combined = combined_one_row_linear(
            input, weight, other.tensor, by=other.by, bias=bias, weight_is_ready=_is_ready(weight)
        )
        combinations.add_made(result, other, combined)
    combinations.keep(result, is_product=True)
    return result


def _all_reduce(
    combinations: Combinations, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """Add up over processes, and add what the sum will be added to."""
    combinations.note_written(tensor)
    if not one_shot.serves(tensor, op, group, async_op):
        return one_shot.all_reduce(tensor, op, group, async_op)
    other = combinations.other(tensor.shape, tensor.dtype, tensor.device)
    if other is None or other.by != "add" or not one_shot.is_aligned(other.tensor):
        one_shot.all_reduce(tensor, op, group)
    else:
        combined = torch.empty_like(other.tensor)
        one_shot.all_reduce(tensor, op, group, addend=other.tensor, combined=combined)
        combinations.add_made(tensor, other, combined)
    combinations.keep(tensor, is_product=True)
    return None


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, backend=backend)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # what is compiled has no product, and Dynamo would see the mode's state
            return compiled(*args, **kwargs)

    return call


def _with_decorated(function: Any, decorated: FunctionType, value: FunctionType) -> FunctionType | None:
    """Copy a function with its decorators, which hold what they decorate in their closures, around another one.

    Returns None if a decorator holds it elsewhere.
    """
    if function is decorated:
        return value
    inner = function.__wrapped__
    cells = getattr(function, "__closure__", None) or ()
    around = _with_decorated(inner, decorated, value)
    if around is None or not any(cell.cell_contents is inner for cell in cells):
        return None
    closure = tuple(CellType(around) if cell.cell_contents is inner else cell for cell in cells)
    return _copied(function, function.__globals__, closure)


def _with_global(function: FunctionType, name: str, value: object) -> FunctionType:
    """Copy a function that reads a global of its module, so that the copy reads another value."""
    namespace = {**function.__globals__, name: value}
    return _copied(function, namespace, function.__closure__)


def _copied(function: FunctionType, namespace: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
