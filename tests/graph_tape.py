"""A CUDA graph without CUDA: the device's work of a function, recorded and repeated op by op on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_sparse_attn_kernels import _op
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_sparse_attn.patch import fused, pass_graph

WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
"""Ops whose results the host needs, which a CUDA graph does not allow."""


class Tape(TorchDispatchMode):
    """Records ops with the very tensors that they read and write. Nothing that Python does between them is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Memory that existed before, by its address, with a copy of what it held."""
        self._made: set[int] = set()
        """Addresses of memory that the recorded ops allocated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call."""
        if func in WAITS:
            raise RuntimeError(f"{func} makes the host wait for the device")
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self._made:
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **(kwargs or {}))
        self._made |= {storage.data_ptr() for storage in _storages(result)} - self._before.keys()
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def undo(self) -> None:
        """Give memory back what it held before: recording a CUDA graph does not run it."""
        for storage, held in self._before.values():
            storage.copy_(held)

    def replay(self) -> None:
        """Repeat all calls, into the tensors of the recording."""
        with torch.no_grad():
            for func, args, kwargs, recorded in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or in place
                        old.copy_(new)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def use_tape(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """Let CPU tensors be recorded; return a list to which every recording's tape is added."""
    tapes: list[Tape] = []
    run = _op.Dispatch.run

    def run_as_node(self: _op.Dispatch, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run an op as one node, since its reference depends on lengths; ``arguments`` are empty inside the node."""
        if not arguments:
            return run(self, arguments, options)
        return getattr(torch.ops.hf_sparse_attn_kernels, self._name)(*arguments, **options)

    def record(function: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], object], torch.Tensor]:
        tape = Tape()
        # Dynamo does not compile under a tape, and would not do so later either.
        with monkeypatch.context() as patch, torch.compiler.set_stance("force_eager"), tape:
            patch.setattr(_op.Dispatch, "run", run_as_node)
            result = function()
        tape.undo()
        tapes.append(tape)
        return tape.replay, result

    monkeypatch.setattr(fused, "BACKEND", "aot_eager")  # a tape sees its ops, and nothing of Inductor's kernels
    monkeypatch.setattr(pass_graph, "record", record)
    monkeypatch.setattr(pass_graph, "can_record", lambda device: True)
    return tapes
