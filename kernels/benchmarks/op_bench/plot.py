"""Latency against length: the step beside dense attention, one panel per configuration."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from op_bench.registry import STEP, TOKEN_STEPS
from op_bench.results import OURS, Record, shape_of

WAY = "layers"


def series(report: Record) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Points (length, µs) of every line of every configuration of decode steps."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    lines = [
        (", ".join(step), record)
        for step in (STEP, *TOKEN_STEPS)
        for record in report["entries"]
        if (record["op"], record["variant"]) == step
    ]
    lines += [(OURS, record) for record in report["entries"] if record["op"] == "dense_decode"]
    lines += [(record["backend"], record) for record in report["dense"]]
    for name, record in lines:
        shape = shape_of(record)
        if record["times"] and shape.queries == 1:
            panels[shape.configuration][name].append((shape.length, record["times"][WAY]["median"]))
    return {panel: {name: sorted(points) for name, points in found.items()} for panel, found in panels.items()}


def write_plot(report: Record, path: Path) -> bool:
    """Draw a report's figure; return False where there is no matplotlib or nothing to draw."""
    panels = series(report)
    try:
        import matplotlib
    except ImportError:
        return False
    if not panels:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    palette = pyplot.get_cmap("tab20").colors
    colours = {name: palette[index % len(palette)] for index, name in enumerate(names)}
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, lines) in zip(grid.flat, panels.items(), strict=False):
        for name, points in lines.items():
            is_step = name.startswith(("quest_step", "tokenselect_step"))
            style = {"linewidth": 2.2, "marker": "o"} if is_step else {"linewidth": 1.2, "marker": "."}
            axes.plot(*zip(*points, strict=True), label=name, color=colours[name], **style)
        lengths = sorted({length for points in lines.values() for length, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
        axes.set_title(panel, fontsize=9)
        axes.yaxis.set_tick_params(labelleft=True)
        axes.grid(True, which="both", alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("µs per layer")
    handles = {
        label: handle
        for axes in grid.flat[: len(panels)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"One decode step of one layer, {report['machine']['device']}", fontsize=11)
    figure.tight_layout(rect=(0, 0.06 + 0.04 / rows, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return True
