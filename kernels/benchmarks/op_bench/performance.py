"""Tables and figures of measured times for the documentation, generated from the results files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from op_bench.beside_quest import codes_part, progressive_part, rabitqcache_part
from op_bench.break_even import break_even, speed_ratios, step_ratios
from op_bench.cluster_tables import cluster_part, code_step_part, psa_step_part
from op_bench.load_tables import load_part
from op_bench.plot import THEMES, series, times_svg
from op_bench.registry import STEP
from op_bench.results import NOMINAL_BYTES_PER_SECOND, Record, ResultsError, read, shape_of
from op_bench.squeezed_tables import squeezed_part
from op_bench.tables import even_cell, measured_with, shape_cells, step_cells, table
from op_bench.token_tables import token_part

SPREAD = 0.2
"""Distance of the quartiles, over the median, from which a time is shown with them."""


def tables(root: Path) -> str:
    """Return the tables as Markdown, from ``kernels/benchmarks/results`` and ``eval/results/speed`` under ``root``.

    Raises
    ------
    ResultsError
        A results file cannot be read.
    """
    speeds = [read_speed(path) for path in sorted((root / "eval/results/speed").glob("*.json"))]
    reports = _reports(root)
    parts = []
    if not reports:
        parts.append("The kernels have not been timed yet: run `make bench` on a CUDA machine.\n")
    for stem, report in reports.items():
        parts += _kernel_part(report)
        if series(report):
            label = f"Time of a decode step of one layer against length, {report['machine']['device']}"
            parts.append("\n".join(f"![{label}](assets/{_figure(stem, name)}#only-{name})" for name in THEMES) + "\n")
        parts += cluster_part(report)
        parts += token_part(report)
        parts += squeezed_part(report)
        parts += progressive_part(report)
        parts += psa_step_part(report)
        parts += codes_part(report)
        parts += code_step_part(report)
        parts += rabitqcache_part(report)
        parts += load_part(report)
    if not speeds:
        parts.append("`generate()` has not been timed yet: see `python -m eval speed --help`.\n")
    else:
        parts += _generate_part(speeds)
    return "\n".join(parts)


def figures(root: Path) -> dict[str, bytes]:
    """Return the figures that :func:`tables` refers to, SVG by file name.

    Raises
    ------
    ResultsError
        A results file cannot be read, or matplotlib is missing.
    """
    return {
        _figure(stem, name): times_svg(report, theme)
        for stem, report in _reports(root).items()
        if series(report)
        for name, theme in THEMES.items()
    }


def _reports(root: Path) -> dict[str, Record]:
    return {path.stem: read(path) for path in sorted((root / "kernels/benchmarks/results").glob("*.json"))}


def _figure(stem: str, theme: str) -> str:
    return f"times-{stem}-{theme}.svg"


def read_speed(path: Path) -> dict[str, Any]:
    """Read a report of ``python -m eval speed``.

    Raises
    ------
    ResultsError
        The file cannot be read or is not such a report.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        report["results"], report["machine"]["device"]
    except (OSError, ValueError, KeyError) as error:
        raise ResultsError(f"{path} is not a report of `python -m eval speed`: {error!r}") from error
    return report


def _kernel_part(report: Record) -> list[str]:
    settings = report["settings"]
    steps = [entry for entry in report["entries"] if (entry["op"], entry["variant"]) == STEP and entry["times"]]
    if not steps:
        return []
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
        f"## Quest, {report['machine']['device']}\n",
        f"One decode step of one layer, in bfloat16. It appends the new token's key and value, updates the 8-bit page "
        f"bounds, scores every page, selects {settings['token_budget']:,} tokens in pages of {settings['page_size']}, "
        f"and attends to them. Times are medians inside a CUDA graph of several layers, as in a model's decode step. "
        f'"Alone" is one replay of one step, with the L2 cache flushed. "Best dense" is the fastest of the other '
        f"projects' kernels in the same run. \"Over floor\" is the time over that of moving the step's bytes at "
        f"{NOMINAL_BYTES_PER_SECOND / 1e12:.2f} TB/s.\n",
        f"Measured with {measured_with(report, steps)}.\n",
        table((*names, "length", *columns), rows),
        "Faster than the best dense kernel at every measured length from:\n",
        table((*names, "inside a decode step, tokens", "alone, tokens"), even),
    ]


def _generate_part(speeds: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    points: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for report in speeds:
        settings, machine = report["settings"], report["machine"]
        split = settings.get("split", "none")
        device = machine["device"] if split == "none" else f"{machine['devices']} {machine['device']}, by {split}"
        exchange = ", one-shot exchange" if machine.get("exchange") == "one-shot" else ""
        options = "".join(f", {name}={value}" for name, value in settings.get("compile_options", {}).items())
        guards = "" if settings.get("module_guards", True) else ", no guards on modules"
        where = f"{settings['dtype']}, {device}{exchange}{options}{guards}"
        model = [settings["shape"] or settings["model"], where]
        for result in report["results"]:
            times = {side["name"]: side["tpot_ms"] for side in result["sides"]}
            for side in result["sides"]:
                if not side["ratio"]:
                    continue
                against = side["ratio"]["tpot_against"]
                both = [_milliseconds(times[side["name"]]), _milliseconds(times[against])]
                ratio, date = f"{side['ratio']['tpot']:.2f}", machine["date"][:10]
                rows.append([*model, f"{result['context']:,}", side["name"], *both, against, ratio, date])
        for name, ratios in speed_ratios(report).items():
            points.setdefault((*model, name), []).extend(ratios)
    even = [[*names, even_cell(break_even(ratios))] for names, ratios in points.items()]
    head = ("model", "on")
    columns = ("context", "patched", "ms per token", "best dense, ms", "which", "ratio", "measured")
    return [
        "## Through `generate()`\n",
        f"Medians of `python -m eval speed` at batch size 1, with the quartiles where they are more than "
        f"{SPREAD:.0%} of the median apart.\n",
        table((*head, *columns), rows, left=2),
        "Faster than the best dense side at every measured context from:\n",
        table((*head, "patched", "tokens"), even, left=3),
    ]


def _milliseconds(spread: Mapping[str, float]) -> str:
    median, q1, q3 = (spread.get(name, spread["median"]) for name in ("median", "q1", "q3"))
    apart = f" ({q1:.1f} to {q3:.1f})" if q3 - q1 > SPREAD * median else ""
    return f"{median:.2f}{apart}"
