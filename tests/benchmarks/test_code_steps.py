"""KeyCodes' whole step by implementation: its entries, the stages' clocks, the kernels to compile, and the tables."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hf_sparse_attn_kernels import _cluster
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.codes import cluster
from op_bench import cluster_entries, code_step_entries, performance, registry, results
from op_bench.cluster_entries import CLUSTERS
from op_bench.cluster_tables import code_step_part
from op_bench.code_entries import run_step
from op_bench.code_step_entries import CODE_CLUSTERS, CODE_CLUSTERS_ON_TEXT, QUEST_BESIDE, STEPS, step_fits
from op_bench.code_workload import make_code_layer
from op_bench.measure import check_entry
from op_bench.oracle import Mismatch
from op_bench.registry import CLUSTER_STEPS, CODE_STEPS, KEYCODES_STEP, QUEST_BESIDE_CODES, matching_entries
from op_bench.shapes import CLUSTER_SHAPES, CODE_SHAPES, Settings, Shape

from tests.benchmarks.records import LONG, SHORT, entry, report

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=16, batch=2, length=640)
SETTINGS = Settings(code_budget=128)


@pytest.fixture
def layer():
    return make_code_layer(SHAPE, SETTINGS, torch.device("cpu"), impl="reference")


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cluster_entries, "HOST_CALLS", 1)


@pytest.mark.parametrize("each", CODE_CLUSTERS.entries, ids=lambda each: each.variant)
def test_every_way_passes_the_check_and_can_be_repeated(each, layer):
    for _ in range(2):
        check_entry(each, layer)


def test_a_step_that_does_not_append_fails(layer):
    def run(layer, impl):
        layer.keys[:, :, -1] = layer.new_key
        outputs = run_step("max", layer, impl)
        layer.values[:, :, -1, 3] += 1
        return outputs

    with pytest.raises(Mismatch, match="values do not end with the new token's"):
        check_entry(replace(STEPS["max"][0], run=run), layer)


def test_the_op_is_measured_where_key_codes_and_clusters_are():
    assert matching_entries(["code_step"]) == [
        *CODE_CLUSTERS.entries,
        *CODE_CLUSTERS_ON_TEXT.entries,
        QUEST_BESIDE,
    ]
    assert {KEYCODES_STEP[1], *CODE_STEPS} == {"softmax", "max"}
    assert set(CLUSTER_SHAPES) < set(CODE_CLUSTERS.shapes) < set(CODE_SHAPES)
    tuned = {*CODE_CLUSTERS.shapes, *CODE_CLUSTERS.more_tuned}
    assert tuned == {shape for shape in CODE_SHAPES if shape.head_dim == cluster.HEAD_DIM}


def test_without_clusters_a_record_says_so_and_has_the_hosts_time(layer, no_device):
    for each in CODE_CLUSTERS.entries:
        details = each.details([layer])
        assert details["host_us"]["samples"] == cluster_entries.HOST_ROUNDS
        assert details.get("launch") is details.get("stages") is None


@pytest.mark.parametrize(("group_reduce", "is_clocked"), [("softmax", True), ("max", False)])
def test_on_clusters_a_record_has_the_launch_and_the_stages_of_softmax(
    group_reduce, is_clocked, layer, no_device, monkeypatch
):
    forced, size = [], _cluster.CLOCKS_STRIDE
    blocks = 3 * SHAPE.batch * SHAPE.kv_heads

    def read(name, bytes_read):
        assert (name, bytes_read) == ("stage_clocks", 8 * size * blocks)
        return torch.arange(blocks * size, dtype=torch.int64).mul(10).numpy().tobytes()

    def capture(step):
        forced.append(tuning.choice("code_step", torch.device("cpu")))
        assert len(step()) == 1
        return SimpleNamespace(replay=lambda: None), None

    plan = _cluster.Plan(SimpleNamespace(read=read), 3, 256, 61696, 4, 39)
    monkeypatch.setattr(code_step_entries, "plan_of", lambda reduction, layer: plan)
    monkeypatch.setattr(cluster_entries.timing, "capture", capture)
    details = STEPS[group_reduce][0].details([layer])
    assert details["launch"] == {"cluster": 3, "threads": 256, "shared_bytes": 61696, "clusters_at_once": 39}
    assert forced == [{"cluster": 3, "threads": 256, "clocks": 1}] * is_clocked
    assert (details["stages"] or {}).get("median") == (dict.fromkeys(cluster.STAGES, 10) if is_clocked else None)


def test_the_plan_is_asked_for_with_the_arguments_of_the_step(layer, monkeypatch):
    plan = _cluster.Plan(None, 8, 512, 1, 2, 99)
    asked = []
    monkeypatch.setattr(cluster, "limit", lambda *tensors, **options: asked.append(options))
    monkeypatch.setattr(cluster, "plan_of", lambda query, keys, tokens, *choices: plan if tokens == 704 else None)
    assert code_step_entries.plan_of("max", layer) is plan
    monkeypatch.undo()
    assert asked[0]["by_name"] is False
    assert asked[0]["max_tokens"] == SETTINGS.code_budget
    tensors = (layer.query, layer.new_key, layer.new_value, layer.keys, layer.values)
    assert "head_dim=16 of query" in str(cluster.limit(*tensors, **asked[0]))


def test_a_choice_fits_if_its_own_clusters_run(monkeypatch):
    plans = {8: SimpleNamespace(cluster=8), 12: SimpleNamespace(cluster=16)}

    def plan_of(group_reduce, layer):
        return plans.get(tuning.choice("code_step", torch.device("cpu"))["cluster"])

    monkeypatch.setattr(code_step_entries, "plan_of", plan_of)
    assert [blocks for blocks in (0, 5, 8, 12) if step_fits(None, {"cluster": blocks, "threads": 256})] == [0, 8]


def test_the_kernels_that_the_shapes_choose_are_compiled_and_those_of_softmax_with_clocks_too(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cluster_entries, "compile_kernels", lambda *arguments: compiled.append(arguments))
    monkeypatch.setattr(cluster, "choice_of", lambda device, *shape: {"cluster": 8 * (shape[0] == 8), "threads": 512})
    CODE_CLUSTERS.setup()
    ((sources, kernels, capability),) = compiled
    assert (sources, capability) == (cluster.SOURCES, (9, 0))
    assert set(kernels) == {cluster.kernel_macros(8, 512, 4, *kernel) for kernel in ((0, 0), (0, 1), (2, 0))}


def test_the_enumeration_of_stages_agrees_with_the_kernels():
    source = (tuning.TUNED.parent / "codes/cluster.cu").read_text()
    listed = source.partition("enum class Stage {")[2].partition("}")[0]
    assert [name.strip().lower() for name in listed.split(",")] == ["start", *cluster.STAGES]
    assert all(f"MARK(Stage::{stage.upper()})" in source for stage in ("start", *cluster.STAGES))
    assert len(cluster.STAGES) < _cluster.CLOCKS_STRIDE
    assert "CLOCKS" not in dict(cluster.kernel_macros(8, 512, 4))


def _measured(*reductions):
    stages = {"median": {"query": 1234.0, "scan": 10.0}, "max": {}, "whole": 4000.0}
    launch = {"cluster": 8, "threads": 512, "shared_bytes": 1, "clusters_at_once": 15}
    entries = []
    for group_reduce in reductions:
        on_clusters, launches = (
            entry(LONG, us, 100.0, *step) for step, us in zip(CODE_STEPS[group_reduce], (20.0, 25.0), strict=True)
        )
        entries += [on_clusters | {"launch": launch, "stages": stages if group_reduce == "softmax" else None}, launches]
    return report(*entries)


def test_tables_show_both_ways_by_reduction_and_the_clocks():
    text = "\n".join(code_step_part(_measured("softmax", "max")))
    cells = "| 32/8 | 128 | 1 | 32K | 8 x 512 | 20.0 | 5.00 | 25.0 | 4.00 | 100.0 | SDPA cuDNN | - | - |"
    assert text.count(cells) == 2
    assert text.index('`"softmax"`') < text.index(cells) < text.index('`"max"`')
    assert "| 32/8 | 128 | 1 | 32K | 1,234 | 10 | 4,000 |" in text
    alone = "\n".join(code_step_part(_measured("max")))
    assert alone.count(cells) == 1
    assert "softmax" not in alone
    assert "Cycles" not in alone
    assert code_step_part(report(entry(SHORT, 20.0, 100.0))) == []


def test_the_page_has_the_tables_once_there_are_results(tmp_path):
    folder = tmp_path / "kernels/benchmarks/results"
    folder.mkdir(parents=True)
    title = "## KeyCodes' step in one launch, NVIDIA H200"
    results.write(report(entry(SHORT, 20.0, 100.0)), folder / "nvidia-h200.json")
    assert title not in performance.tables(tmp_path)
    results.write(_measured("softmax"), folder / "nvidia-h200.json")
    page = performance.tables(tmp_path)
    assert title in page
    assert "Quest, NVIDIA H200" not in page  # whose step was not measured


@pytest.mark.gpu
@pytest.mark.parametrize("group_reduce", STEPS)
def test_a_step_on_clusters_passes_and_its_stages_add_up(group_reduce):
    device = torch.device("cuda")
    layers = [CODE_CLUSTERS.make_layer(Shape(32, 8, 128, 1, 8192), Settings(), device, seed) for seed in range(2)]
    launch = {"cluster": 8, "threads": 256}
    with tuning.forced(code_step=launch):
        if not step_fits(layers[0], launch):
            pytest.skip("needs CUDA with clusters")
        check_entry(STEPS[group_reduce][0], layers[0])
        details = STEPS[group_reduce][0].details(layers)
    assert details["launch"]["cluster"] == 8
    if group_reduce == "softmax":
        medians = details["stages"]["median"]
        assert all(0 <= cycles < 1e6 for cycles in medians.values())
        assert 0.5 * details["stages"]["whole"] < sum(medians.values()) < 2 * details["stages"]["whole"]


def test_quests_step_beside_reads_as_many_tokens():
    (family,) = (each for each in registry.FAMILIES if QUEST_BESIDE in each.entries)
    shape, settings = SHAPE, replace(SETTINGS, token_budget=64)
    layer = family.make_layer(shape, settings, torch.device("cpu"), 1, "reference")
    assert layer.settings == replace(settings, token_budget=128)
    check_entry(QUEST_BESIDE, layer)
    fewer = family.step_bytes(shape, settings), QUEST_BESIDE.moved_bytes(shape, settings)
    assert fewer == (CLUSTERS.step_bytes(shape, layer.settings),) * 2 > (CLUSTERS.step_bytes(shape, settings),) * 2


def test_the_table_beside_quest_names_both_budgets():
    steps = (QUEST_BESIDE_CODES, CLUSTER_STEPS[0], CODE_STEPS["softmax"][0], CODE_STEPS["max"][0])
    entries = [entry(LONG, us, 100.0, *step) for step, us in zip(steps, (10.0, 20.0, 30.0, 15.0), strict=True)]
    whole = report(*entries)
    whole["settings"]["code_budget"] = 1024
    text = "\n".join(code_step_part(whole))
    assert "| 32/8 | 128 | 1 | 32K | 10.0 | 20.0 | 3.00 | 1.50 | 1.50 | 0.75 |" in text
    assert "reads 1,024 single tokens" in text
    without = "\n".join(code_step_part(whole | {"entries": [entries[0], *entries[2:]]}))
    assert "| 32/8 | 128 | 1 | 32K | 10.0 | - | 3.00 | - | 1.50 | - |" in without
    assert code_step_part(whole | {"entries": entries[1:]}) == []
