"""Models over several devices have the weights, keys and tokens of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eval.errors import EvalError
from eval.speed import SpeedConfig, measure
from eval.speed_shapes import SHAPES, build_model
from eval.split import ONE_SHOT, Split, exchange, load_split
from tests.tiny import make_tokenizer

ROOT = Path(__file__).parents[2]
SETTINGS = {"shape": "tiny", "contexts": (300,), "token_budget": (80,), "new_tokens": 6, "repeats": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Return a folder with the weights of the shape, which has two KV heads, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    build_model(SHAPES["tiny"], torch.float32, torch.device("cpu")).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def tokens(report):
    return {side["name"]: side["tokens"] for side in report["results"][0]["sides"]}


@pytest.mark.parametrize("is_shape", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_heads_over_two_processes(is_shape, model_dir, tmp_path):
    command = f"-m torch.distributed.run --nproc-per-node 2 -m eval speed --split heads --out {tmp_path / 'heads.json'}"
    settings = "--context 300 --method quest,keycodes --token-budget 80 --new-tokens 6 --repeats 1 --device cpu"
    which = ["--shape", "tiny"] if is_shape else ["--model", model_dir]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *command.split(), *settings.split(), *which]
    ran = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("(float32") == 1  # one process prints
    heads = json.loads((tmp_path / "heads.json").read_text())
    of_one = SETTINGS if is_shape else {**SETTINGS, "shape": None, "model": model_dir}
    one = measure(SpeedConfig(**of_one, method=("quest", "keycodes"), device="cpu"))
    assert tokens(heads) == tokens(one)
    assert heads["machine"]["devices"] == 2
    assert one["machine"]["devices"] == 1
    assert (heads["machine"]["exchange"], one["machine"]["exchange"]) == ("gloo", None)
    whole, half = (each["results"][0]["weights_and_kv_bytes"] for each in (one, heads))
    assert half < 0.6 * whole


@pytest.mark.parametrize(("used", "expected"), [(0, "gloo"), (5, ONE_SHOT)])
def test_exchange_is_what_torch_has_counted(used, expected, monkeypatch):
    assert exchange() is None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    counter = "_get_intra_node_comm_usage_counter"  # builds for a CPU lack it
    monkeypatch.setattr(torch._C._distributed_c10d, counter, lambda: used, raising=False)
    assert exchange() == expected


def test_a_matrix_depends_on_the_seed_and_its_name():
    one, other = (build_model(SHAPES["tiny"], torch.float32, torch.device("cpu"), seed) for seed in (1, 2))
    first, second = one.model.layers[0].mlp, one.model.layers[1].mlp
    assert not torch.equal(first.up_proj.weight, other.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(first.up_proj.weight, second.up_proj.weight)
    assert not torch.equal(first.up_proj.weight, first.gate_proj.weight)
    assert first.up_proj.weight.std().item() == pytest.approx(one.config.initializer_range, rel=0.1)
    assert torch.equal(one.model.norm.weight, torch.ones(64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "rows"}, "split='rows' is unknown; known: none, layers, heads"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(EvalError) as raised:
        SpeedConfig(**{**SETTINGS, **settings})
    assert str(raised.value) == message


def test_one_process_and_one_gpu_are_errors(monkeypatch, model_dir):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for split, message in ((Split.HEADS, "several processes: torchrun"), (Split.LAYERS, "several GPUs, found 1")):
        with pytest.raises(EvalError, match=message):
            build_model(SHAPES["tiny"], torch.float32, torch.device("cpu"), split=split)
        with pytest.raises(EvalError, match=message):
            load_split(model_dir, torch.float32, split)


def test_a_gguf_file_cannot_be_divided(tmp_path):
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(EvalError, match=r"split='heads' needs safetensors, got the GGUF file '.*some.gguf'.*unpack"):
        load_split(str(file), torch.float32, Split.HEADS)
