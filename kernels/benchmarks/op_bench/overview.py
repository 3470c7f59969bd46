"""The README's picture: accuracy against bytes read, and the time of a decode step against length."""

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
SWEEPS = ("results-qwen2.5-coder-0.5b", "results-tokenselect-theta")
"""Sweeps over the same samples: Quest's over its budget, TokenSelect's over the threshold of its selection cache."""
PLACES = (("passkey", "book", 16000), ("needle", "essay", 16000))
"""Benchmark, task and length: what both sweeps ran."""
TOKENSELECT = ("sink_tokens", "voted_tokens", "recent_tokens")
"""The settings whose sum TokenSelect reads."""
FOLDER = Path("docs/assets")
FILES = {"light": "overview.svg", "dark": "overview-dark.svg"}

TITLE = "Accuracy against bytes read, and time of a decode step against length"
TITLES = {"qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)"}
SWEPT = {"Quest": "token_budget", "TokenSelect": "selection_cache_threshold"}
NAMES = {"full": "dense attention", "quest": "Quest", "tokenselect": "TokenSelect"}


def overview_data(root: Path) -> Record:
    """Return what the picture shows, from the results under ``root``.

    Returns
    -------
    dict
        ``accuracy``: what was measured, and for each method points ``[percent of dense attention's bytes, score in
        percent, label]``, means over ``PLACES``. ``time``: where, and for each line points ``[length, µs]``.

    Raises
    ------
    ResultsError
        A results file cannot be read, lacks what is drawn, or the sweeps differ in model, device or samples.
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
    return {"accuracy": _accuracy(root / "eval/results"), "time": time}


def _accuracy(results: Path) -> Record:
    entries: dict[tuple[str, str], dict[tuple[str, str, int], Record]] = {}
    runs: list[Record] = []
    for sweep in SWEEPS:
        for path in sorted((results / sweep).glob("*/summary.json")):
            summary = _summary(path)
            for entry in summary["table"]:
                place = (entry["benchmark"], entry["task"], entry["length"])
                if place in PLACES:
                    column = (entry["method"], _label(entry, summary["config"]["parameters"]))
                    entries.setdefault(column, {}).setdefault(place, entry)
                    samples = entry["samples"] - entry["errors"]
                    runs.append({**{name: summary[name] for name in ("model", "dtype", "device")}, "samples": samples})
    if not runs or any(run != runs[0] for run in runs) or any(set(found) != set(PLACES) for found in entries.values()):
        raise ResultsError(f"{results}: {' and '.join(SWEEPS)} must hold the same tasks, on one model and device")
    points: dict[str, list[list[Any]]] = {}
    for (method, label), found in entries.items():
        mean = {name: sum(entry[name] for entry in found.values()) / len(PLACES) for name in ("kv_fraction", "score")}
        points.setdefault(NAMES[method], []).append([100 * mean["kv_fraction"], 100 * mean["score"], label])
    tasks = [f"{benchmark} ({task})" for benchmark, task, _ in PLACES]
    return {**runs[0], "tasks": tasks, "length": PLACES[0][2], "points": points}


def _summary(path: Path) -> Record:
    try:
        summary: Record = json.loads(path.read_text(encoding="utf-8"))
        summary["table"], summary["config"]["parameters"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is not the summary of a run: {error!r}") from error
    return summary


def _label(entry: Record, parameters: Record) -> str:
    if entry["method"] == "quest":
        return f"{entry['token_budget']:,}"
    return str(parameters["selection_cache_threshold"]) if entry["method"] == "tokenselect" else ""


def write_overview(root: Path) -> list[Path]:
    """Draw the picture for light and for dark pages; return the files, which hold their data as description.

    Raises
    ------
    ResultsError
        As :func:`overview_data`; or there is no matplotlib.
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
    """Draw what :func:`overview_data` returned."""
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
            f"{TITLES.get(accuracy['model'], accuracy['model'])}, {accuracy['length']:,} tokens, {accuracy['dtype']}, "
            f"{accuracy['device']};\nmean of {' and '.join(accuracy['tasks'])}, {accuracy['samples']} samples each",
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
        ordered = sorted(found)
        axes.plot(
            [point[0] for point in ordered],
            [point[1] for point in ordered],
            **{**theme.line(method), "label": f"{method}, by {SWEPT[method]}" if method in SWEPT else method},
        )
        labels: dict[tuple[float, float], list[str]] = {}
        for read_share, score, label in found:
            labels.setdefault((round(read_share, 1), score), []).append(label)
        for at, names in labels.items():
            beside = (7, -3) if method == "Quest" else (-7, -3)
            is_top = at[1] == 100
            axes.annotate(
                ", ".join(names),
                at,
                xytext=(0, 7) if is_top else beside,
                textcoords="offset points",
                ha="center" if is_top else "left" if method == "Quest" else "right",
                fontsize=8.5,
                color=theme.line(method)["color"],
            )
    axes.set_xscale("log")
    axes.set_xlim(2.5, 130)
    axes.xaxis.set_major_locator(FixedLocator([3, 5, 10, 20, 50, 100]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_ylim(0, 112)
    axes.yaxis.set_major_locator(FixedLocator(range(0, 101, 20)))
    axes.set_xlabel("KV cache and metadata read in decode steps (dense: 100 %)", fontsize=9.5)
    axes.set_ylabel("score", fontsize=9.5)
    axes.legend(loc="lower right", fontsize=9, frameon=False, labelcolor=theme.text)
    dress(axes, theme)


def accuracy_table(root: Path, method: str) -> str:
    """Return the picture's left panel for one method, such as ``Quest``, beside dense attention, as Markdown.

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
    return table((SWEPT[method], "KV read, %", "score, %"), rows)


def times_table(root: Path, method: str) -> str:
    """Return the picture's right panel for one method beside the best dense kernel, as Markdown.

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
