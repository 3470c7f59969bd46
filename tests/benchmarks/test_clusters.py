"""Quest's whole step by implementation: its entries, the stages' clocks, the host's time, and the tables."""

from types import SimpleNamespace

import pytest
import torch
from hf_sparse_attn_kernels import _cluster, _nvrtc
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.quest import cluster
from op_bench import cluster_compile, cluster_entries, performance, results
from op_bench.cluster_entries import CLUSTERS, KIND, ON_CLUSTERS
from op_bench.cluster_tables import cluster_part
from op_bench.measure import check_entry
from op_bench.registry import CLUSTER_STEPS
from op_bench.shapes import Settings, Shape
from op_bench.workload import layer_bytes

from tests.benchmarks.records import LONG, SHORT, entry, report

SHAPE = Shape(q_heads=4, kv_heads=2, head_dim=16, batch=2, length=96)
SETTINGS = Settings(token_budget=48)


def new_layer():
    return CLUSTERS.make_layer(SHAPE, SETTINGS, torch.device("cpu"), 0)


@pytest.mark.parametrize("each", CLUSTERS.entries, ids=lambda each: each.variant)
def test_both_ways_pass_the_check_with_the_bounds_that_they_read(each):
    layer = new_layer()
    assert list(layer.bounds) == [KIND]
    assert CLUSTERS.layer_bytes(SHAPE, SETTINGS) < layer_bytes(SHAPE, SETTINGS)
    for _ in range(2):
        check_entry(each, layer)


def test_without_clusters_a_record_says_so_and_has_the_hosts_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cluster_entries, "HOST_CALLS", 1)
    clusters, launches = (each.details([new_layer()]) for each in CLUSTERS.entries)
    assert clusters["launch"] is None
    assert clusters["stages"] is None
    for details in (clusters, launches):
        assert details["host_us"]["samples"] == cluster_entries.HOST_ROUNDS
        assert 0 < details["host_us"]["min"] <= details["host_us"]["median"]


def test_on_clusters_a_record_has_the_launch_and_the_stages(monkeypatch):
    forced, replayed = [], []
    size = _cluster.CLOCKS_STRIDE

    def read(name, bytes_read):
        assert (name, bytes_read) == ("stage_clocks", 8 * size * blocks)
        return torch.arange(blocks * size, dtype=torch.int64).mul(10).numpy().tobytes()

    def capture(step):
        forced.append(tuning.choice("cluster_step", torch.device("cpu")))
        assert len(step()) == 2
        return SimpleNamespace(replay=lambda: replayed.append(1)), None

    plan = cluster.Plan(SimpleNamespace(read=read), 3, 256, 61696, 128, 39)
    blocks = 3 * SHAPE.batch * SHAPE.kv_heads
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cluster_entries, "HOST_CALLS", 1)
    monkeypatch.setattr(cluster_entries, "plan_of", lambda layer: plan)
    monkeypatch.setattr(cluster_entries.timing, "capture", capture)
    details = ON_CLUSTERS.details([new_layer(), new_layer()])
    assert details["launch"] == {"cluster": 3, "threads": 256, "shared_bytes": 61696, "clusters_at_once": 39}
    assert forced == [{"cluster": 3, "threads": 256, "clocks": 1}]
    assert len(replayed) == cluster_entries.REPLAYS
    assert details["stages"]["median"] == dict.fromkeys(cluster.STAGES, 10)


def test_cycles_are_medians_of_what_the_blocks_took():
    stages = len(cluster.STAGES)
    slow = tuple(1000 + 30 * number for number in range(stages + 1))
    fast = tuple(7 + 10 * number for number in range(stages + 1))
    found = cluster_entries.stage_record(cluster.STAGES, [[slow, fast, fast], [fast, slow, fast]])
    assert found["median"] == dict.fromkeys(cluster.STAGES, 10)
    assert found["max"] == dict.fromkeys(cluster.STAGES, 30)
    assert found["whole"] == 30 * stages


def test_clocks_are_read_for_each_block():
    size = _cluster.CLOCKS_STRIDE
    stored = torch.arange(3 * size, dtype=torch.int64).numpy().tobytes()
    plan = SimpleNamespace(kernel=SimpleNamespace(read=lambda name, bytes_read: stored[:bytes_read]))
    clocks = _cluster.stage_clocks(plan, 2, len(cluster.STAGES))
    assert clocks == [tuple(range(first, first + len(cluster.STAGES) + 1)) for first in (0, size)]


def test_only_benchmarks_compile_a_kernel_that_stores_clocks():
    assert "CLOCKS" not in dict(cluster.kernel_macros(8, 512, 4))
    assert dict(cluster.kernel_macros(8, 512, 4, clocks=1))["CLOCKS"] == _cluster.MOST_CLOCKED
    with tuning.forced(cluster_step={"cluster": 8, "clocks": 1}):
        assert cluster.choice_of(torch.device("cpu"), 8, 4, 1024) == {"cluster": 8, "threads": 512, "clocks": 1}


