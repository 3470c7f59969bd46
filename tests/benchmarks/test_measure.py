"""The run over shapes, on a CPU instead of a CUDA device: its records, and failures that do not end it."""

import argparse
import gc
import importlib.util
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from op_bench import cluster_entries, end_to_end, measure, oracle, quest_entries, registry, results, timing
from op_bench.dense import Backend, backends
from op_bench.entry import Entry
from op_bench.oracle import Mismatch
from op_bench.quest_entries import QUEST
from op_bench.shapes import Settings, Shape
from op_bench.token_oracle import chunk_attention

from eval import speed, speed_runs, speed_shapes
from hf_sparse_attn.patch.answer import Answer
from tests.graph_tape import use_tape

SHAPE = Shape(q_heads=4, kv_heads=2, head_dim=16, batch=2, length=96)
CHUNK = replace(SHAPE, queries=8)
SETTINGS = {
    "token_budget": 48, "sink_tokens": 4, "voted_tokens": 16, "recent_tokens": 8,
    "sparsity": 0.7, "clusters": 0.1, "window": 4, "tail_tokens": 8,
    "block_size": 8, "microbatch": 2, "code_page": 16, "code_budget": 48, "top_p_page": 16,
}  # fmt: skip
TIMES = {"min": 1.0, "q1": 1.0, "median": 2.0, "q3": 3.0, "samples": 4}


class Graph:
    """Replaces a CUDA graph: a replay runs the step again and writes to the captured outputs."""

    def __init__(self, step):
        self.step, self.outputs = step, step()

    def replay(self):
        pairs = zip(_flat(self.outputs), _flat(self.step()), strict=True)
        for captured, new in pairs:
            captured.copy_(new)


def _flat(outputs):
    return [each for part in outputs for each in (part if isinstance(part, tuple) else (part,))]


def capture(step):
    graph = Graph(step)
    return graph, graph.outputs


@pytest.fixture(autouse=True)
def cpu_for_cuda(monkeypatch):
    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "time_replay", lambda graph, budget_ms: TIMES)
    monkeypatch.setattr(timing, "time_layers", lambda graph, layers, budget_ms: TIMES)
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)  # takes longer than everything else
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (measure.RESERVED_BYTES + (1 << 20), 1 << 40))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=1 << 14))


def new_report():
    return {"entries": [], "dense": [], "skipped": []}


def run(lines=None):
    say = (lambda line: None) if lines is None else lines.append
    return measure.Run(Settings(**SETTINGS), 0, 1.0, 4e12, device="cpu", say=say)


def test_everything_is_checked_timed_and_compared():
    report, lines = new_report(), []
    measure.measure_shape(QUEST, SHAPE, QUEST.entries, run(lines), report)
    assert [record["error"] for record in report["entries"]] == [None] * len(QUEST.entries)
    assert {record["backend"] for record in report["dense"]} == {backend.name for backend in backends(SHAPE)}
    assert any(record["times"] for record in report["dense"])
    for entry, record in zip(QUEST.entries, report["entries"], strict=True):
        assert record["layers"] == 8
        assert record["times"]["layers"] == TIMES
        assert (record["against"] is not None) is entry.against_dense
    assert lines[0].startswith(f"{SHAPE.name}: 8 layers")
    assert len(lines) == 1 + len(report["entries"]) + len(report["dense"])


FAMILIES_WITH_STEPS = [each for each in registry.FAMILIES if any(entry.against_dense for entry in each.entries)]


