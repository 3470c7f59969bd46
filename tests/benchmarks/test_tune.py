"""Tuning: the fastest choice wins, and a partial run keeps the other choices."""

import json

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.codes import cluster as code_cluster
from op_bench import tune as tune_module
from op_bench.cluster_entries import CLUSTERS
from op_bench.code_step_entries import CODE_CLUSTERS
from op_bench.quest_entries import QUEST
from op_bench.shapes import CLUSTER_SHAPES, DECODE_SHAPES, Shape
from op_bench.tune import SEPARATE_LAUNCHES, TIMED_WITH, chosen_launches, tune, tuned_shapes, write

SHAPE = Shape(4, 2, 16, 1, 64)


def test_the_fastest_candidate_of_every_launch_is_found(monkeypatch):
    timed = []

    def nine_for_256_pages(entry, layers, choices):
        timed.append((entry.op, choices))
        return 10.0 - (choices.get("select", {}).get("reduced") == 256)

    monkeypatch.setattr(tune_module, "_time", nine_for_256_pages)
    monkeypatch.setattr(tune_module, "tuned_shapes", lambda family: [SHAPE] if family in (QUEST, CLUSTERS) else [])
    monkeypatch.setitem(tune_module.FITS, "cluster_step", lambda layer, choice: choice["cluster"] != 16)
    monkeypatch.setattr(tune_module, "LAYERS", 1)
    lines, stored = [], []
    found = tune(torch.device("cpu"), [SHAPE], chosen_launches([]), lines.append, lambda part: stored.append(str(part)))
    described = {"pairs": 2, "group": 2, "head_dim": 16, "tokens": 64}
    assert found["select"] == [{"shape": described, "choice": tuning.CANDIDATES["select"][3]}]
    assert found["score"] == [{"shape": described, "choice": tuning.CANDIDATES["score"][0]}]
    assert found["rope_decode"] == []
    assert stored[-1] == str(found) != stored[0]
    assert len(lines) == 5
    # The selection is timed with the scores' choice, which comes first.
    assert all(choices["score"] == tuning.CANDIDATES["score"][0] for _, choices in timed if "select" in choices)
    # Separate launches are timed without clusters, of which those that fit are timed last.
    clusters = [choices["cluster_step"] for op, choices in timed if op == "cluster_step"]
    assert clusters == [choice for choice in tuning.CANDIDATES["cluster_step"] if choice["cluster"] != 16]
    assert all(choices["cluster_step"] == SEPARATE_LAUNCHES for op, choices in timed if op != "cluster_step")
    assert found["cluster_step"] == [{"shape": described, "choice": SEPARATE_LAUNCHES}]


@pytest.mark.parametrize(("of_launches", "chosen"), [(10.4, {"cluster": 8, "threads": 256}), (10.2, SEPARATE_LAUNCHES)])
def test_clusters_are_chosen_where_they_are_clearly_faster(monkeypatch, of_launches, chosen):
    times = {8: 10.0, 0: of_launches}
    monkeypatch.setattr(tune_module, "_time", lambda entry, layers, choices: times[choices["cluster_step"]["cluster"]])
    monkeypatch.setattr(tune_module, "tuned_shapes", lambda family: [SHAPE] if family is CLUSTERS else [])
    monkeypatch.setitem(tune_module.FITS, "cluster_step", lambda layer, choice: choice["cluster"] in times)
    monkeypatch.setattr(tune_module, "LAYERS", 1)
    found = tune(torch.device("cpu"), [SHAPE], ["cluster_step"], lambda line: None)
    assert [entry["choice"] for entry in found["cluster_step"]] == [chosen]


def test_keycodes_step_is_timed_with_the_clusters_that_fit(monkeypatch):
    shape, timed = Shape(4, 2, 16, 1, 2048), []

    def nine_for_clusters(entry, layers, choices):
        timed.append(choices["code_step"])
        return 10.0 - bool(choices["code_step"]["cluster"])

    monkeypatch.setattr(tune_module, "_time", nine_for_clusters)
    monkeypatch.setattr(tune_module, "tuned_shapes", lambda family: [shape] if family is CODE_CLUSTERS else [])
    monkeypatch.setattr(tune_module, "LAYERS", 1)
    found = tune(torch.device("cpu"), [shape], ["code_step"], lambda line: None)
    assert timed == [SEPARATE_LAUNCHES]  # no clusters on a CPU
    assert [entry["choice"] for entry in found["code_step"]] == [SEPARATE_LAUNCHES]
    monkeypatch.setitem(tune_module.FITS, "code_step", lambda layer, choice: choice["cluster"] in (0, 16))
    found = tune(torch.device("cpu"), [shape], ["code_step"], lambda line: None)
    assert [entry["choice"] for entry in found["code_step"]] == [{"cluster": 16, "threads": 256}]


def test_the_candidates_of_clusters_are_compiled_at_once_for_the_groups_of_the_shapes(monkeypatch):
    compiled = []

    def compile_candidates(implementation, device, candidates):
        compiled.append((implementation, [(group, choice) for group, _, choice in candidates]))

    monkeypatch.setattr(tune_module, "compile_candidates", compile_candidates)
    monkeypatch.setattr(tune_module, "_tune_shape", lambda *arguments: {})
    shapes = [shape for shape in tuned_shapes(CODE_CLUSTERS) if shape.group != 1]
    tune(torch.device("cpu"), shapes, ["code_step"], lambda line: None)
    ((implementation, candidates),) = compiled
    assert implementation is code_cluster
    assert candidates == [(group, choice) for group in (4, 7) for choice in tuning.CANDIDATES["code_step"]]


def test_clusters_are_tuned_at_the_measured_shapes_first():
    shapes = tuned_shapes(CLUSTERS)
    assert shapes[: len(CLUSTER_SHAPES)] == list(CLUSTER_SHAPES)
    assert {shape for shape in DECODE_SHAPES if shape.head_dim == 128} == set(shapes)


def test_a_partial_run_keeps_other_shapes_and_launches(monkeypatch, tmp_path):
    def entry(tokens, warps):
        return {"shape": {"pairs": 8, "group": 4, "head_dim": 128, "tokens": tokens}, "choice": {"warps": warps}}

    table = tmp_path / "tuned.json"
    before = {
        "8.0": {"score": [entry(1, 1)]},
        "9.0": {"score": [entry(9, 1)], "select": [entry(1024, 4), entry(4096, 4)]},
    }
    table.write_text(json.dumps(before))
    monkeypatch.setattr(tuning, "TUNED", table)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    write({"select": [entry(2048, 2), entry(1024, 8)], "dense_decode": [entry(1, 2)]}, torch.device("cuda", 0))
    after = json.loads(table.read_text())
    assert after["8.0"] == before["8.0"]
    assert after["9.0"]["score"] == before["9.0"]["score"]
    assert after["9.0"]["select"] == [entry(1024, 8), entry(2048, 2), entry(4096, 4)]
    assert after["9.0"]["dense_decode"] == [entry(1, 2)]


def test_launches_go_by_name():
    assert chosen_launches(["rope_decode", "score"]) == ["score", "rope_decode"]
    assert list(TIMED_WITH) == list(tuning.CANDIDATES)
    with pytest.raises(ValueError, match="--tune --op 'quest_step'; allowed: score, select"):
        chosen_launches(["quest_step"])
