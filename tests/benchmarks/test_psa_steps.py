"""PSA's whole step by implementation: its entries, what they find wrong, its launch choices, and the tables."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hf_sparse_attn_kernels import _cluster
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.psa import cluster
from op_bench import cluster_entries, psa_step_entries
from op_bench.cluster_tables import PSA_STAGES, psa_step_part
from op_bench.measure import check_entry
from op_bench.oracle import Mismatch
from op_bench.progressive_workload import make_progressive_layer
from op_bench.psa_step_entries import ON_CLUSTERS, PSA_CLUSTERS, plan_of, step_fits
from op_bench.registry import PSA_CLUSTER_STEPS, matching_entries
from op_bench.shapes import Settings, Shape
from op_bench.tune import FITS, timed_entry

from tests.benchmarks.records import LONG, entry, report

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=16, batch=2, length=1280)
SETTINGS = Settings(token_budget=512)


@pytest.fixture
def layer():
    return make_progressive_layer(SHAPE, SETTINGS, torch.device("cpu"), impl="reference")


@pytest.mark.parametrize("each", PSA_CLUSTERS.entries, ids=lambda each: each.variant)
def test_every_way_passes_the_check_and_can_be_repeated(each, layer):
    for _ in range(2):
        check_entry(each, layer)


def _with(change):
    """Return the entry of a step whose outputs are changed."""

    def run(layer, impl):
        return change(layer, *ON_CLUSTERS.run(layer, impl))

    return replace(ON_CLUSTERS, run=run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer, out, lse, order, counts: (out + 0.1, lse, order, counts), "output off by"),
        (lambda layer, out, lse, order, counts: (out, lse, order, counts - 8), "rows and heads stop elsewhere"),
        (
            lambda layer, out, lse, order, counts: (out, lse, order, counts - torch.eye(2, dtype=torch.int32)),
            "read different numbers of pages",
        ),
        (
            lambda layer, out, lse, order, counts: (out, lse, order.roll(1, dims=-1), counts),
            "progressively: the newest block is not the first",
        ),
        (
            lambda layer, out, lse, order, counts: (out, lse, order[..., [0, *range(39, 0, -1)]], counts),
            "progressively: scores in order differ",
        ),
        (
            lambda layer, *outputs: layer.values[:, :, -1].add_(1).sum() and outputs,
            "values do not end with the new token's",
        ),
    ],
)
def test_a_wrong_step_fails(change, message, layer):
    with pytest.raises(Mismatch, match=message):
        check_entry(_with(change), layer)


def test_what_lies_behind_the_pages_read_may_be_anything(layer):
    def poison(layer, out, lse, order, counts):
        order[..., int(counts.max()) :] = -7
        return out, lse, order, counts

    check_entry(_with(poison), layer)


def test_the_op_is_measured_and_tuned():
    assert tuple(matching_entries(["progressive_step"])) == PSA_CLUSTERS.entries
    assert timed_entry("progressive_step") is ON_CLUSTERS
    assert tuning.CANDIDATES["progressive_step"][-1] == {"cluster": 0, "threads": 512}
    assert PSA_CLUSTERS.shapes_of(quick=True)
    assert not set(PSA_CLUSTERS.more_tuned) & set(PSA_CLUSTERS.shapes)


def test_a_choice_fits_if_its_own_clusters_run(layer, monkeypatch):
    assert plan_of(layer) is None  # of another dtype and head_dim than clusters serve
    plans = {8: SimpleNamespace(cluster=8), 12: SimpleNamespace(cluster=16)}
    monkeypatch.setattr(
        psa_step_entries,
        "plan_of",
        lambda layer: plans.get(tuning.choice("progressive_step", torch.device("cpu"))["cluster"]),
    )
    assert [blocks for blocks in (0, 4, 8, 12) if step_fits(None, {"cluster": blocks, "threads": 256})] == [0, 8]
    assert FITS["progressive_step"] is step_fits


def test_the_plan_is_asked_for_with_the_arguments_of_the_step(layer, monkeypatch):
    plan, asked = _cluster.Plan(None, 8, 512, 1, 2, 99), []
    monkeypatch.setattr(cluster, "limit", lambda *tensors, **options: asked.append(options))
    monkeypatch.setattr(cluster, "plan_of", lambda query, keys, pages, *more: plan if pages == 40 else None)
    assert plan_of(layer) is plan
    monkeypatch.undo()
    assert asked[0]["by_name"] is False
    bounds = layer.bounds["int8"]
    tensors = (layer.query, layer.new_key, layer.new_value, layer.keys, layer.values)
    limits = cluster.limit(*tensors, bounds.page_min, bounds.page_max, layer.seq_start, layer.seq_end, **asked[0])
    assert "head_dim=16 of query" in str(limits)


def test_records_have_the_hosts_time(layer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cluster_entries, "HOST_CALLS", 1)
    for each in PSA_CLUSTERS.entries:
        details = each.details([layer])
        assert details["host_us"]["samples"] == cluster_entries.HOST_ROUNDS
        assert details.get("launch") is details.get("stages") is None


def test_the_enumeration_of_stages_agrees_with_the_kernel_and_the_text():
    source = (tuning.TUNED.parent / "psa/cluster.cu").read_text()
    listed = source.partition("enum class Stage {")[2].partition("}")[0]
    assert [name.strip().lower() for name in listed.split(",")] == ["start", *cluster.STAGES]
    assert all(f"`{stage}`" in PSA_STAGES for stage in cluster.STAGES)


def test_the_tables():
    launch = {"cluster": 8, "threads": 512, "shared_bytes": 1, "clusters_at_once": 16}
    stages = {"median": dict.fromkeys(cluster.STAGES, 1234.0), "max": {}, "whole": 4000.0}
    both = [
        {**entry(LONG, time, 100.0), "op": op, "variant": variant, **more}
        for (op, variant), time, more in zip(
            PSA_CLUSTER_STEPS, (20.0, 25.0), ({"launch": launch, "stages": stages}, {}), strict=True
        )
    ]
    text = "\n".join(psa_step_part(report(*both)))
    assert "## Progressive Sparse Attention's step in one launch" in text
    assert "| 8 x 512 | 20.0 | 5.00 | 25.0 | 4.00 |" in text
    assert text.count("1,234") == len(cluster.STAGES)
    assert psa_step_part(report(both[0])) == []


@pytest.mark.gpu
def test_clusters_pass_the_check_on_a_device_and_have_clocks():
    device = torch.device("cuda")
    layers = [make_progressive_layer(Shape(32, 8, 128, 1, 8192), Settings(), device, seed) for seed in range(2)]
    fitting = [each for each in tuning.CANDIDATES["progressive_step"] if each["cluster"] and step_fits(layers[0], each)]
    if not fitting:
        pytest.skip("needs CUDA with clusters")
    for launch in fitting:
        with tuning.forced(progressive_step=launch):
            check_entry(ON_CLUSTERS, layers[0])
            details = ON_CLUSTERS.details(layers)
        assert details["launch"]["cluster"] == launch["cluster"]
        assert all(details["stages"]["median"][stage] >= 0 for stage in cluster.STAGES)
