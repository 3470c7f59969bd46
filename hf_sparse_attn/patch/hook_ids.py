"""Hooks that keep their ids from one patch of a module to the next."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

_ids: WeakKeyDictionary[torch.nn.Module, dict[str, int]] = WeakKeyDictionary()


def register(module: torch.nn.Module, role: str, hook: Callable[[], RemovableHandle]) -> RemovableHandle:
    """Register a hook under the id that the module's hook of this role had before, and return its handle.

    A compiled step is compiled again if its modules' hooks have other ids, so a model that is patched anew for every
    answer would be compiled anew for every answer.
    """
    ids = _ids.setdefault(module, {})
    following = RemovableHandle.next_id
    RemovableHandle.next_id = ids.get(role, following)
    try:
        handle = hook()
    finally:
        RemovableHandle.next_id = max(following, RemovableHandle.next_id)
    ids[role] = handle.id
    return handle
