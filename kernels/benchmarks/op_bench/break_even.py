"""From which length on the sparse step is faster than dense attention."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from op_bench.registry import STEP
from op_bench.results import Record, shape_of

Points = Sequence[tuple[int, float]]
"""Lengths, and how many times faster than dense attention."""


@dataclass(frozen=True)
class BreakEven:
    """Where a configuration breaks even."""

    shortest: int
    """The shortest length that was measured."""
    measured: int | None
    """The shortest measured length that is faster, as are all longer ones; None where the longest is not."""
    crossing: float | None
    """Where the ratio passes 1 between two measured lengths, log-linearly; None where it does so at none of them."""


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
    """Ratios of a step against the best dense backend, for each configuration (heads, head_dim, batch and chunk)."""
    points = defaultdict(list)
    for entry in report["entries"]:
        if (entry["op"], entry["variant"]) == step and entry["against"]:
            shape = shape_of(entry)
            points[shape.configuration].append((shape.length, entry["against"][way]["ratio"]))
    return dict(points)


def speed_ratios(report: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Ratios of ``generate()``'s time per token, for each patched side of a report of ``python -m eval speed``."""
    points = defaultdict(list)
    for result in report["results"]:
        for side in result["sides"]:
            if side["ratio"]:
                points[side["name"]].append((result["context"], side["ratio"]["tpot"]))
    return dict(points)
