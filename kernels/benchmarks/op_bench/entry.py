"""Measured ops: how each is called, what it must move, how its result is checked; and which belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from op_bench.dense import Backend
from op_bench.shapes import Settings, Shape

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Entry:
    """One op in one variant."""

    op: str
    variant: str
    run: Callable[[Any, str | None], Outputs]
    """Takes a layer of the entry's family and ``impl``; what is timed."""
    check: Callable[[Any, Outputs], None]
    """Raises ``oracle.Mismatch`` unless the outputs, and what was written in place, are right."""
    moved_bytes: Callable[[Shape, Settings], int]
    """Counts the bytes that must be read and written at least."""
    prepare: Callable[[Any], None] = lambda layer: None
    """Spoils what the op writes in place, so that a check cannot pass on an earlier call's work."""
    against_dense: bool = False
    """Whether it replaces dense attention, and is compared with it."""

    @property
    def name(self) -> str:
        """Op and variant."""
        return f"{self.op}, {self.variant}" if self.variant else self.op


@dataclass(frozen=True)
class Family:
    """Entries that share shapes, buffers, and the dense attention that they are compared with."""

    name: str
    shapes: tuple[Shape, ...]
    quick_shapes: tuple[Shape, ...]
    entries: tuple[Entry, ...]
    make_layer: Callable[..., Any]
    """Takes shape, settings, device and seed."""
    layer_bytes: Callable[[Shape, Settings], int]
    """Bytes that a layer's buffers take."""
    step_bytes: Callable[[Shape, Settings], int]
    """Counts the bytes that a step of one layer moves: so many layers are measured that they flush the L2 cache."""
    backends: Callable[[Shape], list[Backend]]
    """The dense attention of others."""
    least_layers: int = 8

    def shapes_of(self, *, quick: bool) -> tuple[Shape, ...]:
        """The shapes of a whole or of a quick run."""
        return self.quick_shapes if quick else self.shapes
