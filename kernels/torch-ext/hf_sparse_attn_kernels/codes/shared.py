"""Tensors that are the same in every call, built once for a device."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

F = TypeVar("F", bound=Callable[..., Any])


def shared(build: F) -> F:
    """Build the constants of a device, the last argument, once. Callers must not write to them.

    The cache is the function's `__wrapped__`. In a fake mode the constants are fakes of those on the CPU, made anew in
    each call: a fake belongs to its mode.
    """
    cached = lru_cache(build)

    @wraps(cached)
    def call(*arguments: Any) -> Any:
        mode = active_fake_mode() if torch._C._len_torch_dispatch_stack() else None
        if mode is None:
            return cached(*arguments)
        *sizes, device = arguments
        with unset_fake_temporarily():
            real = cached(*sizes, torch.device("cpu"))
        return tree_map_only(torch.Tensor, lambda tensor: mode.from_tensor(tensor).to(device), real)

    return cast(F, call)
