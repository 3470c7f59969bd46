"""Whole runs on a tiny model: their records, resumption, failed samples, and errors."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from eval.benchmarks.passkey import PasskeyRetrieval
from eval.cli import app
from eval.config import make_config
from eval.engine import Engine, make_variants
from eval.errors import EvalError
from eval.processes import Processes
from eval.prompts import encode_prompt
from eval.report import write_report
from eval.runner import run
from eval.store import read_records, record_key
from hf_sparse_attn import METHODS, SnapKV
from hf_sparse_attn.cli.models import load_model
from tests.methods.toy import Window
from tests.tiny import save_bloom, save_stablelm

ROOT = Path(__file__).resolve().parents[2]
PASSKEY = {"benchmark": "passkey", "lengths": [400], "method": ["quest"], "token_budget": [64], "limit": 2}
SMALL = ("--lengths", "400", "--method", "full,quest", "--token-budget", "64", "--limit", "2")


@pytest.fixture(scope="module")
def loaded(model_dir):
    return load_model(model_dir, torch.float32, "cpu")


def go(out, loaded, model_dir, **values):
    config = make_config({**PASSKEY, "model": model_dir, **values})
    return run(config, out, Loaded(*loaded), Processes())


class Loaded(NamedTuple):
    """A source of a loaded model."""

    model: Any
    tokenizer: Any

    def describe(self, config):
        return self.tokenizer, self.model.config

    def load(self, config):
        return self.model


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "eval", *arguments]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels/torch-ext")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_every_record_has_its_costs_and_a_dense_counterpart(tmp_path, loaded, model_dir):
    summary = go(tmp_path, loaded, model_dir, token_budget=[64, 128])
    records = read_records(tmp_path / "rows.jsonl")
    assert [(record["sample_id"], record["method"], record["token_budget"]) for record in records] == [
        (sample, method, budget)
        for sample in ("0-0.1", "0-0.3")
        for method, budget in (("full", None), ("quest", 64), ("quest", 128))
    ]
    for record in records:
        assert record["error"] is None
        assert record["score"] in (0.0, 1.0)
        assert record["prompt_tokens"] == 400 + record["question_tokens"]
        assert record["peak_memory_bytes"] > 0
        assert record["ttft_seconds"] > record["prefill_seconds"] > 0
        assert record["versions"]["torch"] == torch.__version__
        assert (record["seed"], record["question"], record["dtype"]) == (0, "decode", "float32")
    for dense, small, large in (records[:3], records[3:]):
        assert dense["kv_fraction"] == 1.0
        assert 0 < small["kv_fraction"] < large["kv_fraction"] < 1
        assert small["realised_budget"] <= 64 < large["realised_budget"] <= 128
        assert small["metadata_bytes"] > 0
        assert dense["selection_hit_rate"] is small["selection_hit_rate"] is None
        assert dense["kv_bytes"] == dense["dense_bytes"]
        same_steps = dense["new_tokens"] == small["new_tokens"]
        assert (small["dense_bytes"] == dense["dense_bytes"]) == same_steps  # arithmetic compared with the counters
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["finished"]
    assert [(entry["method"], entry["samples"]) for entry in summary["table"]] == [
        ("full", 2),
        ("quest", 2),
        ("quest", 2),
    ]


@pytest.mark.parametrize("question", ["decode", "prefill"])
def test_the_answer_is_what_generate_gives(tmp_path, loaded, model_dir, question):
    """Dense attention over the shared prefill equals Transformers' own loop over the whole prompt."""
    model, tokenizer = loaded
    go(tmp_path, loaded, model_dir, question=question, limit=1)
    (record,) = (record for record in read_records(tmp_path / "rows.jsonl") if record["method"] == "full")
    item = PasskeyRetrieval().items(_setup(tokenizer, lengths=(400,), tasks=("filler",)))[0]
    sample = item.build()
    prompt = torch.tensor([[*sample.material_ids, *sample.question_ids]])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    new_ids = expected[0, prompt.shape[1] :]
    assert record["prediction"] == tokenizer.decode(new_ids, skip_special_tokens=True)


