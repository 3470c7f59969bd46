"""Tables of Quest's whole step on clusters and as separate launches."""

from __future__ import annotations

from op_bench.registry import CLUSTER_STEPS
from op_bench.results import Record, shape_of
from op_bench.tables import by_shape, measured_with, shape_cells, table

NAMES = ("q/kv heads", "head dim", "batch", "length")
COLUMNS = (
    "clusters of",
    "µs",
    "ratio",
    "separate launches, µs",
    "ratio",
    "best dense, µs",
    "which",
    "host: clusters, µs",
    "host: separate launches, µs",
)


def cluster_part(report: Record) -> list[str]:
    """Return the tables of the step by implementation and of the stages' clocks, empty if none was measured."""
    measured = sorted((entry for entry in report["entries"] if entry["times"]), key=by_shape)
    clusters, launches = (
        {shape_of(entry): entry for entry in measured if (entry["op"], entry["variant"]) == step}
        for step in CLUSTER_STEPS
    )
    both = [shape for shape in clusters if shape in launches]
    if not both:
        return []
    steps = [by_way[shape] for shape in both for by_way in (clusters, launches)]
    parts = [
        f"## Quest's step in one launch, {report['machine']['device']}\n",
        'The same step on thread-block clusters, the default, and as separate launches (`impl="triton"`), in one run '
        'with the best dense kernel: medians inside a CUDA graph of several layers. "Clusters of" gives the blocks of '
        "a cluster and the threads of a block; without them, separate launches were chosen. A ratio is dense "
        "attention's time over the step's. The host's time is that of one uncompiled call.\n",
        f"Measured with {measured_with(report, steps)}.\n",
        table((*NAMES, *COLUMNS), [[*shape_cells(shape), *_cells(clusters[shape], launches[shape])] for shape in both]),
    ]
    clocked = [entry for entry in clusters.values() if entry.get("stages")]
    return [*parts, *_stage_part(clocked)] if clocked else parts


def _cells(clusters: Record, launches: Record) -> list[str]:
    launch = clusters.get("launch")
    cells = [f"{launch['cluster']} x {launch['threads']}" if launch else "-"]
    for entry in (clusters, launches):
        against = entry["against"]["layers"] if entry["against"] else None
        cells += [f"{entry['times']['layers']['median']:.1f}", f"{against['ratio']:.2f}" if against else "-"]
    cells += [f"{against['best_us']:.1f}", against["best"]] if against else ["-", "-"]
    hosts = (entry.get("host_us") for entry in (clusters, launches))
    return [*cells, *(f"{host['median']:.0f}" if host else "-" for host in hosts)]


def _stage_part(entries: list[Record]) -> list[str]:
    stages = list(entries[0]["stages"]["median"])
    rows = [
        [
            *shape_cells(shape_of(entry)),
            *(f"{entry['stages']['median'][stage]:,.0f}" for stage in stages),
            f"{entry['stages']['whole']:,.0f}",
        ]
        for entry in entries
    ]
    return [
        "Cycles of each stage of the step on clusters, medians over the blocks, and of the slowest block as a whole. "
        "The kernel that is timed above does not store them.\n",
        table((*NAMES, *stages, "whole"), rows),
        "The stages: `query` loads the query and makes whole numbers of it; `scores` scores pages and appends the "
        "token; `exchange` shares the log-sum-exp of the heads; `keys` reduces scores over the group; `edge` finds the "
        "bin of the last chosen page; `list` sends the chosen pages to the blocks; `rank` ranks the candidates; "
        "`attend` attends to the pages; `merge` shares the partial outputs; `write` adds them up.\n",
    ]
