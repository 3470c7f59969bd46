"""Cells and tables of the performance page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from op_bench.break_even import BreakEven
from op_bench.results import Record, machine_of, shape_of
from op_bench.shapes import Shape


def shape_cells(shape: Shape) -> list[str]:
    """Return cells for heads, head dimension, batch and length."""
    return [f"{shape.q_heads}/{shape.kv_heads}", str(shape.head_dim), str(shape.batch), shape.length_label]


def step_cells(entry: Mapping[str, Any]) -> list[str]:
    """Return cells for a step's times and dense attention's, inside a decode step and alone."""
    cells = []
    for way in ("layers", "replay"):
        against = entry["against"][way] if entry["against"] else None
        cells.append(f"{entry['times'][way]['median']:.1f}")
        cells.append(f"{against['best_us']:.1f}" if against else "-")
        if way == "layers":
            cells.append(against["best"] if against else "-")
        cells.append(f"{against['ratio']:.2f}" if against else "-")
        if way == "layers":
            cells.append(f"{entry['over_floor'][way]['nominal']:.2f}")
    return cells


def prefill_cells(entry: Record) -> list[str]:
    """Return cells for the shape and the times of several queries, in milliseconds, and dense attention's."""
    shape, way = shape_of(entry), "layers"
    against = entry["against"][way] if entry["against"] else None
    dense = [f"{against['best_us'] / 1e3:.2f}", against["best"], f"{against['ratio']:.2f}"] if against else ["-"] * 3
    milliseconds = f"{entry['times'][way]['median'] / 1e3:.3f}"
    over = f"{entry['over_floor'][way]['nominal']:.2f}"
    return [*shape_cells(shape)[:2], str(shape.queries), shape.length_label, milliseconds, *dense, over]


PREFILL_COLUMNS = (
    "q/kv heads",
    "head dim",
    "queries",
    "keys",
    "ours, ms",
    "best dense, ms",
    "which",
    "ratio",
    "over floor",
)
"""The columns of `prefill_cells`."""


def by_shape(entry: Record) -> tuple[int, ...]:
    """Return a key that sorts entries as tables show them: those added later are at the end of the file."""
    shape = shape_of(entry)
    return -shape.q_heads, -shape.kv_heads, -shape.head_dim, shape.batch, shape.queries, shape.length


def measured_with(report: Record, entries: Sequence[Record]) -> str:
    """Return the versions and dates of the entries' runs, of which there may be several."""
    machines = [machine_of(report, entry) for entry in entries]
    versions = [
        f"{name} {' and '.join(sorted({machine[name] for machine in machines if machine.get(name)}))}"
        for name in ("torch", "triton", "driver")
        if any(machine.get(name) for machine in machines)
    ]
    dates = sorted({machine["date"][:10] for machine in machines})
    return f"{', '.join(versions)}; {', '.join(dates)}"


def even_cell(found: BreakEven) -> str:
    """Return a cell with the length from which a step is faster."""
    if found.measured is None:
        return "none measured"
    if found.crossing is None:
        return f"{found.measured:,} (the shortest measured)"
    return f"{found.measured:,} (crossing near {_two_digits(found.crossing):,})"


def _two_digits(tokens: float) -> int:
    return int(float(f"{tokens:.1e}"))


def table(head: Iterable[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Return a Markdown table whose first ``left`` columns are left-aligned and the others right-aligned."""
    names = list(head)
    rule = ["---" if column < left else "---:" for column in range(len(names))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rule, *rows)) + "\n"
