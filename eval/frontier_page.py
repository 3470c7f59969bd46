"""A sweep's frontiers in the documentation: tables, and the names and contents of the figures beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.frontier import HEAD, Frontier, frontiers, lines
from eval.store import read_json
from eval.terminal import number

Table = Callable[[Sequence[str], Sequence[Sequence[str]], int], str]


def diverges(summary: Mapping[str, Any]) -> bool:
    """Whether a run measured the divergence from dense attention."""
    return any(entry.get("divergence") is not None for entry in summary["table"])


def details(summary: Mapping[str, Any], names: Sequence[Sequence[str]], table: Table) -> list[str]:
    """Return a folded table with a line for each task, length and variant of a run; ``names`` begin the lines."""
    config = summary["config"]
    hashed = f"; protocol {summary['protocol_sha256'][:12]}" if summary["protocol_sha256"] else ""
    lines = [
        [
            *name,
            str(entry["samples"] - entry["errors"]),
            number(entry["divergence"], "{:.4f}"),
            number(entry["divergence_max"], "{:.3f}"),
            _percent(entry["top_agreement"]),
            _percent(entry["score"]) if entry["perplexity"] is None else f"{entry['perplexity']:.3f}",
            number(entry["realised_budget"], "{:,.0f}"),
            _percent(entry["kv_fraction"]),
        ]
        for name, entry in zip(names, summary["table"], strict=True)
    ]
    head = ("task", "length", "method", "samples", "mean KL", "max KL", "agreement, %", "score", "tokens read")
    model = Path(summary["model"]).name
    return [
        f'<details markdown="1"><summary>{config["benchmark"]}, {model}: each task</summary>\n',
        f"Question: {config['question']}; seed {config['seed']}{hashed}.\n",
        table((*head, "KV read, %"), lines, 3),
        "</details>\n",
    ]


def _percent(share: float | None) -> str:
    return number(None if share is None else 100 * share, "{:.1f}")


def frontier_markdown(folder: Path, table: Table, figures: bool = True) -> str:
    """Return a table for each model of a sweep, each after its figure; a sentence if nothing was measured.

    Parameters
    ----------
    folder : Path
        The sweep's results folder; it may be missing.
    table : callable
        Makes a Markdown table from its head, its lines, and the number of columns that are words.
    figures : bool
        Show figures, which :func:`frontier_figures` makes.
    """
    found = frontiers(folder)
    if not found:
        return f"No measurements of `eval/configs/{folder.name}.yaml` are in this checkout.\n"
    parts = []
    for place, frontier in enumerate(found, start=1):
        parts.append(f"**{Path(frontier.model).name}**, {frontier.dtype}, {frontier.device}: {_samples(frontier)}.\n")
        if frontier.left_out:
            parts.append(f"Not measured, since every sample failed: {', '.join(frontier.left_out)}.\n")
        if frontier.incomplete:
            parts.append(f"Without a point, since whole tasks are missing: {', '.join(frontier.incomplete)}.\n")
        if frontier.of_one_kind:
            parts.append(f"Measured on samples of one kind alone: {', '.join(frontier.of_one_kind)}.\n")
        if frontier.other_texts:
            parts.append(
                "Measured in part with other prompts than dense attention and the rest: "
                f"{', '.join(frontier.other_texts)}.\n"
            )
        if figures:
            label = (
                "Divergence from dense attention, and needles found, against KV bytes read; the table has the numbers"
            )
            parts.append(f"![{label}.](assets/{figure_name(folder.name, place)})\n")
        parts.append(table(HEAD, lines(frontier), 1))
    return "\n".join(parts)


def _samples(frontier: Frontier) -> str:
    tasks = ", ".join(frontier.tasks)
    return f"{frontier.needles} samples with needles and {frontier.others} others ({tasks})"


def frontier_figures(results: Path) -> dict[str, bytes]:
    """Return the figures of all sweeps under ``results`` that measured divergences, SVG by file name.

    Raises
    ------
    EvalError
        A file of records or a summary cannot be read.
    """
    from eval.report.frontier import frontier_picture, frontier_svg

    sweeps = {
        path.parent.parent
        for path in results.glob("*/*/summary.json")
        if diverges(read_json(path, "the summary of a run"))
    }
    made = {}
    for folder in sorted(sweeps):
        for place, frontier in enumerate(frontiers(folder), start=1):
            picture = frontier_picture(frontier, figure_name(folder.name, place).removesuffix(".svg"))
            if picture is not None:
                made[figure_name(folder.name, place)] = frontier_svg(picture)
    return made


def figure_name(sweep: str, place: int) -> str:
    """Return the file name of a sweep's figure."""
    return f"frontier-{sweep}-{place}.svg"
