"""Runs whose passes over single tokens are replays of a CUDA graph, for which on a CPU a tape stands in."""

import pytest
import torch

from eval.config import make_config
from eval.errors import EvalError
from eval.processes import Processes
from eval.runner import run
from eval.store import read_records
from eval.table_command import _command
from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.patch import pass_graph
from tests.eval.test_run import Loaded, invoke
from tests.graph_tape import use_tape
from tests.models import DEVICE, SPARSE

METHODS_OF_EACH_KIND = ("quest", "tokenselect", "squeezed", "psa", "keycodes", "infllm", "snapkv", "ntk")
MEASURED = ("prediction", "score", "perplexity", "divergence", "top_agreement", "new_tokens", "realised_budget")
READS = ("kv_bytes", "metadata_bytes", "dense_bytes", "selection_hit_rate")


@pytest.fixture
def recordings(monkeypatch):
    """A list to which something is added with every recording."""
    if DEVICE == "cpu":
        return use_tape(monkeypatch)
    made = []
    record = pass_graph.record
    monkeypatch.setattr(pass_graph, "record", lambda *given: made.append(given) or record(*given))
    return made


@pytest.fixture(scope="module")
def loaded(model_dir):
    return load_model(model_dir, torch.float32, DEVICE)


def go(out, loaded, **values):
    settings = {"benchmark": "passkey", "lengths": [400], "method": ["quest"], "token_budget": [96], "limit": 1}
    run(make_config({"model": "tiny", **settings, **values}), out, Loaded(*loaded), Processes())
    return read_records(out / "rows.jsonl")


def assert_same(found, expected):
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert own["error"] is other["error"] is None
        for name in (*MEASURED, *READS):
            value = other[name]
            assert own[name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), name


@pytest.mark.parametrize("method", METHODS_OF_EACH_KIND)
def test_records_are_those_of_launched_passes(tmp_path, loaded, recordings, method):
    parameters = {f"{method}.{name}": value for name, value in SPARSE.get(method, {}).items()}
    settings = {"method": [method], "parameters": parameters}
    if "token_budget" not in METHODS[method].__dataclass_fields__:
        settings["token_budget"] = []
    expected = go(tmp_path / "launched", loaded, **settings)
    found = go(tmp_path / "recorded", loaded, cuda_graph=True, **settings)
    assert_same(found, expected)
    records = not METHODS[method].evicts and METHODS[method]().offloading is None
    assert [record["cuda_graph"] for record in found] == [record["method"] != "full" and records for record in found]
    assert len(recordings) == records


@pytest.mark.parametrize("question", ["decode", "prefill"])
def test_divergence_and_own_answers_are_those_of_launched_passes(tmp_path, loaded, recordings, question):
    settings = {"measure": ["divergence", "score"], "question": question, "method": ["quest", "keycodes"]}
    expected = go(tmp_path / "launched", loaded, **settings)
    assert_same(go(tmp_path / "recorded", loaded, cuda_graph=True, **settings), expected)
    assert any(record["top_agreement"] is not None and record["top_agreement"] < 1 for record in expected)
    assert recordings


def test_likelihoods_are_those_of_launched_passes(tmp_path, loaded, recordings, data_dir):
    settings = {"benchmark": "pg19", "lengths": [256], "data_dir": str(data_dir)}
    settings["options"] = {"chunk": 1, "scored": 64}
    expected = go(tmp_path / "launched", loaded, **settings)
    assert_same(go(tmp_path / "recorded", loaded, cuda_graph=True, **settings), expected)
    assert len(recordings) == 1


def test_a_record_says_what_was_replayed(tmp_path, loaded, recordings, monkeypatch):
    monkeypatch.setattr("eval.benchmarks.passkey.MAX_NEW_TOKENS", 1)
    (_, record) = go(tmp_path, loaded, question="prefill", cuda_graph=True)  # no pass over a single token
    assert record["new_tokens"] == 1
    assert record["cuda_graph"] is False
    assert not recordings


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_method_that_offloads_has_a_prefill_of_its_own(tmp_path, loaded, recordings, cuda_graph):
    parameters = {"quest.offload": True, "quest.gpu_cache_tokens": 128}
    (_, record) = go(tmp_path / "offloaded", loaded, parameters=parameters, cuda_graph=cuda_graph)
    (_, expected) = go(tmp_path / "resident", loaded)
    assert record["error"] is None
    assert record["prediction"] == expected["prediction"]
    assert not record["cuda_graph"]


def test_a_run_goes_on_with_the_setting_changed(tmp_path, loaded, recordings):
    first = go(tmp_path, loaded, limit=2, tasks=["filler"])
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:2]))
    found = go(tmp_path, loaded, limit=2, tasks=["filler"], cuda_graph=True)
    assert_same(found, first)
    assert [record["cuda_graph"] for record in found] == [False, False, False, True]


def test_a_device_without_graphs_is_refused_before_any_work(tmp_path, loaded, model_dir):
    with pytest.raises(EvalError, match="cuda_graph=True needs a CUDA device, got 'cpu'"):
        go(tmp_path / "out", loaded, cuda_graph=True, device="cpu")
    assert not (tmp_path / "out").exists()
    result = invoke("run", "passkey", "--model", model_dir, "--cuda-graph", "--device", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "cuda_graph=True needs a CUDA device, got 'cpu'" in result.output


def test_the_command_of_a_table_has_the_option_alone():
    command = _command("quest-1", {"limit": 2, "cuda_graph": True})
    assert command == "python -m eval table quest-1 --limit 2 --cuda-graph"
