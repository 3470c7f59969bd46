"""Progressive Sparse Attention's whole step on thread-block clusters and as separate launches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import hf_sparse_attn_kernels as ops
from hf_sparse_attn_kernels._cluster import Plan
from hf_sparse_attn_kernels.psa import cluster

from op_bench import oracle
from op_bench.cluster_entries import cluster_details, compile_chosen, host_times, plan_fits
from op_bench.dense import fast_backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.progressive_entries import KIND, check_decode, check_order, metadata_bytes, rank, step_bytes
from op_bench.progressive_workload import make_progressive_layer, progressive_layer_bytes
from op_bench.quest_entries import take_newest_token_away
from op_bench.shapes import CLUSTER_SHAPES, PROGRESSIVE_SHAPES, QUICK_CLUSTER_SHAPES
from op_bench.workload import STATISTICS, Layer

LAUNCH = "progressive_step"
"""The launch choice, and the op by which the entries are named."""
REDUCTION = "softmax"
"""The default of the op."""


def _run(layer: Layer, impl: str | None) -> Outputs:
    settings, bounds = layer.settings, layer.bounds[KIND]
    step: Outputs = ops.append_and_attend_progressively(
        layer.query,
        layer.new_key,
        layer.new_value,
        layer.keys,
        layer.values,
        bounds.page_min,
        bounds.page_max,
        layer.seq_start,
        layer.seq_end,
        page_size=settings.page_size,
        microbatch=settings.microbatch,
        threshold=settings.threshold,
        group_reduce=REDUCTION,
        **bounds.exponents,
        counter=layer.counter,
        finished=layer.finished,
        statistic=STATISTICS[KIND],
        impl=impl,
    )
    return step


def _run_launches(layer: Layer, impl: str | None) -> Outputs:
    return _run(layer, impl or ("triton" if layer.query.is_cuda else None))


def _check(layer: Layer, outputs: Outputs) -> None:
    """Check the token and its page's bounds, the pages read in their order, where the reading stopped, and the output.

    What lies behind the pages read is any order, so the reference's stands in for it.
    """
    out, _, order, read_counts = outputs
    oracle.check_appended(layer)
    oracle.check_step_bounds(layer, KIND)
    scores = oracle.reference_scores(layer, KIND)
    expected, _ = rank(layer, scores, "reference")
    most = int(read_counts.max())
    if not bool((read_counts == most).all()):
        raise oracle.Mismatch("append_and_attend_progressively: rows and heads read different numbers of pages")
    check_order("append_and_attend_progressively", scores, order[..., :most], expected[..., :most])
    check_decode(layer, (out, read_counts), expected, metadata_bytes(layer), read=order)


def plan_of(layer: Layer) -> Plan | None:
    """Return how a layer's step is launched by default, or None if it runs as separate launches."""
    bounds, settings = layer.bounds[KIND], layer.settings
    tensors = (layer.query, layer.new_key, layer.new_value, layer.keys, layer.values)
    options = {"page_size": settings.page_size, "microbatch": settings.microbatch, "num_pages": None}
    options |= {"group_reduce": REDUCTION, "statistic": STATISTICS[KIND], "by_name": False}
    rows = (layer.seq_start, layer.seq_end)
    if cluster.limit(*tensors, bounds.page_min, bounds.page_max, *rows, **options) is not None:
        return None
    plan = cluster.plan_of(layer.query, layer.keys, bounds.page_min.shape[2], REDUCTION, settings.microbatch)
    return plan if isinstance(plan, Plan) else None


def step_fits(layer: Layer, choice: dict[str, int]) -> bool:
    """Return whether a choice's clusters serve a layer's step and all run at once; separate launches always fit."""
    return plan_fits(LAUNCH, plan_of, layer, choice)


def _details_of_clusters(layers: list[Any]) -> dict[str, Any]:
    return cluster_details(LAUNCH, ON_CLUSTERS, layers, plan_of, cluster.STAGES)


def _details_of_launches(layers: list[Any]) -> dict[str, Any]:
    return {"host_us": host_times(LAUNCHES, layers[0])}


ON_CLUSTERS = Entry(
    LAUNCH,
    "clusters",
    _run,
    _check,
    step_bytes,
    prepare=partial(take_newest_token_away, KIND),
    against_dense=True,
    details=_details_of_clusters,
)
LAUNCHES = replace(ON_CLUSTERS, variant="separate launches", run=_run_launches, details=_details_of_launches)

PSA_CLUSTERS = Family(
    "Progressive Sparse Attention's whole step, on clusters and as separate launches",
    CLUSTER_SHAPES,
    QUICK_CLUSTER_SHAPES,
    (ON_CLUSTERS, LAUNCHES),
    make_progressive_layer,
    progressive_layer_bytes,
    step_bytes=step_bytes,
    backends=fast_backends,
    more_tuned=tuple(shape for shape in PROGRESSIVE_SHAPES if shape not in CLUSTER_SHAPES),
    setup=partial(compile_chosen, cluster, CLUSTER_SHAPES),
)
