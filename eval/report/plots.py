"""The plots of a section."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.config import DENSE
from eval.report.records import Record
from eval.report.sections import Column, Section, label
from eval.report.style import Styles, add_legend, from_zero, log2_ticks, panels, percent_ticks, score_axis, wrapped
from eval.summary import aggregate, column_order

_DOTS_PER_INCH = 160
_PAGE_PIXELS_PER_INCH = 100
_MOST_DEPTHS = 12
_MOST_NOTES = 9
_MOST_WRITTEN_CELLS = 80
LEAST_DIVERGENCE = 1e-7
"""Smaller ones are drawn here: a logarithmic axis has no 0."""
_MOST_LOSS = 600.0
"""Largest loss in nats whose perplexity can be drawn."""


@dataclass(frozen=True)
class Picture:
    """A plot with its alternative text."""

    name: str
    caption: str
    alt: str
    figure: Figure

    @property
    def page_width(self) -> int:
        """Width on the page in CSS pixels, which gives all pictures the same letter size."""
        return round(float(self.figure.get_size_inches()[0]) * _PAGE_PIXELS_PER_INCH)

    def png(self) -> bytes:
        """Render the picture as a PNG file."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
        return buffer.getvalue()


def draw(section: Section, styles: Styles) -> list[Picture]:
    """Draw every plot that the section's records allow, in the order of the page."""
    plots: tuple[Callable[[Section, Styles], Picture | None], ...] = (
        score_by_budget,
        score_by_kv_read,
        divergence_by_kv_read,
        perplexity_by_position,
        divergence_by_position,
        score_by_depth,
        latency_by_length,
    )
    return [picture for plot in plots if (picture := plot(section, styles)) is not None]


def by_method(columns: Sequence[Column]) -> Iterator[tuple[str, list[Column]]]:
    """Yield each method with its columns, in order of budget."""
    for method, members in groupby(columns, key=lambda column: column[0]):
        yield method, list(members)


def score_by_budget(section: Section, styles: Styles) -> Picture | None:
    """Plot the figure against token budget, a panel per length, dense attention as a horizontal line."""
    budgets = [float(budget) for method, budget in section.columns if method != DENSE and budget]
    averages = {length: found for length in section.lengths if (found := section.averages(length))}
    if not budgets or not averages:
        return None
    figure, axes = panels(len(averages))
    for axis, (length, average) in zip(axes, averages.items(), strict=True):
        for method, columns in by_method(section.columns):
            if method == DENSE:
                axis.axhline(average[columns[0]], color=styles.colour(DENSE), linestyle="--", label="dense")
                continue
            points = [(column[1], average[column]) for column in columns if column[1]]
            axis.plot(*zip(*points, strict=True), **styles.points(method), label=method)
        log2_ticks(axis, budgets)
        axis.set_xlabel("token budget")
        score_axis(axis, section.figure_name)
        if length is not None:
            axis.set_title(f"{length:,} tokens", fontsize="medium")
    add_legend(figure, axes)
    said = "; ".join(f"{length_name(length)}: {_list(average)}" for length, average in averages.items())
    what = section.figure_name.partition(" ")[0]
    caption = f"Average {what} against token budget{_better(section)}"
    return Picture(f"{section.slug}-budget", caption, f"{caption}. {said}.", figure)


def score_by_kv_read(section: Section, styles: Styles) -> Picture | None:
    """Plot the figure against the share of the KV cache that was read, a point per method and budget."""
    average = section.averages()
    reads = {column: _kv_percent(section, column) for column in section.columns}
    points = {column: (read, average[column]) for column, read in reads.items() if read and average}
    if not any(method != DENSE for method, _ in points):
        return None
    figure, (axis,) = panels(1)
    for method, columns in by_method(list(points)):
        axis.plot(*zip(*(points[column] for column in columns), strict=True), **styles.points(method), label=method)
        axis.lines[-1].set(linewidth=1, alpha=0.9, label="dense" if method == DENSE else method)
        for column in columns if len(points) <= _MOST_NOTES else []:
            if method != DENSE and column[1]:
                axis.annotate(f"{column[1]:,}", points[column], **styles.note(method))
    percent_ticks(axis, [read for read, _ in points.values()])
    axis.set_xlabel("KV cache read per decode step, metadata included (% of dense)")
    score_axis(axis, section.figure_name)
    add_legend(figure, [axis])
    caption = f"Average {section.figure_name.partition(' ')[0]} against KV cache read{_better(section)}"
    said = "; ".join(f"{label(column)}: {read:.1f} % read, {figure_:.2f}" for column, (read, figure_) in points.items())
    shown = f"{caption}; {'numbers are token budgets' if len(points) <= _MOST_NOTES else 'a point for each budget'}"
    return Picture(f"{section.slug}-kv-read", shown, f"{caption}. {said}.", figure)


