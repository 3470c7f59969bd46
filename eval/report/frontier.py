"""The figure of a frontier: divergence from dense attention, and needles found, against KV bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import groupby

from matplotlib import rc_context
from matplotlib.axes import Axes

from eval.config import DENSE
from eval.frontier import Frontier, Mean, Point
from eval.report.plots import LEAST_DIVERGENCE, Picture
from eval.report.style import Styles, add_legend, panels, percent_ticks, score_axis

_EMPHASISED = "keycodes"


def frontier_picture(frontier: Frontier, name: str) -> Picture | None:
    """Plot a model's frontier in two panels; None without a method besides dense attention."""
    sparse = [point for point in frontier.points if point.method != DENSE]
    if not sparse:
        return None
    has_needles = any(point.found is not None for point in sparse)
    styles = Styles([(point.family, point.token_budget) for point in sparse])
    figure, axes = panels(2 if has_needles else 1, height=4.6)
    _draw(
        axes[0],
        styles,
        sparse,
        lambda point: point.kv_percent,
        lambda point: _at_least(point.divergence),
    )
    axes[0].set_yscale("log")
    axes[0].set_ylabel("mean KL from dense attention (nats)")
    if has_needles:
        _draw(axes[1], styles, sparse, lambda point: point.kv_percent_needles, lambda point: _percent(point.found))
        for point in frontier.points:
            if point.method == DENSE and point.found is not None:
                axes[1].axhline(100 * point.found.value, color=styles.colour(DENSE), linestyle="--", label="dense")
        score_axis(axes[1], "needles found (%)")
    for axis in axes:
        axis.set_xlabel("KV cache read per decode step, metadata included (% of dense)")
    add_legend(figure, axes)
    caption = f"{frontier.model}: divergence from dense attention, and needles found, against KV bytes read"
    said = "; ".join(_said(point) for point in sparse)
    return Picture(name, caption, f"{caption}. {said}.", figure)


def frontier_svg(picture: Picture) -> bytes:
    """Render a picture as SVG, the same bytes for the same data."""
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": picture.name, "text.parse_math": False}):
        picture.figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw(
    axis: Axes,
    styles: Styles,
    points: list[Point],
    across: Callable[[Point], float | None],
    up: Callable[[Point], float | None],
) -> None:
    drawn: list[float] = []
    for family, members in _families(points):
        line = [(x, y) for point in members if (x := across(point)) is not None and (y := up(point)) is not None]
        if not line:
            continue
        line.sort()
        axis.plot(*zip(*line, strict=True), **styles.points(family), label=family)
        if family.split()[0] == _EMPHASISED:
            axis.lines[-1].set(linewidth=2.6, zorder=3)
        drawn += [x for x, _ in line]
    if drawn:
        percent_ticks(axis, drawn)


def _families(points: list[Point]) -> Iterator[tuple[str, list[Point]]]:
    for family, members in groupby(sorted(points, key=lambda point: point.family), key=lambda point: point.family):
        yield family, list(members)


def _at_least(mean: Mean | None) -> float | None:
    return None if mean is None else max(mean.value, LEAST_DIVERGENCE)


def _percent(mean: Mean | None) -> float | None:
    return None if mean is None else 100 * mean.value


def _said(point: Point) -> str:
    parts = []
    if point.kv_percent is not None:
        parts.append(f"{point.kv_percent:.1f} % read")
    if point.divergence is not None:
        parts.append(f"KL {point.divergence.value:.4f}")
    if point.found is not None:
        parts.append(f"{100 * point.found.value:.0f} % found")
    return f"{point.name}: {', '.join(parts)}"
