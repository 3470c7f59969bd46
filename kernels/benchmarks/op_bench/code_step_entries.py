"""KeyCodes' whole step on thread-block clusters and as separate launches, by both reductions over a group."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from hf_sparse_attn_kernels._cluster import Plan
from hf_sparse_attn_kernels.codes import cluster

from op_bench import oracle
from op_bench.cluster_entries import CLUSTERS, ON_CLUSTERS, cluster_details, compile_chosen, host_times, plan_fits
from op_bench.code_entries import check_step, run_step, step_bytes
from op_bench.code_workload import CodedLayer, code, code_layer_bytes, make_code_layer
from op_bench.dense import fast_backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import (
    CODE_STEP_SHAPES,
    CODE_STEP_TUNED_SHAPES,
    QUICK_CODE_SHAPES,
    TEXT_SHAPES,
    Settings,
    Shape,
)
from op_bench.text_like import on_text

REDUCTIONS = ("softmax", "max")
"""Reductions over a group; the first is the method's default, whose stages are clocked."""
CORRECTION = "unbiased"
"""The default of the op; times of the others are the same but for a page that fills."""


def _run_launches(group_reduce: str, layer: CodedLayer, impl: str | None) -> Outputs:
    return run_step(group_reduce, layer, impl or ("triton" if layer.query.is_cuda else None))


def take_newest_token_away(layer: CodedLayer) -> None:
    """Spoil what a step writes: its token in the buffers, and the counter."""
    layer.keys[:, :, -1] = float("nan")
    layer.values[:, :, -1] = float("nan")
    layer.counter.zero_()


def _check(group_reduce: str, layer: CodedLayer, outputs: Outputs) -> None:
    oracle.check_appended(layer)
    check_step(group_reduce, layer, outputs)


def plan_of(group_reduce: str, layer: CodedLayer) -> Plan | None:
    """Return how a layer's step is launched by default, or None if it runs as separate launches."""
    tensors = (layer.query, layer.new_key, layer.new_value, layer.keys, layer.values)
    choice = {"max_tokens": layer.settings.code_budget, "num_tokens": None}
    options = {**layer.code_options, **choice, "group_reduce": group_reduce}
    options |= {"correction": CORRECTION, "by_name": False}
    state = {**layer.codes, **layer.row_bounds, "coded": layer.coded}
    if cluster.limit(*tensors, **state, **options) is not None:
        return None
    plan = cluster.plan_of(layer.query, layer.keys, layer.codes["codes"].shape[2], group_reduce, CORRECTION)
    return plan if isinstance(plan, Plan) else None


def step_fits(layer: CodedLayer, choice: dict[str, int]) -> bool:
    """Return whether a choice's clusters serve a layer's step and all run at once; separate launches always fit."""
    return plan_fits("code_step", partial(plan_of, REDUCTIONS[0]), layer, choice)


def _details_of_clusters(group_reduce: str, layers: list[Any]) -> dict[str, Any]:
    stages = cluster.STAGES if group_reduce == REDUCTIONS[0] else ()
    entry = STEPS[group_reduce][0]
    return cluster_details("code_step", entry, layers, partial(plan_of, group_reduce), stages)


def _details_of_launches(group_reduce: str, layers: list[Any]) -> dict[str, Any]:
    return {"host_us": host_times(STEPS[group_reduce][1], layers[0])}


def _of_reduction(group_reduce: str) -> tuple[Entry, Entry]:
    on_clusters = Entry(
        "code_step",
        f"{group_reduce}, clusters",
        partial(run_step, group_reduce),
        partial(_check, group_reduce),
        step_bytes,
        prepare=take_newest_token_away,
        against_dense=True,
        details=partial(_details_of_clusters, group_reduce),
    )
    launches = replace(
        on_clusters,
        variant=f"{group_reduce}, separate launches",
        run=partial(_run_launches, group_reduce),
        details=partial(_details_of_launches, group_reduce),
    )
    return on_clusters, launches


STEPS = {group_reduce: _of_reduction(group_reduce) for group_reduce in REDUCTIONS}
"""The step on clusters and as separate launches, by reduction."""

CODE_CLUSTERS = Family(
    "KeyCodes' whole step, on clusters and as separate launches",
    CODE_STEP_SHAPES,
    QUICK_CODE_SHAPES,
    tuple(entry for entries in STEPS.values() for entry in entries),
    make_code_layer,
    code_layer_bytes,
    step_bytes=step_bytes,
    backends=fast_backends,
    more_tuned=CODE_STEP_TUNED_SHAPES,
    setup=partial(
        compile_chosen, cluster, CODE_STEP_SHAPES, [cluster.REDUCTIONS[group_reduce] for group_reduce in REDUCTIONS]
    ),
)
CODE_CLUSTERS_ON_TEXT = on_text(CODE_CLUSTERS, TEXT_SHAPES, code)


def _as_many_tokens(settings: Settings) -> Settings:
    return replace(settings, token_budget=settings.code_budget)


def _make_quest_layer(shape: Shape, settings: Settings, *options: Any) -> Any:
    return CLUSTERS.make_layer(shape, _as_many_tokens(settings), *options)


QUEST_BESIDE = replace(
    ON_CLUSTERS,
    op="code_step",
    variant="Quest, as many tokens",
    moved_bytes=lambda shape, settings: ON_CLUSTERS.moved_bytes(shape, _as_many_tokens(settings)),
    details=lambda layers: {},
)
QUEST_WITH_AS_MANY_TOKENS = replace(
    CLUSTERS,
    name="Quest's whole step, which reads as many tokens as KeyCodes'",
    shapes=CODE_STEP_SHAPES,
    quick_shapes=QUICK_CODE_SHAPES,
    entries=(QUEST_BESIDE,),
    make_layer=_make_quest_layer,
    layer_bytes=lambda shape, settings: CLUSTERS.layer_bytes(shape, _as_many_tokens(settings)),
    step_bytes=lambda shape, settings: CLUSTERS.step_bytes(shape, _as_many_tokens(settings)),
    more_tuned=(),
)