def divergence_by_kv_read(section: Section, styles: Styles) -> Picture | None:
    """Plot the mean divergence from dense attention against the share of the KV cache that was read."""
    groups: dict[Column, list[Record]] = defaultdict(list)
    for record in section.records:
        if record["error"] is None and record.get("divergence") is not None and record["kv_fraction"]:
            groups[record["method"], record["token_budget"]].append(record)
    found = {column: aggregate(records) for column, records in groups.items()}
    points = {
        column: (100 * entry["kv_fraction"], max(entry["divergence"], LEAST_DIVERGENCE))
        for column, entry in sorted(found.items(), key=lambda item: column_order(*item[0]))
    }
    if not points:
        return None
    figure, (axis,) = panels(1)
    for method, columns in by_method(list(points)):
        axis.plot(*zip(*(points[column] for column in columns), strict=True), **styles.points(method), label=method)
    percent_ticks(axis, [read for read, _ in points.values()])
    axis.set_xlabel("KV cache read per decode step, metadata included (% of dense)")
    axis.set_yscale("log")
    axis.set_ylabel("mean KL from dense attention (nats)")
    add_legend(figure, [axis])
    caption = "Divergence from dense attention along its answers against KV cache read (lower is better)"
    said = "; ".join(f"{label(column)}: {read:.1f} % read, {value:.4f}" for column, (read, value) in points.items())
    return Picture(f"{section.slug}-divergence", caption, f"{caption}. {said}.", figure)


