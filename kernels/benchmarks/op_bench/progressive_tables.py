"""Table of the measured steps of Progressive Sparse Attention, beside Quest's."""

from __future__ import annotations

from op_bench.registry import PSA_STEP, STEP
from op_bench.results import Record, shape_of
from op_bench.tables import by_shape, measured_with, shape_cells, step_cells, table


def progressive_part(report: Record) -> list[str]:
    """Return the table of the decode steps, empty if none was measured."""
    measured = sorted((entry for entry in report["entries"] if entry["times"]), key=by_shape)
    steps = [entry for entry in measured if (entry["op"], entry["variant"]) == PSA_STEP]
    if not steps:
        return []
    settings = report["settings"]
    quest = {
        shape_of(entry): entry["times"]["layers"]["median"]
        for entry in measured
        if (entry["op"], entry["variant"]) == STEP
    }
    rows = [
        [*shape_cells(shape_of(entry)), *step_cells(entry), *_beside(entry, quest.get(shape_of(entry)))]
        for entry in steps
    ]
    names = ("q/kv heads", "head dim", "batch", "length")
    columns = ("ours, µs", "best dense, µs", "which", "ratio", "over floor", "alone: ours, µs", "dense, µs", "ratio")
    return [
        f"## Progressive Sparse Attention, {report['machine']['device']}\n",
        f"One decode step of one layer over rows in which every KV head reads {settings['token_budget']:,} tokens, as "
        f"many as Quest's step above, until P exceeds {settings['threshold']:g}: blocks of {settings['block_size']} "
        f"tokens, tested every {settings['microbatch']} blocks. It appends the new token, updates the 8-bit bounds, "
        "scores and ranks all blocks, and attends to them until the test passes. The floor is that of a step that "
        "knows when to stop. The last columns are Quest's step at the same shape, and the time over it.\n",
        f"Measured with {measured_with(report, steps)}.\n",
        table((*names, *columns, "Quest, µs", "over Quest"), rows),
    ]


def _beside(entry: Record, quest: float | None) -> list[str]:
    if quest is None:
        return ["-", "-"]
    return [f"{quest:.1f}", f"{entry['times']['layers']['median'] / quest:.2f}"]