@pytest.mark.parametrize("family", FAMILIES_WITH_STEPS[1:], ids=lambda family: family.name)
def test_the_steps_of_other_methods_are_too(family):
    def attend(layer):
        if layer.shape.queries == 1:
            return oracle.attention(layer.query, layer.keys, layer.values, torch.float32)
        return chunk_attention(layer.query, layer.keys, layer.values, torch.float32)

    shape = CHUNK if family.shapes[0].queries > 1 else SHAPE
    check = family.backends(shape)[0].check
    extended = replace(family, backends=lambda shape: [*family.backends(shape), Backend("plain", attend, check)])
    report = new_report()
    measure.measure_shape(extended, shape, extended.entries, run(), report)
    assert [record["error"] for record in report["entries"]] == [None] * len(extended.entries)
    assert {record["backend"] for record in report["dense"]} == {each.name for each in extended.backends(shape)}
    for entry, record in zip(extended.entries, report["entries"], strict=True):
        assert record["layers"] >= family.least_layers
        assert (record["against"] is not None) is entry.against_dense


def test_dense_attention_is_measured_once_for_all_families():
    report, lines = new_report(), []
    for family in registry.FAMILIES[:2]:
        measure.measure_shape(family, SHAPE, family.entries, run(lines), report)
    assert len(report["dense"]) == len(backends(SHAPE))
    [step, *_] = [record for record in report["entries"] if record["op"] == "tokenselect_step"]
    assert step["against"]["layers"]["ratio_with_ours"] == 1.0


def test_a_wrong_op_gets_no_time_and_the_others_continue(monkeypatch):
    decode = quest_entries.ops.sparse_decode
    wrong = lambda *args, **options: (decode(*args, **options)[0] + 1,)  # noqa: E731
    monkeypatch.setattr(quest_entries.ops, "sparse_decode", wrong)
    report = new_report()
    measure.measure_shape(
        QUEST, SHAPE, [entry for entry in QUEST.entries if entry.op in ("sparse_decode", "page_scores")], run(), report
    )
    errors = {record["op"]: record["error"] for record in report["entries"] if record["times"] is None}
    assert set(errors) == {"sparse_decode"}
    assert "Mismatch: output off by" in errors["sparse_decode"]


def test_a_replay_that_computes_nothing_is_found(monkeypatch):
    monkeypatch.setattr(Graph, "replay", lambda self: None)
    report = new_report()
    measure.measure_shape(QUEST, SHAPE, QUEST.entries, run(), report)
    assert all("Mismatch" in record["error"] for record in report["entries"])
    assert not any(record["times"] for record in report["dense"])


def test_data_that_cannot_be_created_is_an_error_of_every_entry():
    def broken(*args, **options):
        raise torch.OutOfMemoryError("no memory")

    report = new_report()
    measure.measure_shape(replace(QUEST, make_layer=broken), SHAPE, QUEST.entries, run(), report)
    assert {record["error"] for record in report["entries"]} == {"torch.OutOfMemoryError: no memory"}
    assert report["dense"] == []


def test_a_broken_device_ends_the_run(monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(layer, impl):
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        raise Mismatch("wrong")

    entry = Entry("page_scores", "", fail, lambda layer, outputs: None, lambda shape, settings: 1)
    with pytest.raises(measure.DeviceLostError, match="Mismatch: wrong"):
        measure.measure_shape(QUEST, SHAPE, [entry], run(), new_report())


def test_what_does_not_fit_is_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 40))
    report = new_report()
    measure.measure_shape(QUEST, SHAPE, QUEST.entries, run(), report)
    assert report["entries"] == []
    assert report["skipped"][0]["shape"]["name"] == SHAPE.name
    assert "are free" in report["skipped"][0]["reason"]