def _setup(tokenizer, **values):
    from eval.benchmarks import Setup

    return Setup(**{"tokenizer": tokenizer, "max_positions": 1024, **values})


def test_the_material_is_prefilled_once_for_all_methods_with_a_dense_prefill(tmp_path, loaded, model_dir, monkeypatch):
    monkeypatch.setattr(Window, "sparse_phases", ("prefill", "decode"))
    monkeypatch.setitem(METHODS, Window.name, Window)
    model, _ = loaded
    lengths = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    go(tmp_path, loaded, model_dir, limit=1, token_budget=[64, 128])
    assert [length for length in lengths if length > 1] == [400]
    lengths.clear()
    go(tmp_path / "own", loaded, model_dir, limit=1, method=["quest", Window.name])
    assert [length for length in lengths if length > 1] == [400, 400]  # a method that is sparse there prefills itself
    hook.remove()


def test_dense_methods_that_extend_the_positions_run_beside_others(tmp_path, loaded, model_dir):
    """They prefill the prompt themselves, beyond the model's 1024 positions, and have no budget."""
    parameters = {"ntk.factor": 2, "self_extend.window": 256, "self_extend.group_size": 4}
    settings = {"method": ["ntk", "quest", "self_extend"], "token_budget": [64, 128], "parameters": parameters}
    go(tmp_path, loaded, model_dir, limit=1, lengths=[1500], **settings)
    records = read_records(tmp_path / "rows.jsonl")
    assert [(record["method"], record["token_budget"]) for record in records] == [
        ("full", None),
        ("ntk", None),
        ("quest", 64),
        ("quest", 128),
        ("self_extend", None),
    ]
    for record in records[1::3]:
        assert record["error"] is None
        assert record["kv_fraction"] == 1.0
        assert record["prefill_seconds"] != records[0]["prefill_seconds"]
    settings |= {"method": ["ntk", "self_extend"], "parameters": {**parameters, "ntk.factor": 1.25}}
    go(tmp_path / "too-long", loaded, model_dir, limit=1, lengths=[1500], **settings)
    (record,) = (each for each in read_records(tmp_path / "too-long" / "rows.jsonl") if each["method"] == "ntk")
    assert "1024 positions (max_position_embeddings=1024); ntk extends them to 1280 tokens" in record["error"]


@pytest.mark.parametrize(("threshold", "kept"), [(-1, 1.0), (1, 0.0)])
def test_kept_selections_are_counted_beyond_the_models_positions_too(tmp_path, loaded, model_dir, threshold, kept):
    parameters = {"k": 48, "n_init": 4, "n_local": 12, "selection_cache_threshold": threshold}
    settings = {"method": ["tokenselect"], "token_budget": [], "parameters": parameters, "lengths": [1500]}
    go(tmp_path, loaded, model_dir, limit=1, **settings)
    dense, sparse = read_records(tmp_path / "rows.jsonl")
    assert dense["error"] is sparse["error"] is None
    assert dense["selection_hit_rate"] is None
    # The first step selects at any threshold.
    steps = sparse["question_tokens"] + sparse["new_tokens"] - 1
    assert sparse["selection_hit_rate"] == pytest.approx(kept * (steps - 1) / steps, abs=0.02)
    assert sparse["realised_budget"] == sparse["token_budget"] == 64
    head_dim, layers, float_bytes = 16, 3, 4
    voted = sparse["metadata_bytes"] / (layers * head_dim * float_bytes)  # keys, in layers of one KV head
    most = (1500 - 16) + sparse["question_tokens"] + sparse["new_tokens"]
    assert voted <= most if kept else (steps - 1) * 1484 < voted <= steps * most


