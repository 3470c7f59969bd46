"""Table of the measured loads from host memory, beside the copy engine's."""

from __future__ import annotations

from op_bench.registry import LOAD
from op_bench.results import Record, machine_of, shape_of
from op_bench.tables import by_shape, measured_with, shape_cells, table


def load_part(report: Record) -> list[str]:
    """Return the table of the loads, empty if none was measured."""
    loads = sorted((entry for entry in report["entries"] if entry["op"] == LOAD and entry["times"]), key=by_shape)
    if not loads:
        return []
    names = ("q/kv heads", "head dim", "batch", "length", "blocks", "MB", "µs", "GB/s", "copy engine, GB/s", "share, %")
    return [
        f"## Loads from host memory, {report['machine']['device']}\n",
        f"`load_blocks` copies blocks of keys and values of one layer from pinned host memory, as a step of an "
        f"offloaded cache does: {report['settings']['token_budget']:,} tokens a KV head, at random places, or a tenth "
        f"of them. The copy engine copies one piece of pinned memory to the device, in the same run.\n",
        f"Measured with {measured_with(report, loads)}.\n",
        table(names, [[*shape_cells(shape_of(entry)), *_cells(report, entry)] for entry in loads]),
    ]


def _cells(report: Record, entry: Record) -> list[str]:
    microseconds = entry["times"]["layers"]["median"]
    rate = 1e6 * entry["bytes"] / microseconds
    engine = machine_of(report, entry)["host_copy_bytes_per_second"]
    rates = (f"{rate / 1e9:.1f}", f"{engine / 1e9:.1f}", f"{100 * rate / engine:.0f}")
    return [entry["variant"], f"{entry['bytes'] / 1e6:.2f}", f"{microseconds:.1f}", *rates]
