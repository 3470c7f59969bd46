"""The length from which the sparse step is faster than dense attention."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from op_bench.registry import STEP
from op_bench.results import Record, shape_of

Points = Sequence[tuple[int, float]]
"""Pairs of length and speed-up over dense attention."""


@dataclass(frozen=True)
class BreakEven:
    """The lengths at which a configuration breaks even."""

    shortest: int
    """Shortest measured length."""
    measured: int | None
    """Shortest measured length from which all are faster; None if the longest is not."""
    crossing: float | None
    """Length at which the log-linearly interpolated ratio passes 1; None if it never does between measurements."""


def break_even(points: Points) -> BreakEven:
    """Find the length from which every measured ratio is above 1."""
    ordered = sorted(points)
    first = len(ordered)
    while first > 0 and ordered[first - 1][1] > 1:
        first -= 1
    shortest = ordered[0][0]
    if first == len(ordered):
        return BreakEven(shortest, None, None)
    if first == 0:
        return BreakEven(shortest, shortest, None)
    (short, slow), (long, fast) = ordered[first - 1 : first + 1]
    share = -math.log(slow) / (math.log(fast) - math.log(slow))
    return BreakEven(shortest, long, short * (long / short) ** share)


def step_ratios(report: Record, way: str, step: tuple[str, str] = STEP) -> dict[str, list[tuple[int, float]]]:
    """Return a step's speed-ups over the best dense backend, by configuration (heads, head_dim, batch and chunk)."""
    points = defaultdict(list)
    for entry in report["entries"]:
        if (entry["op"], entry["variant"]) == step and entry["against"]:
            shape = shape_of(entry)
            points[shape.configuration].append((shape.length, entry["against"][way]["ratio"]))
    return dict(points)


def speed_ratios(report: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return the speed-ups of ``generate()``'s time per token, by patched side of a ``python -m eval speed`` report."""
    points = defaultdict(list)
    for result in report["results"]:
        for side in result["sides"]:
            if side["ratio"]:
                points[side["name"]].append((result["context"], side["ratio"]["tpot"]))
    return dict(points)
