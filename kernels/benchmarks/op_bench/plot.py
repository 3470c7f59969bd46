"""SVG figures of measured times for light and dark pages, with a line per step and one for the best dense kernel."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from op_bench.registry import CLUSTER_STEPS, STEP, TOKEN_STEPS
from op_bench.results import Record, ResultsError, shape_of
from op_bench.shapes import length_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAY = "layers"
DENSE = "best dense kernel"
STEPS = {
    STEP: "Quest",
    CLUSTER_STEPS[0]: "Quest",  # the default, where it was measured
    TOKEN_STEPS[1]: "TokenSelect, choice kept",
    TOKEN_STEPS[0]: "TokenSelect, chosen anew",
}
"""Drawn entries and the names of their lines, to which later entries are preferred."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Theme:
    """Colours for one background, legible and distinguishable with colour blindness."""

    text: str
    faint: str
    grid: str
    dense: str
    quest: str
    tokenselect: str

    def line(self, name: str) -> dict[str, Any]:
        """Return options of ``Axes.plot`` for a named line: colour, marker and dash."""
        if name.startswith("Quest"):
            style = {"color": self.quest, "marker": "o"}
        elif name.startswith("TokenSelect"):
            style = {"color": self.tokenselect, "marker": "s"}
        else:
            style = {"color": self.dense, "marker": "X"}
        dash = "--" if name == STEPS[TOKEN_STEPS[0]] else "-"
        return {**style, "linestyle": dash, "label": name, "linewidth": 1.8, "markersize": 5.5}


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d8dee4", "#1f2328", "#0072b2", "#c24e00"),
    "dark": Theme("#e6edf3", "#9aa4b0", "#30363d", "#e6edf3", "#56b4e9", "#f0a35e"),
}


def series(report: Record) -> dict[str, dict[str, Points]]:
    """Return each configuration's lines of decode step times, as points (length, µs).

    The dense line is the fastest other kernel at each length, from the same runs as the other lines.
    """
    panels: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for step, name in STEPS.items():
        for entry in report["entries"]:
            if (entry["op"], entry["variant"]) != step or not entry["times"]:
                continue
            shape = shape_of(entry)
            lines = panels[shape.configuration]
            lines[name][shape.length] = entry["times"][WAY]["median"]
            if entry["against"]:
                dense = entry["against"][WAY]["best_us"]
                lines[DENSE][shape.length] = min(dense, lines[DENSE].get(shape.length, dense))
    order = dict.fromkeys((DENSE, *STEPS.values()))
    return {
        panel: {name: sorted(lines[name].items()) for name in order if name in lines} for panel, lines in panels.items()
    }


def new_figure(width: float, height: float, down: int, across: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``width`` x ``height`` inches and its panels.

    Raises
    ------
    ResultsError
        Matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ResultsError("drawing needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.06), facecolor="none")
    axes = [figure.add_subplot(down, across, index + 1, facecolor="none") for index in range(down * across)]
    return figure, axes


def dress(axes: Axes, theme: Theme) -> None:
    """Apply a theme to a panel: colours, a grid, and no border at the top and right."""
    axes.grid(True, color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(theme.faint)
    axes.tick_params(which="both", colors=theme.faint, labelsize=9)
    axes.xaxis.label.set_color(theme.text)
    axes.yaxis.label.set_color(theme.text)


def draw_times(axes: Axes, lines: dict[str, Points], theme: Theme) -> None:
    """Draw step times against length on logarithmic axes."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), **theme.line(name))
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_label(round(value))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("tokens in the cache", fontsize=9.5)
    axes.set_ylabel("µs", fontsize=9.5)
    dress(axes, theme)


def times_svg(report: Record, theme: Theme) -> bytes:
    """Draw a panel for each configuration of a report.

    Raises
    ------
    ResultsError
        The report has no decode steps, or matplotlib is missing.
    """
    panels = series(report)
    if not panels:
        raise ResultsError(f"the report of {report['machine']['device']} has no decode steps to draw")
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, grid = new_figure(3.6 * across, 3.0 * down + 0.5, down, across)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, lines) in zip(grid, panels.items(), strict=False):
        draw_times(axes, lines, theme)
        heads, kv_heads, head_dim, batch = heads_of(panel)
        axes.set_title(
            f"{heads}/{kv_heads} heads of {head_dim}, batch {batch}", fontsize=9.5, loc="left", color=theme.text
        )
    lowest = min(axes.get_ylim()[0] for axes in grid[: len(panels)])
    highest = max(axes.get_ylim()[1] for axes in grid[: len(panels)])
    handles = {}
    for axes in grid[: len(panels)]:
        axes.set_ylim(lowest, highest)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=4,
        fontsize=9.5,
        frameon=False,
        labelcolor=theme.text,
        handlelength=2.8,
    )
    return svg(figure, f"One decode step of one layer, {report['machine']['device']}", "")


def heads_of(configuration: str) -> list[str]:
    """Return query heads, KV heads, head dimension and batch of a ``Shape.configuration``."""
    return [part.lstrip("qkvdb") for part in configuration.split("-")[:4]]


def svg(figure: Figure, title: str, description: str) -> bytes:
    """Return a figure as SVG, with text as outlines and a title and description for screen readers."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        metadata = {"Date": None, "Creator": None, "Title": title, "Description": description or None}
        figure.savefig(out, format="svg", metadata=metadata)
    return re.sub(rb" +\n", b"\n", out.getvalue())  # matplotlib ends the lines of outlines with spaces
