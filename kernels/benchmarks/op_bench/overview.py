"""The README's picture: accuracy against bytes read, and decode step time against context length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from op_bench.plot import DENSE, THEMES, Theme, draw_times, dress, heads_of, new_figure, series, svg
from op_bench.results import Record, ResultsError, read
from op_bench.shapes import length_label
from op_bench.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMES = Path("kernels/benchmarks/results/nvidia-h200.json")
CONFIGURATION = "q32-kv8-d128-b1"
"""Llama 3.1 8B's attention, batch 1."""
SWEEP = "results-overview"
"""Sweep of the left panel, which shows means with equal weight for each benchmark, task and length."""
TOKENSELECT = ("sink_tokens", "voted_tokens", "recent_tokens")
"""Settings whose sum is the number of tokens TokenSelect reads."""
FOLDER = Path("docs/assets")
FILES = {"light": "overview.svg", "dark": "overview-dark.svg"}

TITLE = "Accuracy against bytes read, and time of a decode step against length"
TITLES = {"qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)"}
NAMES = {
    "full": "dense attention",
    "quest": "Quest",
    "tokenselect": "TokenSelect",
    "keycodes": "KeyCodes",
    "rabitqcache": "RaBitQCache",
}


def overview_data(root: Path) -> Record:
    """Return the picture's data, from the results under ``root``.

    Returns
    -------
    dict
        ``accuracy``: the model, tasks and lengths, and for each method points ``[percent of dense attention's bytes,
        score in percent, token budget]``, means over the sweep. ``time``: the device and shape, and for each line
        points ``[length, µs]``.

    Raises
    ------
    ResultsError
        A results file cannot be read or lacks a measurement, or runs differ in model, device or samples.
    """
    report = read(root / TIMES)
    try:
        lines = series(report)[CONFIGURATION]
    except KeyError as error:
        raise ResultsError(f"{TIMES} has no decode steps of {CONFIGURATION}") from error
    settings = report["settings"]
    time = {
        "device": report["machine"]["device"],
        "dtype": settings["dtype"],
        "configuration": CONFIGURATION,
        "budgets": {"Quest": settings["token_budget"], "TokenSelect": sum(settings[name] for name in TOKENSELECT)},
        "lines": {name: [list(point) for point in points] for name, points in lines.items()},
    }
    return {"accuracy": _accuracy(root / "eval/results" / SWEEP), "time": time}


def _accuracy(sweep: Path) -> Record:
    cells: dict[tuple[str, str], dict[tuple[str, str, int], Record]] = {}
    runs: list[Record] = []
    for path in sorted(sweep.glob("*/summary.json")):
        summary = read_summary(path)
        for entry in summary["table"]:
            column = (entry["method"], "" if entry["token_budget"] is None else f"{entry['token_budget']:,}")
            cells.setdefault(column, {})[entry["benchmark"], entry["task"], entry["length"]] = entry
            samples = entry["samples"] - entry["errors"]
            runs.append({**{name: summary[name] for name in ("model", "dtype", "device")}, "samples": samples})
    places = sorted({place for found in cells.values() for place in found})
    if not runs or any(run != runs[0] for run in runs) or any(set(found) != set(places) for found in cells.values()):
        raise ResultsError(f"{sweep} must hold every task and length of each method, on one model and device")
    points: dict[str, list[list[Any]]] = {}
    for (method, budget), found in cells.items():
        mean = {name: sum(entry[name] for entry in found.values()) / len(places) for name in ("kv_fraction", "score")}
        points.setdefault(NAMES[method], []).append([100 * mean["kv_fraction"], 100 * mean["score"], budget])
    tasks = list(dict.fromkeys(f"{benchmark} ({task})" for benchmark, task, _ in places))
    lengths = sorted({length for *_, length in places})
    total = runs[0]["samples"] * len(places)
    return {**runs[0], "samples": total, "tasks": sorted(tasks, reverse=True), "lengths": lengths, "points": points}


def read_summary(path: Path) -> Record:
    """Read the summary of a harness run.

    Raises
    ------
    ResultsError
        The file cannot be read or is not a summary.
    """
    try:
        summary: Record = json.loads(path.read_text(encoding="utf-8"))
        summary["table"], summary["model"], summary["dtype"], summary["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is not the summary of a run: {error!r}") from error
    return summary


def write_overview(root: Path) -> list[Path]:
    """Draw the picture for light and dark pages and return the files; each holds its data as its description.

    Raises
    ------
    ResultsError
        As for :func:`overview_data`, or matplotlib is missing.
    OSError
        A file cannot be written.
    """
    data = overview_data(root)
    written = []
    for name, file in FILES.items():
        path = root / FOLDER / file
        path.write_bytes(svg(overview_figure(data, THEMES[name]), TITLE, json.dumps(data)))
        written.append(path)
    return written