@pytest.mark.parametrize("question", ["decode", "prefill"])
def test_methods_that_evict_do_so_after_a_question_that_is_prefilled(
    tmp_path, loaded, model_dir, monkeypatch, question
):
    evicted_at = []
    finish = SnapKV.finish_prompt

    def note(self, layers):
        evicted_at.append(layers[0].length)
        finish(self, layers)

    monkeypatch.setattr(SnapKV, "finish_prompt", note)
    methods = ["streaming_llm", "tova", "h2o", "snapkv"]
    go(tmp_path, loaded, model_dir, limit=1, method=methods, token_budget=[64], question=question)
    records = read_records(tmp_path / "rows.jsonl")
    assert [(record["method"], record["error"]) for record in records] == [(name, None) for name in ("full", *methods)]
    assert all(record["kv_fraction"] < 1 for record in records[1:])
    material = records[0]["prompt_tokens"] - records[0]["question_tokens"]
    assert evicted_at[0] == (material if question == "decode" else records[0]["prompt_tokens"])


def test_dense_attention_pays_for_no_plans_of_cudnn(tmp_path, loaded, model_dir):
    states = set()
    hook = loaded[0].register_forward_pre_hook(lambda *_: states.add(torch.backends.cuda.cudnn_sdp_enabled()))
    go(tmp_path, loaded, model_dir, limit=1)
    hook.remove()
    assert states == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_question_prefilled_in_one_pass(tmp_path, loaded, model_dir):
    go(tmp_path, loaded, model_dir, question="prefill", limit=1)
    for record in read_records(tmp_path / "rows.jsonl"):
        steps = record["new_tokens"] - 1 if record["new_tokens"] == 8 else record["new_tokens"]
        per_token = record["dense_bytes"] / sum(record["prompt_tokens"] + 1 + step for step in range(steps))
        assert per_token == 3 * 2 * 16 * 4  # layers, keys and values, head_dim, bytes


def test_finished_run_is_not_run_again(tmp_path, loaded, model_dir):
    go(tmp_path, loaded, model_dir)
    files = [tmp_path / name for name in ("rows.jsonl", "summary.json")]
    before = [file.read_bytes() for file in files]

    def fail(*_, **__):
        raise AssertionError("ran again")

    hook = loaded[0].register_forward_pre_hook(fail)
    summary = go(tmp_path, loaded, model_dir)
    hook.remove()
    assert summary["finished"]
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize("changed", [0, 1])
def test_records_older_than_a_field_are_completed_where_the_samples_are_theirs(
    tmp_path, loaded, model_dir, monkeypatch, changed
):
    summary = go(tmp_path, loaded, model_dir)
    rows = tmp_path / "rows.jsonl"
    whole = read_records(rows)
    older = [{name: value for name, value in record.items() if name != "truncated"} for record in whole]
    older[1]["prompt_tokens"] += changed
    rows.write_text("".join(json.dumps(record) + "\n" for record in older))
    monkeypatch.setattr(Engine, "run", lambda engine, jobs: iter(jobs))  # there are none
    assert go(tmp_path, loaded, model_dir)["date"] == summary["date"]
    assert read_records(rows) == (older if changed else whole)


def test_a_summary_names_the_machines_that_measured_its_records(tmp_path, loaded, model_dir):
    here = go(tmp_path, loaded, model_dir)["device"]
    rows = tmp_path / "rows.jsonl"
    records = [{**json.loads(line), "device": "another GPU"} for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert go(tmp_path, loaded, model_dir)["device"] == "another GPU"
    rows.write_text("".join(json.dumps(record) + "\n" for record in records[:-1]))
    assert go(tmp_path, loaded, model_dir)["device"] == ", ".join(sorted({"another GPU", here}))


def test_killed_run_resumes(tmp_path, model_dir):
    out = tmp_path / "out"
    arguments = command(
        "run", "passkey", "--model", model_dir, "--lengths", "900", "--method", "quest", "--token-budget", "64",
        "--set", "repeats=4", "--out", str(out),
    )  # fmt: skip
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "rows.jsonl").exists() and (out / "rows.jsonl").read_bytes().count(b"\n") >= 3:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    survived = (out / "rows.jsonl").read_bytes()
    survived = survived[: survived.rfind(b"\n") + 1]
    assert 3 <= survived.count(b"\n") < 40
    assert not (out / "summary.json").exists()

    assert invoke(*arguments[3:]).exit_code == 0
    records = read_records(out / "rows.jsonl")
    assert len({record_key(record) for record in records}) == len(records) == 40
    done = {record_key(record): record for record in records}
    for line in survived.splitlines():
        record = json.loads(line)
        assert done[record_key(record)] == record
    assert json.loads((out / "summary.json").read_text())["finished"]


