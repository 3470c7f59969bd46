"""Tables of the divergence from dense attention by position along long answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.store import read_json
from eval.terminal import number, of_samples

Table = Callable[[Sequence[str], Sequence[Sequence[str]], int], str]


def by_position(summary: Mapping[str, Any], names: Sequence[Sequence[str]], table: Table) -> list[str]:
    """Return a table of a run's divergences by position, empty if its answers are too short to have several.

    Parameters
    ----------
    summary : mapping
        The summary of a run.
    names : sequence
        Cells that the line of each of the summary's entries begins with: task, length, method.
    table : callable
        Makes a Markdown table from its head, its lines, and the number of columns that are words.
    """
    found = [dict(entry.get("divergence_by_position") or ()) for entry in summary["table"]]
    positions = sorted({position for means in found for position in means})
    if len(positions) < 2:
        return []
    lines = [
        [
            *name,
            of_samples(number(entry["divergence"], "{:.4f}"), entry, entry["samples"]),
            *(number(means.get(at), "{:.4f}") for at in positions),
        ]
        for name, entry, means in zip(names, summary["table"], found, strict=True)
        if means
    ]
    samples = max(entry["samples"] for entry in summary["table"])
    return [
        f"{summary['config']['benchmark']}, {Path(summary['model']).name}, {summary['dtype']}, {summary['device']}, "
        f"{samples} samples: mean KL from dense attention in nats a token, of all tokens and from each position on.\n",
        table(("task", "length", "method", "all", *(f"{at:,}" for at in positions)), lines, 1),
    ]


def run_summaries(folder: Path) -> list[dict[str, Any]]:
    """Return the summaries of a sweep's runs in order; none if the folder is missing.

    Raises
    ------
    EvalError
        A summary cannot be read.
    """
    return [read_json(path, "the summary of a run") for path in sorted(folder.glob("*/summary.json"))]
