"""Tables of Squeezed Attention's measured steps and prefills."""

from __future__ import annotations

from op_bench.registry import SQUEEZED_PREFILL_STEP, SQUEEZED_STEP
from op_bench.results import Record, shape_of
from op_bench.tables import PREFILL_COLUMNS, by_shape, measured_with, prefill_cells, shape_cells, step_cells, table


def squeezed_part(report: Record) -> list[str]:
    """Return the tables of Squeezed Attention's prefill and decode step, empty if none was measured."""
    measured = sorted((entry for entry in report["entries"] if entry["times"]), key=by_shape)
    prefills, steps = (
        [entry for entry in measured if (entry["op"], entry["variant"]) == step]
        for step in (SQUEEZED_PREFILL_STEP, SQUEEZED_STEP)
    )
    if not prefills and not steps:
        return []
    settings = report["settings"]
    parts = [
        f"## Squeezed Attention, {report['machine']['device']}\n",
        f"The keys of a fixed context are clustered beforehand, {settings['clusters']:.0%} as many clusters as keys. "
        f"{settings['sparsity']:.0%} of the clustered tokens, over all heads, are left out. The last "
        f"{settings['window']:,} tokens of the context and the tokens after it are always read. The dtype, dense "
        "attention and floors are as above.\n",
        f"Measured with {measured_with(report, [*prefills, *steps])}.\n",
    ]
    if prefills:
        parts += _prefill_part(prefills)
    if steps:
        parts += _decode_part(steps, settings["tail_tokens"])
    return parts


def _prefill_part(entries: list[Record]) -> list[str]:
    return [
        "### Prefill of the user's input\n",
        "All queries of the input in one layer. They are scored against the centroids, and each head chooses clusters "
        "by their mean weight. The queries attend to the keys of these clusters and, causally, to themselves. In the "
        "dense case they attend to all keys.\n",
        table(PREFILL_COLUMNS, [prefill_cells(entry) for entry in entries]),
    ]


def _decode_part(entries: list[Record], tail_tokens: int) -> list[str]:
    rows = []
    for entry in entries:
        shape = shape_of(entry)
        heads, head_dim, batch, length = shape_cells(shape)
        rows.append([heads, head_dim, f"{batch}, shared" if shape.shared else batch, length, *step_cells(entry)])
    names = ("q/kv heads", "head dim", "batch", "length")
    columns = ("ours, µs", "best dense, µs", "which", "ratio", "over floor", "alone: ours, µs", "dense, µs", "ratio")
    return [
        "### A decode step with a context\n",
        f"One step in one layer: score the centroids, choose runs of the clusters above the threshold, attend to them "
        f'and to the {tail_tokens:,} tokens after the context. "Shared": all rows have the same context, in the same '
        "memory.\n",
        table((*names, *columns), rows),
    ]