def test_two_processes_split_the_records_and_merge_them(tmp_path, model_dir):
    arguments = ["run", "passkey", "--model", model_dir, *SMALL[:-2], "--limit", "5"]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "eval"]
    together, alone = tmp_path / "together", tmp_path / "alone"
    subprocess.run(
        [*launch, *arguments, "--out", str(together)], cwd=ROOT, env=environment(), check=True, capture_output=True
    )
    assert invoke(*arguments, "--out", str(alone)).exit_code == 0
    assert sorted(path.name for path in together.glob("*.json*")) == ["config.json", "rows.jsonl", "summary.json"]
    names = ("sample_id", "method", "prediction", "score", "kv_bytes", "metadata_bytes")
    split, whole = (
        [{name: record[name] for name in names} for record in read_records(folder / "rows.jsonl")]
        for folder in (together, alone)
    )
    assert split == whole
    assert len(whole) == 10


def test_one_bad_sample_is_recorded_and_the_run_continues(tmp_path, loaded, model_dir, monkeypatch):
    stock = PasskeyRetrieval.items

    def with_a_bad_one(self, setup):
        items = stock(self, setup)

        def broken():
            raise OSError("the disk is gone")

        object.__setattr__(items[0], "build", broken)
        return items

    with monkeypatch.context() as context:
        context.setattr(PasskeyRetrieval, "items", with_a_bad_one)
        summary = go(tmp_path, loaded, model_dir)
    records = read_records(tmp_path / "rows.jsonl")
    assert [record["error"] for record in records] == ["OSError: the disk is gone"] * 2 + [None] * 2
    assert records[0]["score"] is None
    assert summary["errors"] == 2
    assert [entry["errors"] for entry in summary["table"]] == [1, 1]
    repaired = go(tmp_path, loaded, model_dir)  # failed records are tried again
    assert repaired["errors"] == 0
    assert len(read_records(tmp_path / "rows.jsonl")) == 4


