"""Norms and RoPE as kernels of their own: parts of a model compiled each by itself, without the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch

BACKEND = "inductor"
"""Compiler of the parts, one of torch's backends."""
ROPE = "apply_rotary_pos_emb"
"""The name that Transformers' models give to the function by which they rotate queries and keys."""


@contextmanager
def fused(model: torch.nn.Module) -> Iterator[None]:
    """Compile a model's norms and its RoPE while in force, each once for all layers.

    Uncompiled, a norm takes eight kernels and RoPE ten, each a few numbers for a decode step. Modules whose
    ``forward`` is not that of their class, such as those with hooks of accelerate, run as they are.
    """
    changed = []
    forwards = {kind: _fused_forward(kind) for kind in {type(module) for module in model.modules()}}
    try:
        for module in model.modules():
            forward = forwards[type(module)]
            if forward is not None and "forward" not in vars(module):
                module.forward = MethodType(forward, module)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _fused_forward(kind: Any) -> Callable[..., Any] | None:
    """Return the compiled ``forward`` of a class of norms, or that of attention with compiled RoPE; None for others."""
    forward = kind.forward
    if kind.__name__.endswith("Norm") and not kind.__module__.startswith("torch."):  # torch's are one kernel
        return _compiled(forward, BACKEND)
    if isinstance(forward, FunctionType) and ROPE in forward.__code__.co_names and ROPE in forward.__globals__:
        return _with_global(forward, ROPE, _compiled(forward.__globals__[ROPE], BACKEND))
    return None


@cache
def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, backend=backend)
    return compiled


def _with_global(function: FunctionType, name: str, value: object) -> FunctionType:
    """Copy a function that reads a global of its module, so that the copy reads another value."""
    namespace = {**function.__globals__, name: value}
    copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
