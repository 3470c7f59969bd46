"""Style of methods: one colour and marker each, in every plot of a report."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from eval.config import DENSE
from eval.report.sections import Column, label

# Okabe and Ito's colours, which colour-blind people can tell apart, without their yellow, too pale on white; then
# darker ones for reports of more methods, which markers tell apart as well.
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#332288", "#882255", "#999933", "#6B4A2B", "#7F7F7F", "#AA4499"),
)
_DENSE_COLOUR = "#222222"
_DENSE_MARKER = "X"
_MARKERS = ("o", "s", "^", "D", "v", "P", "*")
_DASHES = ("-", "--", "-.", ":")
_PERCENT_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_FACE = "#ffffff"
_LEGEND_MARK_INCHES, _LETTER_INCHES, _LINE_INCHES = 0.6, 0.09, 0.24
_MOST_LINES_BELOW = 8
PAGE_INCHES = 11.0
"""Maximum width of a figure: the page's width at its pixels per inch."""


class Styles:
    """Colours and markers by method, and dashes by budget, for all plots of a report."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._methods = sorted({method for method, _ in columns if method != DENSE})
        self._budgets = sorted({budget or 0 for method, budget in columns if method != DENSE}, reverse=True)

    def colour(self, method: str) -> str:
        """Return the method's colour."""
        return _DENSE_COLOUR if method == DENSE else _COLOURS[self._methods.index(method) % len(_COLOURS)]

    def marker(self, method: str) -> str:
        """Return the method's marker, so that methods differ by more than colour."""
        return _DENSE_MARKER if method == DENSE else _MARKERS[self._methods.index(method) % len(_MARKERS)]

    def note(self, method: str) -> dict[str, Any]:
        """Return options of ``Axes.annotate`` for a note at a method's point; methods alternate left and right."""
        right = method != DENSE and self._methods.index(method) % 2 == 1
        return {
            "xytext": (7 if right else -7, 0),
            "textcoords": "offset points",
            "ha": "left" if right else "right",
            "va": "center",
            "size": 8,
            "color": self.colour(method),
        }

    def line(self, column: Column) -> dict[str, Any]:
        """Return options of ``Axes.plot`` for one method and budget."""
        method, budget = column
        dash = "-" if method == DENSE else _DASHES[self._budgets.index(budget or 0) % len(_DASHES)]
        return {**self.points(method), "linestyle": dash, "label": label(column)}

    def points(self, method: str) -> dict[str, Any]:
        """Return options of ``Axes.plot`` for one method over its budgets."""
        return {
            "color": self.colour(method),
            "marker": self.marker(method),
            "linewidth": 1.6,
            # Open markers, so that overlapping ones all show.
            "markersize": 7,
            "markerfacecolor": "none",
            "markeredgewidth": 1.6,
        }


def panels(count: int, width: float = 5.4, height: float = 3.7, most_across: int = 3) -> tuple[Figure, list[Axes]]:
    """Create a figure with ``count`` panels, in lines of ``most_across``; sizes in inches, ``width`` is a maximum."""
    across = 2 if count == 4 else min(count, most_across)
    down = -(-count // across)
    size = (min(width * across, PAGE_INCHES), height * down)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.06), facecolor=_FACE)
    axes = [figure.add_subplot(down, across, index + 1) for index in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e4e4e4", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def log2_ticks(axis: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic in tokens, with ticks only at the values."""
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(values) / 1.25, max(values) * 1.25)
    axis.xaxis.set_major_locator(FixedLocator(_apart(sorted(set(values)))))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def percent_ticks(axis: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic in percent, up to dense attention's 100, with round ticks."""
    lowest = min(values)
    axis.set_xscale("log")
    axis.set_xlim(lowest / 1.6, max(130, *values))
    axis.xaxis.set_major_locator(FixedLocator([tick for tick in _PERCENT_TICKS if tick > lowest / 1.6]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _apart(values: list[float]) -> list[float]:
    """Return the ascending values whose labels do not overlap."""
    room = (values[-1] / values[0]) ** 0.08
    kept: list[float] = []
    for value in values:
        if not kept or value >= kept[-1] * room:
            kept.append(value)
    return kept


def score_axis(axis: Axes, name: str) -> None:
    """Name the y axis, and avoid clipping scores near the ends of their range."""
    axis.set_ylabel(name)
    if "%" in name:
        axis.set_ylim(-3, 103)


def from_zero(axis: Axes, values: Sequence[float]) -> None:
    """Start the y axis at zero, with room above the highest value."""
    axis.set_ylim(0, (1.1 * max(values)) or 1)


def add_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend for all panels: below them, or beside a single panel if it would be higher than that."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if not handles:  # matplotlib omits names that begin with an underscore
        return
    width, height = figure.get_size_inches()
    names = [textwrap.fill(name, int((width - _LEGEND_MARK_INCHES) / _LETTER_INCHES)) for name in handles]
    longest = max(len(line) for name in names for line in name.split("\n"))
    columns = max(1, min(len(names), int(width / (_LEGEND_MARK_INCHES + _LETTER_INCHES * longest))))
    lines = -(-len(names) // columns) * max(name.count("\n") + 1 for name in names)
    beside = _LEGEND_MARK_INCHES + _LETTER_INCHES * longest
    if lines > _MOST_LINES_BELOW and len(axes) == 1 and width + beside <= PAGE_INCHES:
        figure.set_size_inches(width + beside, max(height, _LINE_INCHES * (lines + 1)))
        figure.legend(list(handles.values()), names, loc="outside center right", frameon=False)
        return
    figure.set_size_inches(width, height + _LINE_INCHES * (lines - 1))  # the panels keep their height
    figure.legend(list(handles.values()), names, loc="outside lower center", ncols=columns, frameon=False)


def wrapped(title: str, width: int = 44) -> str:
    """Wrap a panel's title to the panel's width."""
    return textwrap.fill(title, width, break_long_words=False)