def test_method_that_fails_does_not_take_dense_with_it(loaded, model_dir, monkeypatch):
    model, tokenizer = loaded
    config = make_config({**PASSKEY, "model": model_dir})
    monkeypatch.setattr(METHODS["quest"], "decode", lambda *_: 1 / 0)
    sample = PasskeyRetrieval().items(_setup(tokenizer, lengths=(400,), tasks=("filler",)))[0].build()
    (_, _, dense), (_, _, quest) = Engine(model, tokenizer, config).run([(sample, make_variants(config))])
    assert dense["error"] is None
    assert quest == {"error": "ZeroDivisionError: division by zero"}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("passkeys",), "benchmark 'passkeys' is unknown; known: passkey, questpasskey, needle"),
        (("passkey", "--tasks", "fillers"), "passkey has no task 'fillers'; it has filler, book"),
        (("passkey", "--method", "qest"), "unknown method 'qest' (did you mean 'quest'?)"),
        (("passkey", "--method", "quest", "--token-budget", "8"), "token_budget must be at least one page"),
        (
            ("passkey", "--lengths", "2000"),
            "length=2000 is not allowed: at most the model's 1024 positions, and question and answer take ",
        ),
        (("passkey", "--lengths", "20"), "num_tokens=20 is too small"),
        (("passkey", "--lengths", "many"), "--lengths 'many' is not a comma-separated list"),
        (("passkey", "--set", "depth=0"), "passkey has no setting 'depth'; it has depths, repeats"),
        (("passkey", "--set", "depths=2"), "depths=2 is not allowed"),
        (("needle", "--set", "depths=[0.5,0.50000001]"), "depths=[0.5, 0.50000001] is not allowed: each once"),
        (("passkey", "--set", "repeats=0"), "repeats=0 is not allowed"),
        (("passkey", "--method", "quest", "--parameter", "size=2"), "unknown parameter 'size'"),
        (("passkey", "--method", ""), "--method '' has no entry; leave it out for its default"),
        (("passkey", "--lengths", ","), "--lengths ',' has no entry"),
        (
            ("passkey", "--lengths", "300", "--method", "duo_attention", "--parameter", "heads=nowhere.tsv"),
            "heads='nowhere.tsv' cannot be read: No such file or directory",
        ),
        (("passkey", "--tasks", "book", "--data-dir", "/nowhere"), "/nowhere"),
        (("pg19", "--set", "chunk=4", "--method", "quest"), "chunk=4 is not allowed with quest"),
        (("pg19", "--lengths", "200"), "scored=256 must be less than length=200"),
        (("pg19", "--lengths", "1", "--set", "scored=all"), "length=1 is not allowed with scored=all: at least 2"),
        (
            ("longanswer", "--lengths", "60", "--set", "new_tokens=20"),
            "length=60 is not allowed: more than new_tokens=20 and",
        ),
        (("needle", "--lengths", "60"), "length=60 is not allowed"),
        (("longbench", "--protocol-dir", "/nowhere"), "/nowhere"),
        (("passkey", "--dtype", "int8"), "dtype='int8' is not allowed"),
        (("passkey", "--limit", "0"), "limit=0 is not allowed"),
        (("passkey", "--only", "1"), "only='1' needs --config"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_records(tmp_path, model_dir, data_dir, arguments, said):
    given = [*arguments, "--model", model_dir, "--out", str(tmp_path / "out")]
    if "--data-dir" not in given:
        given += ["--data-dir", str(data_dir)]
    result = invoke("run", *given)
    assert result.exit_code == 2, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert not (tmp_path / "out").exists()  # the corrected command can use the folder


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_stablelm, r"StableLmForCausalLM.*; supported: llama"),
        (save_bloom, r"model type 'bloom' has no max_position_embeddings"),
    ],
)
def test_model_that_cannot_be_patched_is_refused_before_any_record(save, message, tmp_path):
    save(tmp_path / "m")
    result = invoke("run", "passkey", "--model", str(tmp_path / "m"), "--out", str(tmp_path / "out"), *SMALL)
    assert result.exit_code == 2
    assert re.search(message, result.stderr.replace("\n", " "))
    assert not (tmp_path / "out").exists()


