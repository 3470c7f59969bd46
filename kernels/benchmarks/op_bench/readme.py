"""The README's section on speed, from the results files: nothing in it is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from op_bench.break_even import break_even, speed_ratios, step_ratios
from op_bench.readme_tables import even_cell, made_with, shape_cells, step_cells, table
from op_bench.readme_tokens import token_part
from op_bench.registry import STEP
from op_bench.results import Record, ResultsError, read, shape_of

BEGIN = "<!-- speed: written by `python kernels/benchmarks/run.py --readme README.md` -->"
END = "<!-- speed: end -->"
AFTER = "## Evaluation"
"""Where there are no marks yet, the section goes after this one."""


def update_readme(path: Path, root: Path) -> None:
    """Rewrite the section between the marks, or put it after "Evaluation" where there are none.

    Raises
    ------
    ResultsError
        The file has only one of the marks, or neither and no such section; or a results file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    section = f"{BEGIN}\n\n{speed_section(root)}\n{END}"
    if BEGIN in text and END in text:
        head, rest = text.split(BEGIN, 1)
        path.write_text(head + section + rest.split(END, 1)[1], encoding="utf-8")
        return
    if BEGIN in text or END in text or f"\n{AFTER}\n" not in text:
        raise ResultsError(f"{path} must have both {BEGIN!r} and {END!r}, or neither and a section {AFTER!r}")
    head, rest = text.split(f"\n{AFTER}\n", 1)
    body, mark, tail = rest.partition("\n## ")
    path.write_text(f"{head}\n{AFTER}\n{body}\n{section}\n{mark}{tail}", encoding="utf-8")


def speed_section(root: Path) -> str:
    """The section's text, from ``kernels/benchmarks/results`` and ``eval/results/speed`` under ``root``."""
    reports = {path: read(path) for path in sorted((root / "kernels/benchmarks/results").glob("*.json"))}
    speeds = [_read_speed(path) for path in sorted((root / "eval/results/speed").glob("*.json"))]
    parts = ["## Speed\n"]
    if not reports:
        parts.append("The kernels' times have not been measured yet: `make bench` on a CUDA machine does it.\n")
    for path, report in reports.items():
        parts += _kernel_part(report)
        figure = path.with_suffix(".png")
        if figure.exists():
            label = f"Time of a layer against length, {report['machine']['device']}"
            parts.append(f"![{label}]({figure.relative_to(root).as_posix()})\n")
        parts += token_part(report)
    if not speeds:
        parts.append("`generate()` has not been timed yet: see `python -m eval speed --help`.\n")
    else:
        parts += _generate_part(speeds)
    return "\n".join(parts)


def _read_speed(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        report["results"], report["machine"]["device"]
    except (OSError, ValueError, KeyError) as error:
        raise ResultsError(f"{path} is not a report of `python -m eval speed`: {error!r}") from error
    return report


def _kernel_part(report: Record) -> list[str]:
    settings = report["settings"]
    steps = [entry for entry in report["entries"] if (entry["op"], entry["variant"]) == STEP and entry["times"]]
    rows = [[*shape_cells(shape_of(entry)), *step_cells(entry)] for entry in steps]
    ratios = {way: step_ratios(report, way) for way in ("layers", "replay")}
    shapes = {shape_of(entry).configuration: shape_of(entry) for entry in steps}
    even = [
        [*shape_cells(shapes[name])[:3], *(even_cell(break_even(ratios[way][name])) for way in ratios)]
        for name in ratios["layers"]
    ]
    names = ("q/kv heads", "head dim", "batch")
    columns = ("ours, µs", "best dense, µs", "which", "ratio", "over floor", "alone: ours, µs", "dense, µs", "ratio")
    return [
        f"### One decode step of one layer, {report['machine']['device']}\n",
        f"Quest's whole step: the new token's key and value are appended and taken into the 8-bit page bounds, every "
        f"page is scored, {settings['token_budget']:,} tokens are selected in pages of {settings['page_size']} and "
        f"attended to; bfloat16. Medians inside a CUDA graph of several layers, as in a decode step; alone: one "
        f"replay of one step, with the L2 cache flushed. Dense: the best of others' kernels in the same run. Floor: "
        f"the bytes that the step must move, at 4.27 TB/s. {made_with(report, steps)}.\n",
        table((*names, "length", *columns), rows),
        "Faster than the best dense kernel at every measured length from:\n",
        table((*names, "inside a decode step, tokens", "alone, tokens"), even),
    ]


def _generate_part(speeds: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    points: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for report in speeds:
        settings, machine = report["settings"], report["machine"]
        model = [settings["shape"] or settings["model"], f"{settings['dtype']}, {machine['device']}"]
        for result in report["results"]:
            medians = {side["name"]: side["tpot_ms"]["median"] for side in result["sides"]}
            for side in result["sides"]:
                if not side["ratio"]:
                    continue
                against = side["ratio"]["tpot_against"]
                times = [f"{medians[side['name']]:.2f}", f"{medians[against]:.2f}", against]
                rows.append([*model, f"{result['context']:,}", side["name"], *times, f"{side['ratio']['tpot']:.2f}"])
        for name, ratios in speed_ratios(report).items():
            points.setdefault((*model, name), []).extend(ratios)
    even = [[*names, even_cell(break_even(ratios))] for names, ratios in points.items()]
    dates = sorted({report["machine"]["date"][:10] for report in speeds})
    head = ("model", "on")
    columns = ("context", "patched", "ms per token", "best dense, ms", "which", "ratio")
    return [
        "### Through `generate()`\n",
        f"`python -m eval speed`, batch 1, medians; {', '.join(dates)}.\n",
        table((*head, *columns), rows, left=2),
        "Faster than the best dense side at every measured context from:\n",
        table((*head, "patched", "tokens"), even, left=3),
    ]