@pytest.fixture
def script(monkeypatch):
    """run.py, for the CPU and one shape."""
    path = Path(measure.__file__).parents[1] / "run.py"
    spec = importlib.util.spec_from_file_location("benchmarks_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape_of = lambda family: CHUNK if family.shapes[0].queries > 1 else SHAPE  # noqa: E731
    families = tuple(replace(family, shapes=(shape_of(family),), setup=lambda: None) for family in registry.FAMILIES)
    monkeypatch.setattr(cluster_entries, "HOST_CALLS", 1)
    for each in (module, registry):
        monkeypatch.setattr(each, "FAMILIES", families)
    monkeypatch.setattr(module, "Settings", partial(Settings, **SETTINGS))
    monkeypatch.setattr(module, "Run", partial(measure.Run, device="cpu"))
    monkeypatch.setattr(module, "copy_bytes_per_second", lambda: 4e12)
    monkeypatch.setattr(module, "host_copy_bytes_per_second", lambda: 5e10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    return module


def test_the_script_writes_compares_and_fails(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert script.main(["--op", "page_scores"]) == 0
    assert not list(tmp_path.iterdir())  # a part of a run does not replace a whole one
    assert script.main([]) == 0
    written = tmp_path / "nvidia-h200.json"
    report = json.loads(written.read_text())
    assert len(report["entries"]) == len(registry.ENTRIES)
    assert report["machine"]["command"] == "python kernels/benchmarks/run.py"

    other = ["--op", "page_scores", "--out", str(tmp_path / "other.json"), "--compare", str(written)]
    assert script.main(other) == 0
    # New measurements replace those in the file; the others stay.
    held = json.loads(written.read_text())
    assert script.main(["--op", "tokenselect_step", "--update"]) == 0
    updated = json.loads(written.read_text())
    assert [results.entry_key(entry) for entry in updated["entries"]] == [
        results.entry_key(entry) for entry in held["entries"]
    ]
    again = [entry for entry in updated["entries"] if "machine" in entry]
    assert {entry["op"] for entry in again} == {"tokenselect_step"}
    command = "python kernels/benchmarks/run.py --op tokenselect_step --update"
    assert again[0]["machine"]["command"] == command
    assert script.main(["--update", "--out", str(tmp_path / "none.json")]) == 2

    slow = {way: {**TIMES, "median": 3.0} for way in ("replay", "layers")}
    monkeypatch.setattr(timing, "time_layers", lambda graph, layers, budget_ms: slow["layers"])
    assert script.main(other) == 1
    assert "2 slower by more than 5%" in capsys.readouterr().out
    assert not (tmp_path / "other.png").exists()

    monkeypatch.setattr(Graph, "replay", lambda self: None)
    assert script.main(["--op", "select_blocks"]) == 1
    assert f"FAILED select_blocks  {SHAPE.name}: " in capsys.readouterr().err
    written.write_text(json.dumps(report | {"machine": {"device": "NVIDIA H100"}}))
    assert script.main(other) == 2
    assert "--force" in capsys.readouterr().err
    assert script.main(["--op", "topk"]) == 2


@pytest.mark.parametrize(("method", "budget"), [("quest", "64"), ("tokenselect", "64"), ("quest", None)])
def test_the_end_to_end_part_stores_the_results_of_each_context(monkeypatch, tmp_path, method, budget):
    out = tmp_path / "speed.json"
    saved = []
    save = speed.save
    monkeypatch.setattr(speed, "save", lambda report, path: (saved.append(len(report["results"])), save(report, path)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    build = speed_shapes.build_model
    cpu = torch.device("cpu")
    monkeypatch.setattr(speed_shapes, "build_model", lambda shape, dtype, device, seed: build(shape, dtype, cpu, seed))
    for module in (speed, speed_runs):
        monkeypatch.setattr(module, "is_cuda", lambda model: True)
    monkeypatch.setattr(Answer, "fuse_steps", lambda answer: None)  # a CPU compiles no steps
    use_tape(monkeypatch)
    options = argparse.Namespace(
        model_shape="tiny", out=out, context="160,320", method=method, token_budget=budget, repeats=1
    )
    assert end_to_end.run_end_to_end(options, tmp_path) == 0
    report = json.loads(out.read_text())
    assert saved == [1, 2]
    assert {side["method"] for side in report["results"][0]["sides"]} == {"full", method}
    assert report["settings"]["token_budget"] == [64 if budget else 2048]
    assert report["settings"]["contexts"] == [160, 320] == [result["context"] for result in report["results"]]
