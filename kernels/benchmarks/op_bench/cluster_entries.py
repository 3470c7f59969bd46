"""Quest's whole step on thread-block clusters and as separate launches: calls, host time, and clocks of the stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels._cluster import LEAST_CAPABILITY, Plan, stage_clocks
from hf_sparse_attn_kernels.quest import cluster

from op_bench import floors, timing
from op_bench.cluster_compile import compile_kernels
from op_bench.dense import fast_backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.quest_entries import check_step, run_step, take_newest_token_away
from op_bench.shapes import CLUSTER_SHAPES, CLUSTER_TUNED_SHAPES, QUICK_CLUSTER_SHAPES, TEXT_SHAPES, Shape
from op_bench.text_like import on_text
from op_bench.workload import Layer, layer_bytes, make_layer, summarize

KIND = "int8"
"""Kind of the page bounds: clusters serve no other."""
HOST_ROUNDS, HOST_CALLS = 5, 40
"""Timed rounds of calls. The calls of a round must not fill the queue of launches, which holds about a thousand."""
REPLAYS = 5
"""Replays whose clocks are read; the first does not count."""


def _run_launches(layer: Layer, impl: str | None) -> Outputs:
    return run_step(KIND, layer, impl or ("triton" if layer.query.is_cuda else None))


def plan_of(layer: Layer) -> Plan | None:
    """Return how a layer's step is launched by default, or None if it runs as separate launches."""
    bounds = layer.bounds[KIND]
    tensors = (layer.query, layer.new_key, layer.new_value, layer.keys, layer.values)
    step = {"page_size": layer.settings.page_size, "max_blocks": layer.settings.max_blocks}
    options = {"group_reduce": "softmax", "num_pages": None, "statistic": "minmax", "by_name": False, **step}
    rows = (layer.seq_start, layer.seq_end)
    if cluster.limit(*tensors, bounds.page_min, bounds.page_max, *rows, **options) is not None:
        return None
    plan = cluster.plan_of(layer.query, layer.keys, bounds.page_min.shape[2], "softmax")
    return plan if isinstance(plan, Plan) else None


