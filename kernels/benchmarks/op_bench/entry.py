"""Measured ops: the call, the bytes to move and the check of each, grouped in families."""

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
    """Timed function of a layer of the entry's family and ``impl``."""
    check: Callable[[Any, Outputs], None]
    """Raises ``oracle.Mismatch`` if an output, or a tensor written in place, is wrong."""
    moved_bytes: Callable[[Shape, Settings], int]
    """Minimum number of bytes to read and write."""
    prepare: Callable[[Any], None] = lambda layer: None
    """Spoils the tensors that the op writes in place, so that no check passes on the work of an earlier call."""
    against_dense: bool = False
    """Whether the op replaces dense attention, and is compared with it."""
    details: Callable[[list[Any]], dict[str, Any]] = lambda layers: {}
    """More measurements over the layers, which the record holds by their names."""

    @property
    def name(self) -> str:
        """Op and variant."""
        return f"{self.op}, {self.variant}" if self.variant else self.op


@dataclass(frozen=True)
class Family:
    """Entries that share shapes, buffers and dense backends."""

    name: str
    shapes: tuple[Shape, ...]
    quick_shapes: tuple[Shape, ...]
    entries: tuple[Entry, ...]
    make_layer: Callable[..., Any]
    """Creates a layer from shape, settings, device and seed."""
    layer_bytes: Callable[[Shape, Settings], int]
    """Bytes of a layer's buffers."""
    step_bytes: Callable[[Shape, Settings], int]
    """Bytes that a step of one layer moves, which decides how many layers flush the L2 cache."""
    backends: Callable[[Shape], list[Backend]]
    """Dense backends of other libraries."""
    least_layers: int = 8
    more_tuned: tuple[Shape, ...] = ()
    """Shapes at which launches are tuned, beside those that are measured."""
    setup: Callable[[], None] = lambda: None
    """Runs before the first shape is measured."""

    def shapes_of(self, *, quick: bool) -> tuple[Shape, ...]:
        """Return the shapes of a whole or of a quick run."""
        return self.quick_shapes if quick else self.shapes