def test_every_kernel_is_compiled_by_one_of_the_processes(monkeypatch):
    compiled = []
    monkeypatch.setattr(cluster_compile, "compiled", lambda *arguments: compiled.append(arguments))
    monkeypatch.setattr(cluster_compile.os, "sched_getaffinity", lambda process: {0, 1})
    waited = []

    def run(command, env):
        assert command[1:3] == ["-m", "op_bench.cluster_compile"]
        cluster_compile.main(command[3])
        return SimpleNamespace(wait=lambda: waited.append(command))

    monkeypatch.setattr(cluster_compile.subprocess, "Popen", run)
    kernels = [cluster.kernel_macros(blocks, 256, 4) for blocks in (2, 4, 8, 2)]
    cluster_compile.compile_kernels(cluster.SOURCES, kernels, (9, 0))
    assert len(waited) == 2
    assert sorted(compiled) == sorted((cluster.SOURCES, (9, 0), macros) for macros in kernels[:3])


def test_without_nvrtc_a_process_compiles_nothing_and_ends(monkeypatch):
    def fail(*arguments):
        raise _nvrtc.CudaError("libnvrtc.so.99 is not found")

    monkeypatch.setattr(cluster_compile, "compiled", fail)
    cluster_compile.main("[[], [9, 0], [[]]]")


def test_the_enumeration_of_stages_agrees_with_the_kernels():
    source = (tuning.TUNED.parent / "quest/cluster.cu").read_text()
    listed = source.partition("enum class Stage {")[2].partition("}")[0]
    assert [name.strip().lower() for name in listed.split(",")] == ["start", *cluster.STAGES]
    for stage in ("start", *cluster.STAGES):
        assert source.count(f"MARK(Stage::{stage.upper()})") == 1, stage


def test_a_choice_fits_if_its_own_clusters_run(monkeypatch):
    layer = SimpleNamespace()
    plans = {8: SimpleNamespace(cluster=8), 12: SimpleNamespace(cluster=16)}

    def plan_of(layer):
        return plans.get(tuning.choice("cluster_step", torch.device("cpu"))["cluster"])

    monkeypatch.setattr(cluster_entries, "plan_of", plan_of)
    fitting = [blocks for blocks in (0, 5, 8, 12) if cluster_entries.fits(layer, {"cluster": blocks, "threads": 256})]
    assert fitting == [0, 8]


def _measured(stages):
    short, long = (
        [entry(shape, us, 100.0, *step) for step, us in zip(CLUSTER_STEPS, (20.0, 25.0), strict=True)]
        for shape in (SHORT, LONG)
    )
    launch = {"cluster": 8, "threads": 512, "shared_bytes": 1, "clusters_at_once": 15}
    host = {"host_us": {"median": 90.4}}
    return report(
        short[0] | host | {"launch": None, "stages": None},
        short[1],
        long[0] | {"launch": launch, "stages": stages},
        long[1],
    )


def test_tables_show_both_ways_beside_dense_attention_and_the_clocks():
    stages = {"median": {"query": 1234.0, "scores": 10.0}, "max": {}, "whole": 4000.0}
    text = "\n".join(cluster_part(_measured(stages)))
    assert "| 32/8 | 128 | 1 | 8K | - | 20.0 | 5.00 | 25.0 | 4.00 | 100.0 | SDPA cuDNN | 90 | - |" in text
    assert "| 32/8 | 128 | 1 | 32K | 8 x 512 | 20.0 | 5.00 | 25.0 | 4.00 | 100.0 | SDPA cuDNN | - | - |" in text
    assert "| 32/8 | 128 | 1 | 32K | 1,234 | 10 | 4,000 |" in text
    assert "Cycles" not in "\n".join(cluster_part(_measured(None)))
    assert cluster_part(report(entry(SHORT, 20.0, 100.0))) == []


def test_the_page_has_the_tables(tmp_path):
    folder = tmp_path / "kernels/benchmarks/results"
    folder.mkdir(parents=True)
    results.write(_measured(None), folder / "nvidia-h200.json")
    assert "## Quest's step in one launch, NVIDIA H200" in performance.tables(tmp_path)


@pytest.mark.gpu
def test_the_stages_of_a_step_on_clusters_add_up_to_it():
    device = torch.device("cuda")
    layers = [CLUSTERS.make_layer(Shape(32, 8, 128, 1, 8192), Settings(), device, seed) for seed in range(2)]
    launch = {"cluster": 8, "threads": 256}
    with tuning.forced(cluster_step=launch):
        if not cluster_entries.fits(layers[0], launch):
            pytest.skip("needs CUDA with clusters")
        check_entry(ON_CLUSTERS, layers[0])
        details = ON_CLUSTERS.details(layers)
    assert details["launch"]["cluster"] == 8
    medians = details["stages"]["median"]
    assert all(0 <= cycles < 1e6 for cycles in medians.values())
    assert 0.5 * details["stages"]["whole"] < sum(medians.values()) < 2 * details["stages"]["whole"]
