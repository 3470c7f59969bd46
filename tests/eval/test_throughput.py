"""Throughput of batched decoding: arrivals, static batches, the report's structure (not its times), and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from eval import speed_check, throughput
from eval.cli import app
from eval.errors import EvalError
from eval.markdown import results_tables, storage_table
from eval.serving import Served, arrivals, serve
from eval.speed_config import SpeedConfig
from eval.speed_runs import Work
from eval.speed_shapes import SHAPES, build_model
from eval.throughput import ThroughputConfig, measure_throughput
from eval.throughput_table import HEAD, TRAFFIC_HEAD, head, lines, setting, throughput_markdown, throughput_table

pytestmark = pytest.mark.usefixtures("quick_collections")

CONFIG = ThroughputConfig(
    "tiny",
    context=160,
    batch=3,
    method=("quest", "tokenselect"),
    token_budget=(64,),
    new_tokens=4,
    requests=4,
    dtype="float32",
    device="cpu",
)
SHORT = replace(CONFIG, method=("quest",), new_tokens=2, requests=1)


def test_arrivals_are_a_seeded_poisson_process():
    times = arrivals(4000, rate=20.0, seed=1)
    gaps = np.diff([0.0, *times])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)  # an exponential distribution's mean and deviation are equal
    assert arrivals(4000, 20.0, 1) == times != arrivals(4000, 20.0, 2)
    assert arrivals(3, None, 1) == [0.0] * 3


def test_batches_are_the_requests_that_wait():
    arrived = [0.0, 0.5, 1.0, 1.5, 9.0]
    calls = iter([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])
    served = serve(arrived, 2, lambda: next(calls))
    assert served.batches == [1, 2, 1, 1]
    assert served.waited == [0.0, 1.5, 1.0, 2.5, 0.0]
    assert served.tokens == [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0], [5.0, 7.0], [10.0, 11.0]]
    assert list(calls) == []


def test_figures_are_those_of_the_trace():
    served = Served(tokens=[[1.0, 2.0, 3.0], [1.0, 2.0, 7.0]], waited=[0.0, 0.5], batches=[2])
    figures = served.figures([0.0, 0.5])
    assert figures["tokens_per_second"] == 6 / 7
    assert figures["between_tokens_ms"]["mean"] == pytest.approx(2000)  # of 1, 1, 1 and 5 seconds
    assert figures["between_tokens_ms"]["median"] == pytest.approx(1000)
    assert 4000 < figures["between_tokens_ms"]["p99"] < 5000
    assert figures["first_token_ms"]["mean"] == pytest.approx(750)
    assert (figures["waited_ms"], figures["batches"], figures["mean_batch"]) == (250, 1, 2)


@pytest.fixture(scope="module")
def report():
    said: list[str] = []
    measured = measure_throughput(CONFIG, said.append)
    assert said[:3] == ["dense, DynamicCache", "dense, preallocated", "dense, StaticCache"]
    assert said[3:] == ["check: quest, 64", "quest, 64", "check: tokenselect, 64", "tokenselect, 64"]
    return json.loads(json.dumps(measured))


def test_a_report_has_every_side_and_the_best_dense_one(report):
    dense, sparse = report["sides"][:3], report["sides"][3:]
    best = max(dense, key=lambda side: side["tokens_per_second"])
    assert report["best_dense"] == best["name"]
    for side in sparse:
        assert side["ratio"] == side["tokens_per_second"] / best["tokens_per_second"]
        assert 0 < side["kv_fraction"] < 1
        assert 0 < side["realised_budget"] <= 64  # of one row, not of all of them
    for side in report["sides"]:
        assert side["between_tokens_ms"]["p99"] >= side["between_tokens_ms"]["median"] > 0
        assert (side["batches"], side["mean_batch"]) == (2, 2.0)
    assert [each["method"] for each in report["checked"]] == ["quest", "tokenselect"]
    assert report["settings"]["requests"] == 4


def test_a_batch_has_rows_of_its_own():
    model = build_model(SHAPES["tiny"], torch.float32, torch.device("cpu"))
    work = Work.start(model, CONFIG.speed, 160, (), batch=3)
    assert work.input_ids.shape == (3, 161)
    assert work.filled is not None
    keys = work.filled.sparse_layers[0].keys
    assert not torch.equal(keys[0], keys[1])
    assert work.kv_bytes == 3 * Work.start(model, CONFIG.speed, 160, ()).kv_bytes


@pytest.mark.parametrize("row", [0, 2])
def test_a_row_with_other_tokens_under_a_covering_budget_is_an_error(monkeypatch, row):
    generate = speed_check.generate

    def wrong(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        run = generate(model, side, work, new_tokens)
        run.token_ids[row][1] = (run.token_ids[row][1] + 1) % SHAPES["tiny"].vocab_size
        return run

    monkeypatch.setattr(speed_check, "generate", wrong)
    with pytest.raises(EvalError, match=r"quest, \d+, context=160: with a budget for everything"):
        measure_throughput(SHORT, lambda what: None)


@pytest.mark.parametrize("failing", ["dense, DynamicCache", "quest, 64"])
def test_a_side_that_does_not_fit_in_memory_has_an_error_alone(monkeypatch, failing):
    generate = throughput.generate

    def scarce(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        if side.name == failing:
            raise torch.OutOfMemoryError("no")
        return generate(model, side, work, new_tokens)

    monkeypatch.setattr(throughput, "generate", scarce)
    found = measure_throughput(SHORT, lambda what: None)
    assert {side["name"]: side["error"] for side in found["sides"] if side["error"]} == {failing: "out of memory"}
    assert found["best_dense"] != failing
    assert [row[1] for row in lines(found)].count("out of memory") == 1
    assert {len(row) for row in lines(found)} == {len(HEAD)}


def test_no_dense_side_in_memory_is_an_error(monkeypatch):
    def scarce(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(throughput, "generate", scarce)
    with pytest.raises(EvalError, match="batch=3: no dense side fits in the memory of"):
        measure_throughput(CONFIG, lambda what: None)


def test_tables_show_every_side(report, tmp_path):
    assert [row[0] for row in lines(report)] == [side["name"] for side in report["sides"]]
    assert throughput_table(report).row_count == 5
    assert "4 requests (all there from the start), each with 160 cached tokens and 4 new ones" in setting(report)
    (tmp_path / "throughput").mkdir()
    settings = report["settings"] | {"rate": 2.5, "parameters": {"quest.page_size": 16}}
    path = tmp_path / "throughput" / "tiny-cpu.json"
    path.write_text(json.dumps(report | {"settings": settings}))
    text = results_tables(tmp_path)
    assert "## Throughput of batched decoding: tiny-cpu, float32, " in text
    assert (
        "`python -m eval throughput --shape tiny --context 160 --batch 3 --method quest,tokenselect --token-budget 64 "
        "--parameter quest.page_size=16 --rate 2.5 --requests 4 --new-tokens 4`"
    ) in text
    assert "Poisson arrivals, 2.5 per second" in text
    assert "| quest, 64 | " in text
    path.write_text("{}")
    with pytest.raises(EvalError, match=r"tiny-cpu\.json is not a report of `python -m eval throughput`"):
        results_tables(tmp_path)


def test_the_command_writes_a_file(tmp_path):
    path = tmp_path / "folder" / "it.json"
    words = ["--shape", "tiny", "--context", "100", "--batch", "2", "--token-budget", "64", "--new-tokens", "2"]
    result = CliRunner().invoke(
        app, ["throughput", *words, "--requests", "1", "--rate", "5", "--device", "cpu", "--out", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["settings"]["rate"] == 5.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch=0 is not allowed: a whole number, at least 1"),
        ({"requests": 0}, "requests=0 is not allowed"),
        ({"rate": 0.0}, r"rate=0.0 is not allowed: requests per second, above 0"),
        ({"new_tokens": 1}, "new_tokens=1 is not allowed"),
        ({"shape": "none"}, "shape='none' is unknown"),
        ({"method": ("quests",)}, "did you mean 'quest'"),
        ({"method": ("squeezed",)}, "method='squeezed' is not allowed with a shape.* it needs the prompt's queries"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(EvalError, match=message):
        replace(CONFIG, **changes)


def test_squeezed_is_not_timed_from_a_filled_cache():
    with pytest.raises(EvalError, match="not allowed with a shape"):
        SpeedConfig(shape="tiny", contexts=(100,), method=("squeezed",))


OFFLOADED = {"offload": True, "gpu_cache_tokens": 96}


def test_an_offloaded_method_runs_beside_itself_on_the_device():
    parameters = {"block_size": 16, "microbatch": 1, "offload": True, "gpu_cache_tokens": 160}
    config = replace(CONFIG, method=("psa",), parameters=parameters)
    report = json.loads(json.dumps(measure_throughput(config, lambda what: None)))
    assert [side["name"] for side in report["sides"][3:]] == ["psa, 64", "psa, 64, offloaded"]
    assert [each["against"] for each in report["checked"]] == ["dense attention", "the same method on the device"]
    resident, offloaded = report["sides"][3:]
    assert resident["traffic"] is None
    assert resident["kv_fraction"] == offloaded["kv_fraction"]
    assert 0 < offloaded["traffic"]["pool_hits"] < 1
    assert offloaded["traffic"]["bytes_loaded"] > 0
    assert head(report) == HEAD + TRAFFIC_HEAD
    assert {len(row) for row in lines(report)} == {len(head(report))}
    assert lines(report)[3][-4:] == ["-"] * 4
    rate = offloaded["traffic"]["bytes_loaded"] / offloaded["between_tokens_ms"]["mean"] / 1e6
    assert lines(report)[4][-2] == f"{rate:.1f}"


def test_an_offloaded_method_with_other_tokens_is_an_error(monkeypatch):
    generate = speed_check.generate

    def wrong(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        run = generate(model, side, work, new_tokens)
        if side.name.endswith("offloaded"):
            run.token_ids[1][1] = (run.token_ids[1][1] + 1) % SHAPES["tiny"].vocab_size
        return run

    monkeypatch.setattr(speed_check, "generate", wrong)
    with pytest.raises(EvalError, match="context=160: the offloaded method begins with tokens"):
        measure_throughput(replace(SHORT, new_tokens=4, parameters=OFFLOADED), lambda what: None)


def test_methods_run_in_host_memory_beside_themselves_on_the_device():
    config = replace(CONFIG, method=("keycodes",), token_budget=(64,), parameters={"page_size": 16}, kv_storage="host")
    report = json.loads(json.dumps(measure_throughput(config, lambda what: None)))
    assert [side["name"] for side in report["sides"][3:]] == ["keycodes, 64", "keycodes, 64, in host memory"]
    assert [side["kv_storage"] for side in report["sides"]] == [*["device"] * 4, "host"]
    assert report["checked"][0]["against"] == "dense attention; in host memory: the same method on the device"
    resident, on_host = report["sides"][3:]
    assert resident["traffic"] is None
    assert resident["kv_fraction"] == on_host["kv_fraction"]
    assert 0 < on_host["traffic"]["pool_hits"] < 1
    assert on_host["traffic"]["bytes_loaded"] > 0
    assert "--kv-storage host" in throughput_markdown("a run", report, "")


def test_host_memory_and_pools_stand_in_one_table(tmp_path):
    def side(**changes):
        return {
            "name": "psa", "method": "psa", "token_budget": 64, "hyperparameters": {"offload": False, "threshold": 0.9},
            "kv_storage": "device", "error": None, "traffic": None, "tokens_per_second": 50.0,
            "between_tokens_ms": {"mean": 20.0},
        } | changes  # fmt: skip

    moved = {"pool_hits": 0.25, "bytes_loaded": 4 << 20, "stall_ms": 0.0}
    report = {
        "machine": {"device": "Example GPU"},
        "settings": {"shape": "tiny", "batch": 2, "context": 4096},
        "sides": [
            side(method="full", token_budget=None, hyperparameters={}),
            side(error="out of memory", tokens_per_second=None),
            side(),
            side(hyperparameters={"offload": True, "threshold": 0.9}, traffic=moved, tokens_per_second=25.0),
            side(kv_storage="host", traffic=moved, tokens_per_second=40.0),
            side(hyperparameters={"offload": True, "threshold": 0.5}, traffic=moved),
        ],
    }
    nothing = storage_table(tmp_path)
    assert nothing.startswith("No measurements with keys and values in host memory")
    (tmp_path / "throughput").mkdir()
    (tmp_path / "throughput/a.json").write_text(json.dumps(report))
    text = storage_table(tmp_path)
    assert text.startswith("Example GPU; weights, keys and values are random.")
    assert text.splitlines()[-3:] == [
        "| tiny, 2 x 4,096 | psa 64 | pool on the device | 25.0 | 50.0 | 20.00 | 25.0 | 4 | 0.2 |",
        "| tiny, 2 x 4,096 | psa 64 | host memory, read by kernels | 40.0 | 50.0 | 20.00 | 25.0 | 4 | 0.2 |",
        "| tiny, 2 x 4,096 | psa 64 | pool on the device | 50.0 | - | 20.00 | 25.0 | 4 | 0.2 |",
    ]
    (tmp_path / "throughput/a.json").write_text(json.dumps({"sides": [{}]}))
    with pytest.raises(EvalError, match=r"a\.json is not a report"):
        storage_table(tmp_path)


def test_a_method_that_cannot_use_host_memory_is_an_error():
    with pytest.raises(EvalError, match="kv_storage must be 'device' for method 'tokenselect', got 'host'"):
        replace(CONFIG, method=("tokenselect",), kv_storage="host")
    with pytest.raises(EvalError, match="kv_storage must be one of 'device', 'host', got 'disk'"):
        replace(CONFIG, kv_storage="disk")


def test_prompts_beyond_the_positions_are_refused(monkeypatch):
    monkeypatch.setattr(throughput, "max_positions", lambda config: 163)
    with pytest.raises(EvalError, match=r"context=160 with new_tokens=4 needs 164 positions; the shape has 163"):
        measure_throughput(CONFIG, lambda what: None)
