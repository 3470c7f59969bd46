"""The plot of dense-equivalent budgets: KV cache read against task, a bar for each method (PSA, figure 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eval.budget_table import RESULT, criterion, head, lines, setting, title
from eval.errors import EvalError
from eval.report.plots import Picture
from eval.report.style import Styles, add_legend, panels
from eval.report.tables import Table
from eval.store import read_json
from hf_sparse_attn.whole_file import write_whole

_INCHES_PER_BAR = 0.3
_GROUP = 0.8
"""Share of a task's room that its bars take."""


def load_budgets(directory: Path) -> list[dict[str, Any]]:
    """Load the results of all searches in a folder and its subfolders.

    Raises
    ------
    EvalError
        A file cannot be read, or is not the result of a search; the message names it.
    """
    reports = []
    for path in sorted(directory.rglob(RESULT)):
        what = "the result of `python -m eval budget`"
        report = read_json(path, what)
        try:
            lines(report), head(report), title(report), criterion(report)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EvalError(f"{path} is not {what}: {type(error).__name__}: {error}") from error
        reports.append(report)
    return reports


def budget_section(report: dict[str, Any]) -> tuple[str, Table]:
    """Return a search's title and table for the page."""
    return title(report), Table(list(head(report)), lines(report), text_columns=1)


def budget_picture(report: dict[str, Any], name: str) -> Picture | None:
    """Plot the KV cache that each method reads at its smallest setting; None if no method has one."""
    results = report["results"]
    if not any(entry["found"] and entry["found"]["kv_fraction"] is not None for entry in results):
        return None
    methods = list(dict.fromkeys(entry["method"] for entry in results))
    places = list(dict.fromkeys((entry["task"], entry["length"]) for entry in results))
    read = {(entry["task"], entry["length"], entry["method"]): _percent(entry) for entry in results}
    styles = Styles([(method, None) for method in methods])
    figure, (axis,) = panels(1, width=max(5.4, 1.2 + _INCHES_PER_BAR * len(places) * (len(methods) + 1)))
    width = _GROUP / len(methods)
    at = np.arange(len(places))
    for number, method in enumerate(methods):
        heights = [read.get((*place, method)) for place in places]
        offsets = at + (number - (len(methods) - 1) / 2) * width
        known = [0.0 if height is None else height for height in heights]
        axis.bar(offsets, known, width, color=styles.colour(method), label=method)
        for offset, height in zip(offsets, heights, strict=True):
            if height is None:
                axis.annotate("none", (offset, 0), rotation=90, ha="center", va="bottom", size=8)
    names = [task if length is None else f"{task}\n{length:,}" for task, length in places]
    axis.set_xticks(at, names, rotation=0 if len(places) < 6 else 45, ha="center" if len(places) < 6 else "right")
    axis.set_xlim(-0.7, len(places) - 0.3)
    axis.grid(visible=False, axis="x")
    axis.set_ylabel("KV cache read (% of dense)")
    add_legend(figure, [axis])
    caption = f"KV cache read at each method's smallest setting with {criterion(report)}"
    said = "; ".join(
        f"{_place(entry)}, {entry['method']}: {setting(entry)}"
        + ("" if (share := _percent(entry)) is None else f", {share:.1f} % read")
        for entry in results
    )
    return Picture(name, caption, f"{caption}. {said}.", figure)


def _percent(entry: dict[str, Any]) -> float | None:
    share = entry["found"] and entry["found"]["kv_fraction"]
    return None if share is None else 100 * share


def _place(entry: dict[str, Any]) -> str:
    return entry["task"] if entry["length"] is None else f"{entry['task']} at {entry['length']:,} tokens"


def write_picture(report: dict[str, Any], folder: Path) -> Path | None:
    """Write the plot of a search as ``budget.png``, if it has one, and return its path.

    Raises
    ------
    EvalError
        The file cannot be written.
    """
    picture = budget_picture(report, "budget")
    if picture is None:
        return None
    path = folder / f"{picture.name}.png"
    try:
        write_whole(path, picture.png())
    except OSError as error:
        raise EvalError(f"{path} cannot be written: {error}") from error
    return path