def test_missing_data_is_reported_before_weights_are_loaded(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr("hf_sparse_attn.cli.models.load_model", lambda *_: pytest.fail("the weights were loaded"))
    result = invoke("run", "pg19", "--model", model_dir, "--lengths", "600", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "emozilla/pg19-test" in result.stderr
    assert "--data-dir" in result.stderr


def test_folder_of_another_configuration_is_refused(tmp_path, model_dir):
    given = ("run", "passkey", "--model", model_dir, "--out", str(tmp_path / "out"), *SMALL)
    assert invoke(*given).exit_code == 0
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    result = invoke(*given, "--seed", "1")
    assert result.exit_code == 2
    assert "belongs to another configuration: seed was 0 and is 1" in result.stderr
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == before
    result = invoke(*given[: -len(SMALL) - 1], model_dir, *SMALL)
    assert result.exit_code == 2
    assert "is not a run's: its config.json names no benchmark" in result.stderr
    assert "delete" not in result.stderr


def test_a_damaged_model_and_books_without_text_are_one_line(tmp_path, model_dir):
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    result = invoke("run", "passkey", "--model", str(damaged), "--out", str(tmp_path / "one"), *SMALL)
    assert result.exit_code == 2
    assert "could not be loaded" in result.stderr
    (tmp_path / "empty.txt").write_text("")
    given = ("--tasks", "book", "--lengths", "300", "--data-dir", str(tmp_path), "--out", str(tmp_path / "two"))
    result = invoke("run", "needle", "--model", model_dir, "--method", "quest", "--limit", "1", *given)
    assert result.exit_code == 2
    assert "have no sentence" in result.stderr


def test_nothing_but_errors_ends_with_code_1(tmp_path, model_dir, data_dir):
    (tmp_path / "short.txt").write_text("A short book.")
    result = invoke(
        "run", "pg19", "--model", model_dir, "--out", str(tmp_path / "out"), "--data-dir", str(tmp_path),
        "--lengths", "400",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "1 of 1 records are errors" in result.stderr


def test_a_sweep_goes_on_after_a_run_of_nothing_but_errors(tmp_path, model_dir):
    (tmp_path / "short.txt").write_text("A short book.")
    path = tmp_path / "sweep.yaml"
    path.write_text("runs: [{benchmark: pg19, lengths: [400]}, {benchmark: passkey, lengths: [300], limit: 1}]\n")
    given = ("--model", model_dir, "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert invoke("run", "--config", str(path), *given).exit_code == 1
    summaries = [json.loads((tmp_path / f"out/{name}/summary.json").read_text()) for name in ("01-pg19", "02-passkey")]
    assert [(summary["errors"], summary["rows"]) for summary in summaries] == [(1, 1), (0, 1)]


def test_sweep_runs_each_in_its_own_folder_and_reports(tmp_path, model_dir, data_dir):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"model: {model_dir}\nmethod: quest\ntoken_budget: 64\ndata_dir: {data_dir}\nruns:\n"
        "  - {benchmark: passkey, lengths: [300, 500], limit: 2}\n"
        "  - {benchmark: needle, tasks: [essay, book], lengths: 800, limit: 2}\n"
        "  - {benchmark: pg19, lengths: [400, 600], options: {scored: 96}}\n"
    )
    result = invoke("run", "--config", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    folders = sorted(folder.name for folder in (tmp_path / "out").iterdir())
    assert folders == ["01-passkey", "02-needle", "03-pg19"]
    counts = [len(read_records(tmp_path / "out" / folder / "rows.jsonl")) for folder in folders]
    assert counts == [8, 8, 4]
    page = invoke("report", str(tmp_path / "out"))
    assert page.exit_code == 0, page.output
    assert Path(page.stdout.strip()).read_text(encoding="utf-8").count("<img") >= 3


def short_sweep(tmp_path, model_dir):
    path = tmp_path / "sweep.yaml"
    runs = "".join(f"  - {{benchmark: passkey, lengths: {length}, limit: 1}}\n" for length in (200, 220, 240, 260))
    path.write_text(f"model: {model_dir}\nmethod: quest\ntoken_budget: 64\nruns:\n{runs}")
    return "run", "--config", str(path), "--out", str(tmp_path / "out")


def test_some_runs_of_a_sweep_have_the_folders_that_they_have_among_all(tmp_path, model_dir):
    result = invoke(*short_sweep(tmp_path, model_dir), "--only", "4,2-3")
    assert result.exit_code == 0, result.output
    assert sorted(folder.name for folder in (tmp_path / "out").iterdir()) == ["02-passkey", "03-passkey", "04-passkey"]
    assert {record["length"] for record in read_records(tmp_path / "out" / "03-passkey" / "rows.jsonl")} == {240}


def test_a_later_run_that_is_not_allowed_is_named_before_the_first(tmp_path, model_dir):
    arguments = short_sweep(tmp_path, model_dir)
    path = tmp_path / "sweep.yaml"
    path.write_text(path.read_text() + "  - {benchmark: passkey, method: [nope]}\n")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert f"error: {path}: run 5: unknown method 'nope'" in result.stderr
    assert not (tmp_path / "out").exists()
    assert invoke(*arguments, "--only", "1").exit_code == 0
    path.write_text("benchmark: passkey\nmodel: m\nmethod: [nope]\n")
    assert f"error: {path}: unknown method 'nope'" in invoke("run", "--config", str(path)).stderr


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("5", "--only '5' is not allowed: numbers from 1 to 4"),
        ("0,2", "--only '0,2' is not allowed: numbers from 1 to 4"),
        ("1-100000000000", "--only '1-100000000000' is not allowed: numbers from 1 to 4"),
        ("3-2", "--only '3-2' is not a list of whole numbers and of ranges"),
        ("a", "--only 'a' is not a list"),
        ("1-2-3", "--only '1-2-3' is not a list"),
        (",", "--only ',' names no number"),
    ],
)
def test_runs_that_a_sweep_lacks_are_named_before_any_work(tmp_path, model_dir, only, said):
    result = invoke(*short_sweep(tmp_path, model_dir), "--only", only)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_list_names_every_benchmark_and_table():
    text = invoke("list").stdout
    for name in (
        "passkey",
        "needle",
        "ruler",
        "longbench",
        "infinitebench",
        "pg19",
        "niah_multikey_3",
        "quest-1",
    ):
        assert name in text


class BadLogits:
    """While entered, the model's logits are NaN."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        def spoil(_, __, output):
            output.logits = output.logits * math.nan
            return output

        self.hook = self.model.register_forward_hook(spoil)

    def __exit__(self, *_):
        self.hook.remove()


def test_a_perplexity_of_nan_is_an_error(tmp_path, loaded, model_dir, data_dir):
    settings = {"benchmark": "pg19", "data_dir": str(data_dir), "lengths": [300], "options": {"scored": 32}}
    with BadLogits(loaded[0]):
        summary = go(tmp_path, loaded, model_dir, **settings)
    assert summary["errors"] == summary["rows"] == 2
    for record in read_records(tmp_path / "rows.jsonl"):
        assert record["error"].startswith("ValueError: perplexity=nan, nll_by_position=[[268, nan]] cannot be stored")
        assert record["perplexity"] is record["nll_by_position"] is None
        assert record["kv_bytes"] > 0
    assert go(tmp_path, loaded, model_dir, **settings)["errors"] == 0  # failed records are tried again


def with_changed_sample(monkeypatch, **changes):
    stock = PasskeyRetrieval.items

    def items(self, setup):
        found = stock(self, setup)
        build = found[0].build
        object.__setattr__(found[0], "build", lambda: replace(build(), **changes))
        return found

    monkeypatch.setattr(PasskeyRetrieval, "items", items)


@pytest.mark.parametrize("references", ["\ud83d", float("nan"), object(), ["fine", float("inf")]], ids=range(4))
def test_a_reference_that_json_lacks_ends_no_run(tmp_path, loaded, model_dir, monkeypatch, references):
    with_changed_sample(monkeypatch, references=references)
    summary = go(tmp_path, loaded, model_dir)
    records = read_records(tmp_path / "rows.jsonl")
    assert len(records) == 4
    if references == "\ud83d":  # can be stored and read back
        assert [record["references"] for record in records[:2]] == ["\ud83d"] * 2
        assert summary["errors"] == 0
    else:
        assert summary["errors"] == 2
        assert all(record["error"] and record["references"] is None for record in records[:2])
    assert [record["error"] for record in records[2:]] == [None, None]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_lone_surrogate_in_an_answer_is_kept(tmp_path, loaded, model_dir, monkeypatch):
    _, tokenizer = loaded
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: "an answer \ud83d")
    assert go(tmp_path, loaded, model_dir)["errors"] == 0
    assert {record["prediction"] for record in read_records(tmp_path / "rows.jsonl")} == {"an answer \ud83d"}


def test_a_lone_surrogate_in_a_prompt_is_an_error_record_that_names_it(tmp_path, loaded, model_dir, monkeypatch):
    stock = PasskeyRetrieval.items

    def items(self, setup):
        found = stock(self, setup)
        object.__setattr__(found[0], "build", lambda: encode_prompt(setup.tokenizer, "a \ud83d b", 1))
        object.__setattr__(found[0], "sample_id", "\udc80")
        return found

    monkeypatch.setattr(PasskeyRetrieval, "items", items)
    assert go(tmp_path, loaded, model_dir)["errors"] == 2
    records = read_records(tmp_path / "rows.jsonl")
    assert [record["sample_id"] for record in records] == ["\udc80", "\udc80", "0-0.3", "0-0.3"]
    assert r"'\ud83d' in position 2: surrogates not allowed" in records[0]["error"]
    write_report(tmp_path)


DAMAGED_SUMMARIES = {
    "{": "is not the summary of a run: ",
    "[]": "is not the summary of a run: it holds list",
    "{}": "is not the summary of a run: model_seconds=None",
    '{"model_seconds": NaN, "harness_seconds": 1}': "is not the summary of a run: model_seconds=nan",
}


@pytest.mark.parametrize("content", DAMAGED_SUMMARIES)
def test_a_damaged_summary_is_named_before_any_work(tmp_path, loaded, model_dir, content):
    go(tmp_path, loaded, model_dir)
    records = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(EvalError, match=rf"summary\.json {DAMAGED_SUMMARIES[content]}"):
        go(tmp_path, loaded, model_dir)
    assert (tmp_path / "rows.jsonl").read_bytes() == records
    (tmp_path / "summary.json").unlink()
    assert go(tmp_path, loaded, model_dir)["finished"]


@pytest.mark.parametrize("name", ["config.json", "summary.json", "rows.jsonl"])
def test_a_damaged_file_is_one_line_and_exit_code_2(tmp_path, model_dir, name):
    given = ("run", "passkey", "--model", model_dir, "--out", str(tmp_path / "out"), *SMALL)
    assert invoke(*given).exit_code == 0
    (tmp_path / "out" / name).write_text('{"task": \n' * 2)
    for arguments in (given, ("report", str(tmp_path / "out"))):
        result = invoke(*arguments)
        if (
            arguments[0] == "report" and name != "rows.jsonl"
        ):  # which shows the configuration unchanged and never reads the summary
            assert result.exit_code == 0, result.output
            continue
        assert result.exit_code == 2, result.output
        (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert f"{tmp_path}/out/{name}" in error
        assert "Traceback" not in result.output


@pytest.mark.parametrize("at", ["rows.jsonl", "summary.json"])
def test_a_full_disk_is_one_line_and_keeps_earlier_records(tmp_path, loaded, model_dir, monkeypatch, at):
    stock, calls = Path.open, []

    def full(self, mode="r", *arguments, **options):
        opened = stock(self, mode, *arguments, **options)
        if at in self.name and mode in ("ab", "wb"):
            calls.append(self)
            if len(calls) > (2 if at == "rows.jsonl" else 0):
                raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return opened

    with monkeypatch.context() as context:
        context.setattr(Path, "open", full)
        with pytest.raises(EvalError, match=rf"{at} cannot be written: .*No space left on device.*kept"):
            go(tmp_path, loaded, model_dir)
    kept = read_records(tmp_path / "rows.jsonl")
    assert len(kept) == (2 if at == "rows.jsonl" else 4)
    assert go(tmp_path, loaded, model_dir)["finished"]
    assert read_records(tmp_path / "rows.jsonl")[: len(kept)] == kept


def test_records_can_be_read_back(tmp_path, loaded, model_dir, monkeypatch):
    def measured(self, jobs):
        ((_, variants),) = jobs
        for variant, tokens in zip(variants, (10**30, 5), strict=True):
            yield 0, variant, {"prediction": "p", "prompt_tokens": tokens, "error": None}

    monkeypatch.setattr(Engine, "run", measured)
    go(tmp_path, loaded, model_dir, limit=1)
    odd, fine = read_records(tmp_path / "rows.jsonl")
    assert odd["error"].startswith("ValueError: prompt_tokens=1000000")
    assert odd["prompt_tokens"] is fine["error"] is None


def test_parameters_that_json_lacks_are_kept_as_words(tmp_path, loaded, model_dir, monkeypatch):
    monkeypatch.setattr("eval.records.asdict", lambda method: {"cap": math.inf, "page_size": 16})
    assert go(tmp_path, loaded, model_dir, limit=1)["errors"] == 0
    assert {str(record["parameters"]) for record in read_records(tmp_path / "rows.jsonl")} == {
        "{'cap': 'inf', 'page_size': 16}"
    }
