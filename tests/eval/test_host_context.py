"""Measurements with keys and values in host memory, of contexts that the device may have no room for."""

import json
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from eval import speed_runs
from eval.errors import EvalError
from eval.speed import SpeedConfig, measure, speed_table
from eval.speed_runs import Side, Work, generate
from eval.speed_shapes import SHAPES, build_model
from eval.throughput import ThroughputConfig, measure_throughput
from eval.throughput_table import HEAD, TRAFFIC_HEAD, head, lines, setting
from hf_sparse_attn.cache.host import room

pytestmark = pytest.mark.usefixtures("quick_collections")

SETTINGS = {
    "shape": "tiny",
    "method": ("keycodes",),
    "token_budget": (64,),
    "parameters": {"page_size": 16},
    "new_tokens": 4,
    "dtype": "float32",
    "device": "cpu",
    "kv_storage": "host",
}
SPEED = SpeedConfig(contexts=(160,), repeats=2, **SETTINGS)
THROUGHPUT = ThroughputConfig(context=160, batch=3, requests=4, **SETTINGS)
ON_DEVICE = ["dense, DynamicCache", "dense, preallocated", "dense, StaticCache", "keycodes, 64"]
ON_HOST = "keycodes, 64, in host memory"


@pytest.fixture
def small_device(monkeypatch):
    """A device on which the context does not fit: memory runs out when the last layer is filled."""

    def fail(cache, length):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(speed_runs, "_clear_beyond", fail)


def tiny_work():
    model = build_model(SHAPES["tiny"], torch.float32, torch.device("cpu"))
    return Work.start(model, SPEED, 160, (), batch=3)


def test_host_memory_is_filled_layer_by_layer_without_the_context_on_the_device():
    work, (method,) = tiny_work(), SPEED.methods()
    drawn, live = [], []

    def draw(layer_idx):
        tokens = work.draw(layer_idx)
        drawn.extend(map(weakref.ref, tokens))
        live.append(sum(tensor() is not None for tensor in drawn))
        return tokens

    def fill():
        raise AssertionError("the context is put on the device")

    cache = replace(work, draw=draw, fill=fill).new_cache(method, "host")
    assert len(drawn) == 2 * 4
    assert max(live) <= 2 * 2  # keys and values of a layer, and those of the one before it
    assert all(tensor() is None for tensor in drawn[:-2])
    for ours, filled in zip(cache.sparse_layers, work.filled.sparse_layers, strict=True):
        assert torch.equal(ours.keys[:, :, :160], filled.keys[:, :, :160])
        assert torch.equal(ours.values[:, :, :160], filled.values[:, :, :160])


def test_the_tokens_are_those_of_a_copy_of_the_filled_cache():
    work, (method,) = tiny_work(), SPEED.methods()
    runs = []
    for each in (work, replace(work, draw=None)):
        side = Side("host", method, partial(each.new_cache, method, "host"), kv_storage="host")
        runs.append(generate(work.model, side, each, 4))
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[0].traffic["bytes_loaded"] == runs[1].traffic["bytes_loaded"] > 0


def test_host_memory_is_measured_before_the_context_is_on_the_device(monkeypatch):
    calls = []
    make_layer = speed_runs._draw_layer
    monkeypatch.setattr(speed_runs, "_draw_layer", lambda *given: calls.append("draw") or make_layer(*given))
    monkeypatch.setattr("eval.throughput.generate", lambda *given: calls.append(given[1].name) or generate(*given))
    report = measure_throughput(THROUGHPUT, lambda what: None)
    assert calls[:6] == [ON_HOST, *["draw"] * 4, ON_HOST]
    assert calls[-1] == "keycodes, 64"
    assert calls.count("draw") == 2 * 4  # for the side in host memory, and for the device
    assert [side["name"] for side in report["sides"]] == [*ON_DEVICE, ON_HOST]


@pytest.mark.parametrize(
    "run",
    [partial(measure, SPEED), partial(measure_throughput, THROUGHPUT, lambda what: None)],
    ids=["speed", "throughput"],
)
def test_the_check_needs_no_second_cache_in_host_memory(run, monkeypatch):
    made, make = [], Work._new_host_cache
    monkeypatch.setattr(Work, "_new_host_cache", lambda *given: made.append(given) or make(*given))
    report = run()
    assert len(made) == 1
    checked = (report["results"][0] if "results" in report else report)["checked"]
    assert [each["against"] for each in checked] == ["dense attention; in host memory: the same method on the device"]


def test_throughput_of_a_context_that_fits_in_host_memory_alone(small_device):
    report = json.loads(json.dumps(measure_throughput(THROUGHPUT, lambda what: None)))
    assert {side["name"]: side["error"] for side in report["sides"]} == {
        **dict.fromkeys(ON_DEVICE, "out of memory"),
        ON_HOST: None,
    }
    assert report["best_dense"] is None
    assert "ratio" not in report["sides"][-1]
    assert report["sides"][-1]["tokens_per_second"] > 0
    assert report["checked"] == [
        {"method": "keycodes", "token_budget": 64, "tokens": 0, "against": "nothing: it does not fit on the device"}
    ]
    assert "there is no prefill. No dense side fits in memory." in setting(report)
    assert head(report) == HEAD + TRAFFIC_HEAD
    assert [row[1] for row in lines(report)[:4]] == ["out of memory"] * 4


def test_speed_of_a_context_that_fits_in_host_memory_alone(small_device):
    report = json.loads(json.dumps(measure(SPEED)))
    (result,) = report["results"]
    assert (result["skipped"], [side["name"] for side in result["sides"]]) == (ON_DEVICE, [ON_HOST])
    assert result["sides"][0]["ratio"] is None
    assert result["checked"][0]["against"] == "nothing: it does not fit on the device"
    console = Console(width=220)
    with console.capture() as capture:
        console.print(speed_table(report))
    assert capture.get().count("out of memory") == 4


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: measure(replace(SPEED, kv_storage="device")), "context=160 does not fit in the memory of"),
        (
            lambda: measure_throughput(replace(THROUGHPUT, kv_storage="device"), lambda what: None),
            "batch=3: no dense side fits in the memory of",
        ),
    ],
)
def test_without_host_memory_such_a_context_is_an_error(small_device, run, message):
    with pytest.raises(EvalError, match=message):
        run()


@pytest.mark.parametrize(
    "run", [lambda: measure(SPEED), lambda: measure_throughput(THROUGHPUT, lambda what: None)], ids=["speed", "batches"]
)
def test_too_little_host_memory_is_an_error(run, monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda: 1)
    with pytest.raises(EvalError, match=r"context=160: kv_storage='host': 165 tokens take .* GiB are left"):
        run()


def test_speed_shows_what_crosses_the_link():
    report = json.loads(json.dumps(measure(SPEED)))
    (result,) = report["results"]
    assert result["skipped"] == []
    *others, on_host = result["sides"]
    assert {side["traffic"] for side in others} == {None}
    loaded = on_host["traffic"]["bytes_loaded"]
    assert loaded > 0
    console = Console(width=220)
    with console.capture() as capture:
        console.print(speed_table(report))
    text = capture.get()
    assert "over the link" in " ".join(text.split())
    row = next(line for line in text.splitlines() if ON_HOST in line)
    rate = loaded / on_host["tpot_ms"]["median"] / 1e6
    assert [cell.strip() for cell in row.split("│")][-3:-1] == [f"{loaded / 2**20:,.0f}", f"{rate:.1f}"]