def perplexity_by_position(section: Section, styles: Styles) -> Picture | None:
    """Plot the perplexity at each measured position, over the samples."""
    nll: dict[Column, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in section.records:
        for position, value in record.get("nll_by_position") or []:
            nll[record["method"], record["token_budget"]][position].append(value)
    if not nll:
        return None
    figure, (axis,) = panels(1)
    for column in section.columns:
        if column in nll:
            positions = sorted(nll[column])
            axis.plot(positions, [_perplexity(nll[column][p]) for p in positions], **styles.line(column))
            axis.lines[-1].set_markevery(0.15)
    axis.set_xlabel("position (tokens)")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_ylabel("perplexity")
    add_legend(figure, [axis])
    caption = "Perplexity by position (lower is better)"
    overall = _list(_over_all(section, "perplexity"))
    said = f" Over all positions: {overall}." if overall else ""
    return Picture(f"{section.slug}-position", caption, f"{caption}.{said}", figure)


def divergence_by_position(section: Section, styles: Styles) -> Picture | None:
    """Plot the divergence from dense attention along its answers, over the samples."""
    found: dict[Column, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in section.records:
        for position, value in record.get("divergence_by_position") or []:
            found[record["method"], record["token_budget"]][position].append(value)
    if not any(len(positions) > 1 for positions in found.values()):
        return None
    figure, (axis,) = panels(1)
    for column in section.columns:
        if column in found:
            positions = sorted(found[column])
            axis.plot(positions, [fmean(found[column][p]) for p in positions], **styles.line(column))
    axis.set_xlabel("predicted tokens before")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_ylabel("KL from dense attention (nats a token)")
    axis.set_ylim(bottom=0)
    add_legend(figure, [axis])
    caption = "Divergence from dense attention by position in its answers (lower is better)"
    overall = _list(_over_all(section, "divergence"), digits=4)
    said = f" Over all positions: {overall}." if overall else ""
    return Picture(f"{section.slug}-divergence-position", caption, f"{caption}.{said}", figure)


def _over_all(section: Section, name: str) -> dict[Column, float]:
    """Return each column's aggregate of a field; a mean of positions would weigh a last, short one like the others."""
    by_column: dict[Column, list[Record]] = defaultdict(list)
    for record in section.records:
        by_column[record["method"], record["token_budget"]].append(record)
    found = {column: aggregate(by_column[column])[name] for column in section.columns}
    return {column: value for column, value in found.items() if value is not None}


def _perplexity(losses: Sequence[float]) -> float:
    return math.exp(min(fmean(losses), _MOST_LOSS))


def score_by_depth(section: Section, styles: Styles) -> Picture | None:
    """Plot a heatmap of depth and length for each method and budget, over tasks with one answer at one depth."""
    records = [record for record in section.records if None not in (record["depth"], record["length"], record["score"])]
    lengths, depths = sorted({record["length"] for record in records}), sorted({record["depth"] for record in records})
    if len(lengths) * len(depths) < 2:
        return None
    if len(depths) > _MOST_DEPTHS:  # depths drawn at random: tenths
        depths = [(tenth + 0.5) / 10 for tenth in range(10)]
    columns = [column for column in section.columns if any((r["method"], r["token_budget"]) == column for r in records)]
    height = max(2.6, 1.3 + 0.3 * len(depths))
    figure, axes = panels(len(columns), width=max(3.6, 1.6 + 0.7 * len(lengths)), height=height)
    for axis, column in zip(axes, columns, strict=True):
        grid = _grid([r for r in records if (r["method"], r["token_budget"]) == column], lengths, depths)
        image = _heatmap(axis, grid, [_short(n) for n in lengths], [f"{100 * depth:.0f}" for depth in depths])
        axis.set_title(wrapped(label(column), 30), fontsize="medium")
    figure.colorbar(image, ax=axes, label="score (%)", location="top", shrink=0.5, aspect=40, pad=0.01)
    tasks = ", ".join(sorted({record["task"] for record in records}))
    caption = f"Score by depth of the answer and length ({tasks})"
    means = {
        c: 100 * fmean(record["score"] for record in records if (record["method"], record["token_budget"]) == c)
        for c in columns
    }
    return Picture(f"{section.slug}-depth", caption, f"{caption}. Mean over all samples: {_list(means)}.", figure)


def _grid(records: Sequence[Record], lengths: list[int], depths: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return mean scores in percent, [depth, length], nan without a record."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for record in records:
        nearest = min(range(len(depths)), key=lambda index: abs(depths[index] - record["depth"]))
        cells[nearest, lengths.index(record["length"])].append(record["score"])
    grid = np.full((len(depths), len(lengths)), np.nan)
    for place, scores in cells.items():
        grid[place] = 100 * fmean(scores)
    return grid


def _heatmap(
    axis: Axes, grid: np.ndarray[Any, np.dtype[np.float64]], lengths: Sequence[str], depths: Sequence[str]
) -> Any:
    axis.grid(visible=False)
    for edge in range(1, max(grid.shape)):  # lines between the cells
        if edge < grid.shape[0]:
            axis.axhline(edge - 0.5, color="white", linewidth=1)
        if edge < grid.shape[1]:
            axis.axvline(edge - 0.5, color="white", linewidth=1)
    axis.set_facecolor("#eeeeee")  # shows in cells without a record
    image = axis.imshow(grid, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    axis.set_xticks(range(len(lengths)), lengths, rotation=0 if len(lengths) < 8 else 90)
    axis.set_yticks(range(len(depths)), depths)
    in_k = any(length.endswith("K") for length in lengths)
    axis.set_xlabel("length (tokens; K is 1,024)" if in_k else "length (tokens)")
    axis.set_ylabel("depth (%)")
    if grid.size <= _MOST_WRITTEN_CELLS:
        for (depth, length), value in np.ndenumerate(grid):
            if not math.isnan(value):
                ink = "black" if value > 55 else "white"
                axis.text(length, depth, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return image


def latency_by_length(section: Section, styles: Styles) -> Picture | None:
    """Plot time per output token and time to first token against the prompt's tokens."""
    buckets: dict[tuple[Column, int], list[Record]] = defaultdict(list)
    for record in section.records:
        if record["error"] is None and record.get("prompt_tokens"):
            bucket = record["length"] or _nearest_power_of_two(record["prompt_tokens"])
            buckets[(record["method"], record["token_budget"]), bucket].append(record)
    points = {key: aggregate(records) for key, records in sorted(buckets.items(), key=lambda item: item[0][1])}
    panes = {"tpot_ms": "time per output token (ms)", "ttft_seconds": "time to first token (s)"}
    panes = {name: title for name, title in panes.items() if any(point[name] is not None for point in points.values())}
    if not panes:
        return None
    figure, axes = panels(len(panes))
    for axis, (name, title) in zip(axes, panes.items(), strict=True):
        drawn: list[tuple[float, float]] = []
        for column in section.columns:
            line = [(tokens, p[name]) for (c, tokens), p in points.items() if c == column and p[name] is not None]
            if line:
                axis.plot(*zip(*line, strict=True), **styles.line(column))
                drawn += line
        log2_ticks(axis, [tokens for tokens, _ in drawn])
        from_zero(axis, [value for _, value in drawn])
        axis.set_xlabel(
            "prompt (tokens)" if section.lengths != [None] else "prompt (tokens, to the nearest power of two)"
        )
        axis.set_ylabel(title)
    add_legend(figure, axes)
    caption = "Median time per output token and time to first token against prompt length"
    said = "; ".join(
        f"{label(column)} at {tokens:,} tokens: "
        + ", ".join(f"{title} {point[name]:.3g}" for name, title in panes.items() if point[name] is not None)
        for (column, tokens), point in points.items()
    )
    return Picture(f"{section.slug}-latency", caption, f"{caption}. {said}.", figure)


def _kv_percent(section: Section, column: Column) -> float | None:
    records = section.shared.records  # those that the averages are taken over
    found = aggregate([record for record in records if (record["method"], record["token_budget"]) == column])[
        "kv_fraction"
    ]
    return None if found is None else 100 * found


def _nearest_power_of_two(tokens: int) -> int:
    return int(2 ** round(math.log2(tokens)))


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"


def length_name(length: int | None) -> str:
    """Return the name of a requested length; None means that samples have their own."""
    return "own length" if length is None else f"{length:,} tokens"


def _list(figures: dict[Column, float], digits: int = 2) -> str:
    return ", ".join(f"{label(column)} {figure:.{digits}f}" for column, figure in figures.items())


def _better(section: Section) -> str:
    return " (lower is better)" if section.is_perplexity else ""