def overview_figure(data: Record, theme: Theme) -> Figure:
    """Draw the data of :func:`overview_data`."""
    figure, (left, right) = new_figure(10.4, 4.4, 1, 2)
    accuracy, time = data["accuracy"], data["time"]
    _draw_accuracy(left, accuracy["points"], theme)
    draw_times(right, time["lines"], theme)
    right.legend(loc="upper left", fontsize=9, frameon=False, labelcolor=theme.text, handlelength=2.8)
    heads, kv_heads, head_dim, batch = heads_of(CONFIGURATION)
    reads = " and ".join(f"{method} {tokens:,}" for method, tokens in time["budgets"].items())
    captions = {
        left: (
            "Accuracy against bytes read",
            f"{TITLES.get(accuracy['model'], accuracy['model'])}, {accuracy['dtype']}, {accuracy['device']};\n"
            f"{', '.join(accuracy['tasks'])}, {_thousands(accuracy['lengths'])} tokens: {accuracy['samples']} samples",
        ),
        right: (
            "Time of a decode step of one layer",
            f"{heads} query heads, {kv_heads} KV heads of {head_dim}, batch {batch}, {time['dtype']}, "
            f"{time['device']};\ntokens read: {reads}",
        ),
    }
    for axes, (title, caption) in captions.items():
        axes.set_title(f"{caption}\n", fontsize=8.5, loc="left", color=theme.faint, linespacing=1.3, y=0.985)
        axes.text(0, 1.17, title, transform=axes.transAxes, fontsize=11.5, fontweight="bold", color=theme.text)
    return figure


def _draw_accuracy(axes: Axes, points: dict[str, list[list[Any]]], theme: Theme) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for method, found in points.items():
        axes.plot([point[0] for point in found], [point[1] for point in found], **theme.line(method))
        labels: dict[float, list[tuple[float, str]]] = {}
        for read_share, score, budget in found:
            labels.setdefault(round(score), []).append((read_share, budget))
        for score, group in labels.items():  # budgets with the same score share a label above their points
            is_one = len(group) == 1
            axes.annotate(
                ", ".join(budget for _, budget in group),
                (sum(share for share, _ in group) / len(group), score),
                xytext=(6, -9) if is_one else (0, 7),
                textcoords="offset points",
                ha="left" if is_one else "center",
                fontsize=8.5,
                color=theme.line(method)["color"],
            )
    axes.set_xscale("log")
    axes.set_xlim(9, 125)
    axes.xaxis.set_major_locator(FixedLocator([10, 20, 50, 100]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    lowest = min(score for found in points.values() for _, score, _ in found)
    axes.set_ylim(max(0, 10 * (lowest // 10) - 20), 105)
    axes.yaxis.set_major_locator(FixedLocator(range(0, 101, 10)))
    axes.set_xlabel("KV cache and metadata read in decode steps (dense: 100 %)", fontsize=9.5)
    axes.set_ylabel("score", fontsize=9.5)
    legend = {"loc": "lower right", "fontsize": 9, "frameon": False, "labelcolor": theme.text}
    axes.legend(title="labels: token_budget", title_fontproperties={"size": 8.5}, **legend)
    axes.get_legend().get_title().set_color(theme.faint)
    dress(axes, theme)


def _thousands(lengths: list[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)


def accuracy_table(root: Path, method: str) -> str:
    """Return the left panel's data for one method, such as ``Quest``, and dense attention, as Markdown.

    Raises
    ------
    KeyError
        The picture does not show the method.
    """
    points = overview_data(root)["accuracy"]["points"]
    rows = [
        [label or dense, f"{read_share:.1f}", f"{score:.1f}"]
        for name, dense in (("dense attention", "dense"), (method, ""))
        for read_share, score, label in points[name]
    ]
    return table(("token_budget", "KV read, %", "score, %"), rows)


def times_table(root: Path, method: str) -> str:
    """Return the right panel's data for one method and the best dense kernel, as Markdown.

    Raises
    ------
    KeyError
        The picture does not show the method.
    """
    lines = {name: dict(points) for name, points in overview_data(root)["time"]["lines"].items()}
    shown = [name for name in lines if name == DENSE or name.split(",")[0] == method]
    if shown == [DENSE]:
        raise KeyError(method)
    rows = [[length_label(length), *(f"{lines[name][length]:.1f}" for name in shown)] for length in lines[DENSE]]
    return table(("tokens in the cache", *(f"{name}, µs" for name in shown)), rows)
