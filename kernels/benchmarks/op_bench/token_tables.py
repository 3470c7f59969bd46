"""Tables of TokenSelect's measured steps."""

from __future__ import annotations

from op_bench.break_even import break_even, step_ratios
from op_bench.registry import CHUNK_STEP, TOKEN_STEPS
from op_bench.results import Record, shape_of
from op_bench.tables import (
    PREFILL_COLUMNS,
    by_shape,
    even_cell,
    measured_with,
    prefill_cells,
    shape_cells,
    step_cells,
    table,
)

_LABELS = {
    TOKEN_STEPS[0]: "decode step, chosen anew",
    TOKEN_STEPS[1]: "decode step, choice kept",
    CHUNK_STEP: "chunk of the prefill",
}


def token_part(report: Record) -> list[str]:
    """Return the tables of TokenSelect's chunk, decode step and break-even, empty if none was measured."""
    measured = sorted((entry for entry in report["entries"] if entry["times"]), key=by_shape)
    report = {**report, "entries": measured}
    found = {step: [entry for entry in measured if (entry["op"], entry["variant"]) == step] for step in _LABELS}
    if not any(found.values()):
        return []
    settings = report["settings"]
    first, voted, last = (settings[name] for name in ("sink_tokens", "voted_tokens", "recent_tokens"))
    parts = [
        f"## TokenSelect, {report['machine']['device']}\n",
        f"All heads of a layer choose {voted:,} tokens together by soft vote. The first {first:,} and the last "
        f"{last:,} are read too. Selected tokens get contiguous positions. The dtype, dense attention and "
        "floors are as above.\n",
        f"Measured with {measured_with(report, [entry for entries in found.values() for entry in entries])}.\n",
    ]
    if found[CHUNK_STEP]:
        parts += _chunk_part(found[CHUNK_STEP])
    if found[TOKEN_STEPS[0]] or found[TOKEN_STEPS[1]]:
        parts += _decode_part({step: found[step] for step in TOKEN_STEPS})
    return [*parts, *_even_part(report)]


def _chunk_part(entries: list[Record]) -> list[str]:
    return [
        "### A chunk of the prefill\n",
        "One chunk in one layer. Its queries are rotated and averaged, and the mean selects among all keys before the "
        "chunk. The chunk attends to the selected tokens and, causally, to itself. In the dense case the chunk's "
        "queries attend to all keys.\n",
        table(PREFILL_COLUMNS, [prefill_cells(entry) for entry in entries]),
    ]


def _decode_part(found: dict[tuple[str, str], list[Record]]) -> list[str]:
    rows = [
        [*shape_cells(shape_of(entry)), step[1], *step_cells(entry)]
        for step, entries in found.items()
        for entry in entries
    ]
    names = ("q/kv heads", "head dim", "batch", "length", "choice")
    columns = ("ours, µs", "best dense, µs", "which", "ratio", "over floor", "alone: ours, µs", "dense, µs", "ratio")
    return [
        "### A decode step\n",
        'One step in one layer: append the new token, rotate the query, select tokens, attend to them. "Chosen anew" '
        'is a step that misses the selection cache and reads every key for the vote. "Choice kept" is a step that '
        "hits it and reads none. A model's steps are a mix of both.\n",
        table((*names, *columns), rows),
    ]


def _even_part(report: Record) -> list[str]:
    rows = []
    for step, label in _LABELS.items():
        ratios = {way: step_ratios(report, way, step) for way in ("layers", "replay")}
        shapes = {shape_of(entry).configuration: shape_of(entry) for entry in report["entries"]}
        for name in ratios["layers"]:
            cells = (even_cell(break_even(ratios[way][name])) for way in ratios)
            rows.append([label, *shape_cells(shapes[name])[:3], *cells])
    if not rows:
        return []
    names = ("step", "q/kv heads", "head dim", "batch")
    return [
        "Faster than the best dense kernel at every measured length from:\n",
        table((*names, "inside a graph of several layers, tokens", "alone, tokens"), rows, left=1),
    ]