def host_times(entry: Entry, layer: Layer) -> dict[str, float]:
    """Return the host's time of one uncompiled call in µs."""
    found = []
    for _ in range(HOST_ROUNDS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            entry.run(layer, None)
        found.append(1e6 * (time.perf_counter() - begin) / HOST_CALLS)
    torch.cuda.synchronize()
    return timing.quartiles(found[1:])


def compile_candidates(
    implementation: Any, device: torch.device, candidates: Iterable[tuple[int, int, dict[str, int]]]
) -> None:
    """Compile the kernels of launch choices on clusters, where clusters can run.

    Parameters
    ----------
    implementation : module
        Of a step on clusters.
    device : torch.device
        The device to compile for.
    candidates : iterable of (int, int, dict)
        Query heads per KV head, the number of the reduction over them in the kernel, and a launch choice.
    """
    kernels = [
        implementation.kernel_macros(choice["cluster"], choice["threads"], group, reduction, choice.get("clocks", 0))
        for group, reduction, choice in candidates
        if choice["cluster"]
    ]
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if kernels and capability >= LEAST_CAPABILITY:
        compile_kernels(implementation.SOURCES, kernels, capability)


def compile_chosen(implementation: Any, shapes: Iterable[Shape], reductions: Iterable[int] = (0,)) -> None:
    """Compile the kernels that shapes choose, without clocks, and with them for the first reduction."""
    device, (first, *others) = torch.device("cuda", torch.cuda.current_device()), reductions
    chosen = [
        (shape.group, implementation.choice_of(device, shape.batch * shape.kv_heads, shape.group, shape.length))
        for shape in shapes
    ]
    kernels = [(first, 0), (first, 1), *((other, 0) for other in others)]
    candidates = [
        (group, reduction, choice | {"clocks": clocks}) for group, choice in chosen for reduction, clocks in kernels
    ]
    compile_candidates(implementation, device, candidates)


def fits(layer: Layer, choice: dict[str, int]) -> bool:
    """Return whether a choice's clusters serve a layer's step and all run at once; separate launches always fit."""
    return plan_fits("cluster_step", plan_of, layer, choice)


def plan_fits(launch: str, plan_of: Callable[[Any], Plan | None], layer: Any, choice: dict[str, int]) -> bool:
    """Return whether a layer's step is launched as a choice says; separate launches always fit."""
    if not choice["cluster"]:
        return True
    with tuning.forced(**{launch: choice}):
        plan = plan_of(layer)
    return plan is not None and plan.cluster == choice["cluster"]


def _details_of_launches(layers: list[Any]) -> dict[str, Any]:
    return {"host_us": host_times(LAUNCHES, layers[0])}


def _details_of_clusters(layers: list[Any]) -> dict[str, Any]:
    return cluster_details("cluster_step", ON_CLUSTERS, layers, plan_of, cluster.STAGES)


def cluster_details(
    choice: str, entry: Entry, layers: list[Any], plan_of: Callable[[Any], Plan | None], stages: Sequence[str]
) -> dict[str, Any]:
    """Return the host's time of a step by default, its launch on clusters, if it has one, and the stages' clocks.

    Parameters
    ----------
    choice : str
        Name of the step's launch choice.
    entry : Entry
        The step.
    layers : list
        Layers of one shape.
    plan_of : callable
        Returns how a layer's step is launched, or None without clusters.
    stages : sequence of str
        Names of the kernel's stages; none if no clocks are asked for.
    """
    details = {"host_us": host_times(entry, layers[0]), "launch": None, "stages": None}
    plan = plan_of(layers[0])
    if plan is None:
        return details
    launch = {"cluster": plan.cluster, "threads": plan.threads}
    measured = {"shared_bytes": plan.shared, "clusters_at_once": plan.max_clusters}
    details |= {"launch": launch | measured}
    if not stages:
        return details
    with tuning.forced(**{choice: launch | {"clocks": 1}}):
        return details | {"stages": _stages(entry, layers, plan_of(layers[0]), stages)}


def _stages(entry: Entry, layers: list[Any], plan: Plan | None, stages: Sequence[str]) -> dict[str, Any]:
    """Return the clocks of the last layer's stages in a graph of all layers, by a kernel compiled to store them."""
    assert plan is not None
    blocks = layers[0].shape.batch * layers[0].shape.kv_heads * plan.cluster
    graph, _ = timing.capture(lambda: [entry.run(layer, None) for layer in layers])
    replays = []
    for _ in range(REPLAYS):
        graph.replay()
        replays.append(stage_clocks(plan, blocks, len(stages)))
    return stage_record(stages, replays[1:])


def stage_record(stages: Sequence[str], replays: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Return cycles of the stages from the clocks of each replay's blocks.

    Returns
    -------
    dict
        ``median`` and ``max``: by stage, over the blocks of a replay. ``whole``: most cycles of a block from its start
        to its end. All are medians over the replays.
    """
    of_stage: dict[str, list[tuple[float, float]]] = {stage: [] for stage in stages}
    whole = []
    for blocks in replays:
        for number, stage in enumerate(stages):
            cycles = [clocks[number + 1] - clocks[number] for clocks in blocks]
            of_stage[stage].append((statistics.median(cycles), max(cycles)))
        whole.append(max(clocks[-1] - clocks[0] for clocks in blocks))
    medians, most = (
        {stage: statistics.median(found[part] for found in each) for stage, each in of_stage.items()}
        for part in range(2)
    )
    return {"median": medians, "max": most, "whole": statistics.median(whole)}


ON_CLUSTERS = Entry(
    "cluster_step",
    "clusters",
    partial(run_step, KIND),
    partial(check_step, KIND),
    partial(floors.step_bytes, KIND),
    prepare=partial(take_newest_token_away, KIND),
    against_dense=True,
    details=_details_of_clusters,
)
LAUNCHES = replace(ON_CLUSTERS, variant="separate launches", run=_run_launches, details=_details_of_launches)

CLUSTERS = Family(
    "Quest's whole step, on clusters and as separate launches",
    CLUSTER_SHAPES,
    QUICK_CLUSTER_SHAPES,
    (ON_CLUSTERS, LAUNCHES),
    partial(make_layer, kinds=(KIND,)),
    partial(layer_bytes, kinds=(KIND,)),
    step_bytes=partial(floors.step_bytes, KIND),
    backends=fast_backends,
    more_tuned=CLUSTER_TUNED_SHAPES,
    setup=partial(compile_chosen, cluster, CLUSTER_SHAPES),
)
CLUSTERS_ON_TEXT = on_text(CLUSTERS, TEXT_SHAPES, summarize)
