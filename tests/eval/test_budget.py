"""The search for the smallest budgets: bisection, what is stored and measured, divergence, results and plots."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from eval import budget_table
from eval.benchmarks.base import Sample
from eval.bisection import bounds, is_monotone, next_probe, smallest
from eval.budget import search
from eval.budget_command import make_target
from eval.cli import app
from eval.config import make_config
from eval.continuations import _divergence, dense_path, follow_dense
from eval.errors import EvalError
from eval.findings import Target
from eval.knobs import BUDGET, KNOBS, Ladders, knob_of
from eval.markdown import results_tables
from eval.processes import Processes
from eval.report import write_report
from eval.report.budgets import budget_picture
from eval.store import read_records
from hf_sparse_attn import METHODS, SparseCache
from hf_sparse_attn.cli.greedy import forward_all
from hf_sparse_attn.cli.models import load_model

STEPS = {"quest": [48, 64, 128, 256, 512]}


class Loaded:
    """A source of a loaded model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def describe(self, config):
        return self.tokenizer, self.model.config

    def load(self, config):
        return self.model


@pytest.fixture(scope="module")
def loaded(model_dir):
    return Loaded(*load_model(model_dir, torch.float32, "cpu"))


@pytest.fixture
def scored_by_dense(monkeypatch):
    """Scores of 1 for dense attention's answer and of 0 for others: dense attention is measured first."""
    answers: dict[str, str] = {}

    def score(benchmark, task, prediction, references, all_classes=None):
        return float(answers.setdefault(references, prediction) == prediction)

    monkeypatch.setattr("eval.records.metrics.score", score)


def go(out: Path, loaded: Loaded, target: Target, seen: list[Any] | None = None, **values: Any) -> dict[str, Any]:
    given = {
        "benchmark": "passkey",
        "model": "tiny",
        "lengths": [400],
        "method": ["quest"],
        "limit": 2,
        "question": "prefill",
        **values,
    }

    def on_record(done, total, record):
        if record is not None and seen is not None:
            seen.append((record["method"], record["token_budget"]))

    return search(make_config(given), target, out, loaded, Processes(), on_record)


@pytest.mark.parametrize("count", range(1, 18))
def test_bisection_finds_the_first_step_that_reaches_with_few_probes(count):
    for first in range(count + 1):
        reached: dict[int, bool] = {}
        while (step := next_probe(reached, count)) is not None:
            assert step not in reached
            reached[step] = step >= first
        assert smallest(reached) == (first if first < count else None)
        assert len(reached) <= math.ceil(math.log2(count + 1))
        assert is_monotone(reached)


def test_a_larger_step_that_fails_outweighs_smaller_ones_that_reach():
    reached = {2: True, 5: False, 9: True}
    assert bounds(reached) == (6, 9)
    assert next_probe(reached, 12) == 7
    assert smallest({**reached, 7: False, 8: True}) == 8
    assert not is_monotone(reached)
    assert smallest({3: True, 4: False}) is None
    assert next_probe({3: True, 4: False}, 5) is None


def test_every_knob_is_a_hyperparameter_and_its_steps_read_more_and_more():
    for name, method in METHODS.items():
        if method.sparse_phases:
            assert knob_of(name).parameter in {field.name for field in fields(method)}
            assert len(Ladders((name,), {}, {}).of(name, 1000).steps) > 5
    assert set(KNOBS) == {"infinigen", "psa", "rabitqcache", "squeezed"}
    assert BUDGET.steps(400) == [32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert BUDGET.steps(128)[-1] == 128
    assert BUDGET.steps(1) == [32]
    thresholds, sparsities = (KNOBS[name].steps(1) for name in ("psa", "squeezed"))
    assert thresholds == sorted(set(thresholds))
    assert sparsities == sorted(set(sparsities), reverse=True)
    assert (thresholds[-1], sparsities[-1]) == (1.0, 0.0)  # everything
    assert all(0 < value < 1 for value in thresholds[:-1] + sparsities[:-1])
    assert {0.5, 0.75, 0.875, 0.9375} < {*thresholds} & {*sparsities}
    assert {1 / 64, 0.25, 0.375, 0.625} < {*thresholds}
    assert sparsities[0] == 1 - 1 / 1024


def test_steps_that_a_method_refuses_are_left_out_unless_they_were_asked_for():
    ladder = Ladders(("quest",), {"page_size": 64, "sink_tokens": 0}, {}).of("quest", 300)
    assert ladder.steps == (64, 96, 128, 192, 256, 384)
    assert [variant.token_budget for variant in ladder.variants] == list(ladder.steps)
    named = Ladders(("squeezed",), {}, {"squeezed": [0.25, 0.5]}).of("squeezed", 300)
    assert named.steps == (0.5, 0.25)  # the least read first
    assert [variant.name for variant in named.variants] == ["target_sparsity=0.5", "target_sparsity=0.25"]


@pytest.mark.parametrize(
    ("methods", "parameters", "steps", "message"),
    [
        (("quest",), {}, {"quest": [8]}, r"steps: quest token_budget=8 is not allowed: quest: token_budget must be"),
        (("quest",), {}, {"tokenselect": [8]}, "steps: 'tokenselect' is not among the searched methods quest"),
        (("quest",), {}, {"quest": 64}, r"steps: quest=64 is not allowed: a list of numbers"),
        (("quest",), {}, {"quest": ["x"]}, r"steps: quest=\['x'\] is not allowed: a list of numbers"),
        (("quest",), {"token_budget": 64}, {}, "token_budget of quest is searched"),
        (("squeezed",), {"squeezed.target_sparsity": 0.5}, {}, "target_sparsity of squeezed is searched"),
        (("quest",), {"page_size": [8, 16]}, {}, r"page_size=\[8, 16\] is not allowed: a search takes one value"),
        (("quest",), {"page_size": 3}, {}, "page_size must be a power of two"),
        (("full",), {}, {}, "method: at least one method besides full"),
        (("quests",), {}, {}, "did you mean 'quest'"),
    ],
)
def test_bad_methods_parameters_and_steps(methods, parameters, steps, message):
    with pytest.raises(EvalError, match=message):
        Ladders(methods, parameters, steps)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of the two must be given"),
        ({"target": 0.9, "divergence": 0.1}, "exactly one of the two must be given"),
        ({"target": 1.5}, "target=1.5 is not allowed: a number above 0 and at most 1"),
        ({"target": 0}, "target=0 is not allowed"),
        ({"divergence": -1.0}, "divergence=-1.0 is not allowed: a number above 0"),
        ({"target": "high"}, "target='high' is not allowed"),
        ({"target": 0.9, "pool": 1}, "pool=1 is not allowed: true or false"),
    ],
)
def test_bad_targets(values, message):
    with pytest.raises(EvalError, match=message):
        Target(**values)


def test_a_search_by_score_stores_ordinary_records_and_measures_nothing_twice(tmp_path, loaded, scored_by_dense):
    seen: list[Any] = []
    report = go(tmp_path, loaded, Target(target=1.0, steps=STEPS), seen)
    [entry] = report["results"]
    assert (entry["task"], entry["length"], entry["method"]) == ("filler", 400, "quest")
    assert entry["steps"] == STEPS["quest"]
    assert entry["dense"]["score"] == 1.0
    probes = {probe["setting"]: probe for probe in entry["probes"]}
    assert entry["setting"] == min(setting for setting, probe in probes.items() if probe["reached"])
    assert entry["found"]["score"] == 1.0
    assert all(probe["reached"] == (probe["score"] == 1.0) for probe in probes.values())
    fractions = [probe["kv_fraction"] for probe in entry["probes"]]
    assert fractions == sorted(fractions)
    assert json.loads((tmp_path / "budget.json").read_text()) == report
    records = read_records(tmp_path / "rows.jsonl")
    assert len(records) == len(seen) == 2 * (1 + len(probes))
    assert {record["divergence"] for record in records} == {None}

    again: list[Any] = []
    assert go(tmp_path, loaded, Target(target=1.0, steps=STEPS), again)["results"] == report["results"]
    assert again == []
    easier = go(tmp_path, loaded, Target(target=0.01, steps=STEPS), again)["results"][0]
    assert not {budget for _, budget in again} & {None, *probes}
    assert easier["setting"] <= entry["setting"]


def test_a_search_by_divergence_feeds_dense_attention_s_answer(tmp_path, loaded):
    seen: list[Any] = []
    wanted = Target(divergence=1e-4, steps={"quest": [64, 512], "squeezed": [0.9, 0.0]})
    report = go(tmp_path, loaded, wanted, seen, method=["quest", "squeezed"], limit=1)
    quest, squeezed = report["results"]
    assert [(probe["setting"], probe["reached"]) for probe in quest["probes"]] == [(64, False), (512, True)]
    assert (squeezed["parameter"], squeezed["setting"]) == ("target_sparsity", 0.0)
    assert squeezed["found"]["divergence"] == pytest.approx(0, abs=1e-8)
    by_budget = {(record["method"], record["token_budget"]): record for record in read_records(tmp_path / "rows.jsonl")}
    dense, small = by_budget["full", None], by_budget["quest", 64]
    assert dense["prediction"] is not None
    assert dense["divergence"] is small["prediction"] is small["score"] is None
    assert 0 < small["divergence"] <= small["divergence_max"]
    assert 0 <= small["top_agreement"] <= 1
    assert small["dense_bytes"] == dense["dense_bytes"]  # the same tokens were fed
    assert by_budget["quest", 512]["divergence"] < 1e-6
    with pytest.raises(EvalError, match="follows_dense was True and is False"):
        go(tmp_path, loaded, Target(target=0.9), limit=1)


def test_pooled_tasks_share_a_setting_and_weigh_by_their_samples(tmp_path, loaded, data_dir):
    wanted = {"tasks": ["filler", "book"], "data_dir": str(data_dir), "limit": 1}
    apart = Target(divergence=1e-4, steps={"quest": [64, 512]})
    filler, book = go(tmp_path, loaded, apart, **wanted)["results"]
    seen: list[Any] = []
    [pooled] = go(tmp_path, loaded, replace(apart, pool=True), seen, **wanted)["results"]
    assert seen == []
    assert (pooled["task"], pooled["length"]) == ("all tasks", 400)
    assert pooled["dense"]["samples"] == filler["dense"]["samples"] + book["dense"]["samples"] == 2
    for one, two, both in zip(filler["probes"], book["probes"], pooled["probes"], strict=True):
        assert both["divergence"] == pytest.approx((one["divergence"] + two["divergence"]) / 2)


def test_another_method_joins_a_finished_search(tmp_path, loaded):
    go(tmp_path, loaded, Target(divergence=0.1, steps=STEPS), limit=1)
    seen: list[Any] = []
    wanted = Target(divergence=0.1, steps=STEPS | {"tokenselect": [128, 512]})
    report = go(tmp_path, loaded, wanted, seen, method=["quest", "tokenselect"], limit=1)
    assert {method for method, _ in seen} == {"tokenselect"}
    assert [entry["method"] for entry in report["results"]] == ["quest", "tokenselect"]


def test_perplexities_are_compared_by_their_inverse(tmp_path, loaded, data_dir):
    wanted = Target(target=0.5, steps={"quest": [64, 512]})
    pg19 = {"benchmark": "pg19", "lengths": [300], "data_dir": str(data_dir), "options": {"scored": 8}}
    [entry] = go(tmp_path, loaded, wanted, limit=1, **pg19)["results"]
    assert entry["setting"] == 64  # random weights predict as badly from any part of the text
    assert entry["found"]["perplexity"] == pytest.approx(entry["dense"]["perplexity"], rel=0.5)
    target = Target(target=0.9)
    assert target.is_reached({"perplexity": 10.0}, {"perplexity": 9.0})
    assert not target.is_reached({"perplexity": 10.1}, {"perplexity": 9.0})


def test_tasks_that_dense_attention_fails_are_not_searched(tmp_path, loaded):
    seen: list[Any] = []
    [entry] = go(tmp_path, loaded, Target(target=0.98), seen)["results"]
    assert entry["dense"]["score"] == 0.0  # random weights find no passkey
    assert (entry["setting"], entry["reason"], entry["probes"]) == (None, "dense attention scores 0", [])
    assert {method for method, _ in seen} == {"full"}
    assert budget_table.setting(entry) == "none: dense attention scores 0"


def test_a_step_with_failed_samples_does_not_reach(tmp_path, loaded, scored_by_dense, monkeypatch):
    def fails(self, *arguments):
        raise RuntimeError("no")

    monkeypatch.setattr("hf_sparse_attn.methods.Quest.decode", fails)
    [entry] = go(tmp_path, loaded, Target(target=0.5, steps={"quest": [64, 128]}), limit=1)["results"]
    assert entry["reason"] == "no step reaches the target"
    assert [(probe["reached"], probe["failed"], probe["samples"]) for probe in entry["probes"]] == [(False, 1, 0)]


def test_a_resumed_search_probes_a_step_again_whose_samples_failed(tmp_path, loaded, monkeypatch):
    def fails(self, *arguments):
        raise RuntimeError("out of memory")

    target = Target(divergence=100.0, steps={"quest": [64]})
    with monkeypatch.context() as broken:
        broken.setattr("hf_sparse_attn.methods.Quest.decode", fails)
        [entry] = go(tmp_path, loaded, target)["results"]
        assert (entry["setting"], [probe["failed"] for probe in entry["probes"]]) == (None, [2])
        seen: list[Any] = []
        [entry] = go(tmp_path, loaded, target, seen)["results"]  # fails once more, and ends
        assert (entry["setting"], seen) == (None, 2 * [("quest", 64)])
    seen = []
    [entry] = go(tmp_path, loaded, target, seen)["results"]
    assert (entry["setting"], entry["found"]["samples"], entry["found"]["failed"]) == (64, 2, 0)
    assert seen == 2 * [("quest", 64)]
    assert [each["error"] for each in read_records(tmp_path / "rows.jsonl")] == 4 * [None]


def test_the_divergence_is_that_of_the_definition():
    torch.manual_seed(0)
    dense, own = torch.randn(2, 50)
    p, q = dense.double().softmax(0), own.double().softmax(0)
    assert _divergence(dense, own) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-12)
    assert _divergence(dense, dense) == 0.0


@pytest.mark.parametrize("token_by_token", [True, False])
def test_following_dense_attention_densely_finds_no_divergence(loaded, token_by_token):
    model = loaded.model
    ids = torch.randint(3, 200, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    sample = Sample(ids[:32], ids[32:], references="", max_new_tokens=5)

    def prefilled() -> SparseCache:
        cache = SparseCache(model.config, "full")
        with torch.inference_mode():
            model(torch.tensor([sample.material_ids]), past_key_values=cache)
        return cache

    path = dense_path(model, sample, prefilled(), token_by_token, stop_ids=())
    prompt = torch.tensor([ids])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert path.fed_ids == tuple(expected[0, 40:44].tolist())
    assert [int(logits.argmax()) for logits in path.logits] == expected[0, 40:].tolist()
    followed = follow_dense(model, sample, prefilled(), path, token_by_token)
    assert followed.result == {
        "divergence": 0.0,
        "divergence_max": 0.0,
        "top_agreement": 1.0,
        "divergence_by_position": [[0, 0.0]],
    }
    assert followed.decode_steps == 4
    assert followed.single_token_steps == (12 if token_by_token else 4)


def test_a_given_text_is_followed_instead_of_an_answer(loaded):
    sample = Sample([5, 6, 7], [8, 9], references=None, max_new_tokens=0, forced_ids=[10, 11, 12])
    path = dense_path(loaded.model, sample, SparseCache(loaded.model.config, "full"), True, stop_ids=())
    assert path.fed_ids == (10, 11)
    assert len(path.logits) == 3


def test_a_given_text_is_followed_in_its_chunks(loaded, monkeypatch):
    fed = []
    monkeypatch.setattr(
        "eval.feed.forward_all",
        lambda model, cache, ids: fed.append(len(ids)) or forward_all(model, cache, ids),
    )
    sample = Sample([], [5, 6, 7], None, 0, forced_ids=list(range(10, 20)), forced_chunk=5)
    path = dense_path(loaded.model, sample, SparseCache(loaded.model.config, "full"), True, stop_ids=())
    assert fed == [5, 5, 2]
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([[5, 6, 7, *range(10, 19)]])).logits[0, 2:]
    torch.testing.assert_close(torch.stack(list(path.logits)), expected)
    followed = follow_dense(loaded.model, sample, SparseCache(loaded.model.config, "full"), path, True)
    assert fed == 2 * [5, 5, 2]
    assert followed.result["divergence"] == 0.0
    assert (followed.decode_steps, followed.single_token_steps) == (0, 0)


ENTRY: dict[str, Any] = {
    "task": "qasper", "length": 2000, "method": "quest", "parameter": "token_budget", "setting": 1024, "reason": None,
    "found": {
        "setting": 1024, "samples": 5, "failed": 0, "score": 0.8, "perplexity": None, "divergence": None,
        "kv_fraction": 0.25, "realised_budget": 1000.4, "score_difference_error": 0.02,
    },
    "dense": {"samples": 5, "score": 0.81, "perplexity": None, "prompt_tokens": 2000.0},
    "steps": [512, 1024], "is_monotone": True, "probes": [],
}  # fmt: skip
NONE = ENTRY | {"method": "psa", "parameter": "threshold", "setting": None, "found": None, "reason": "no step"}
REPORT: dict[str, Any] = {
    "config": {
        "benchmark": "ruler", "model": "/x/tiny.gguf", "method": ["quest", "psa"], "lengths": [2000], "limit": 5,
        "question": "decode",
    },
    "search": {"target": 0.98, "divergence": None, "steps": {}},
    "model": "/x/tiny.gguf", "dtype": "float32", "device": "a CPU", "versions": {"torch": "2"}, "seed": 3,
    "protocol": "ruler", "protocol_sha256": "abcdef" * 10, "date": "2026-01-02T00:00:00", "results": [ENTRY, NONE],
}  # fmt: skip


def test_results_are_tables_in_the_terminal_and_in_the_documentation(tmp_path):
    folder = tmp_path / "budgets" / "ruler"
    folder.mkdir(parents=True)
    (folder / "budget.json").write_text(json.dumps(REPORT))
    with pytest.raises(EvalError, match="holds no"):
        results_tables(tmp_path / "budgets")
    text = results_tables(tmp_path)
    assert "## Dense-equivalent budgets, ruler: tiny.gguf, float32, a CPU\n" in text
    assert "`python -m eval budget ruler --target 0.98 --method quest,psa --lengths 2000 --limit 5`" in text
    assert "| 2,000 | quest | token_budget 1,024 | 25.0 | 1,000 | 80.0 | 2.0 | 81.0 | 5 |" in text
    assert "| 2,000 | psa | none: no step | - | - | - | - | 81.0 | 5 |" in text
    assert "score at least 0.98 of dense attention's" in text
    assert budget_table.budget_table(REPORT).row_count == 2


def test_tables_by_divergence_and_by_perplexity():
    diverging = REPORT | {"search": {"target": None, "divergence": 0.01, "steps": {}}}
    assert "KL, nats per token" in budget_table.head(diverging)
    assert "at most 0.01 nats per token" in budget_table.criterion(diverging)
    dense = ENTRY["dense"] | {"perplexity": 9.5, "score": None}
    found = ENTRY["found"] | {"perplexity": 9.6, "score": None}
    perplexed = REPORT | {"results": [ENTRY | {"dense": dense, "found": found, "is_monotone": False}]}
    assert budget_table.lines(perplexed)[0][3:] == [
        *("token_budget 1,024 (not monotone)", "25.0", "1,000", "9.600", "9.500", "5")
    ]
    assert "inverse perplexity" in budget_table.criterion(perplexed)
    assert budget_table.setting(ENTRY | {"setting": 512}) == "token_budget 512 (or less read)"
    for report in (REPORT, diverging, perplexed):
        assert {len(row) for row in budget_table.lines(report)} == {len(budget_table.head(report))}


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps(REPORT | {"results": [{}]})])
def test_a_damaged_result_is_named(tmp_path, content):
    folder = tmp_path / "budgets" / "it"
    folder.mkdir(parents=True)
    (folder / "budget.json").write_text(content)
    (tmp_path / "speed").mkdir()
    with pytest.raises(EvalError, match=r"it/budget\.json is not a report of `python -m eval budget`"):
        results_tables(tmp_path)


def test_the_plot_has_a_bar_for_each_method_and_task():
    picture = budget_picture(REPORT, "budget")
    assert picture is not None
    [axis] = picture.figure.axes
    assert [patch.get_height() for patch in axis.patches] == [25.0, 0.0]
    assert [text.get_text() for text in axis.texts] == ["none"]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["qasper\n2,000"]
    assert "quest: token_budget 1,024, 25.0 % read; qasper at 2,000 tokens, psa: none: no step." in picture.alt
    assert picture.png().startswith(b"\x89PNG")
    assert budget_picture(REPORT | {"results": [NONE]}, "budget") is None


def test_the_command_searches_plots_and_reports(tmp_path, model_dir):
    path = tmp_path / "search.yaml"
    path.write_text(
        f"model: {model_dir}\nmethod: quest\nlimit: 1\nquestion: prefill\n"
        "search: {divergence: 9.0, steps: {quest: [64, 128]}}\n"
        "runs: [{benchmark: passkey, lengths: 300}]\n"
    )
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["budget", "--config", str(path), "--out", str(out)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "token_budget 64" in result.output
    folder = out / "01-passkey"
    assert {each.name for each in folder.iterdir()} >= {"config.json", "rows.jsonl", "budget.json", "budget.png"}
    page = write_report(out, tmp_path / "report").read_text(encoding="utf-8")
    assert "Smallest budgets, passkey" in page
    assert (tmp_path / "report" / "budget-1.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "2"], "target=2.0 is not allowed"),
        (["--target", "0.9", "--divergence", "1"], "exactly one of the two"),
        (["--steps", "quest=[4]"], "token_budget=4 is not allowed"),
        (["--parameter", "token_budget=64"], "is searched; name its steps with --steps"),
        (["--method", "full"], "at least one method besides full"),
    ],
)
def test_bad_input_is_one_line(tmp_path, model_dir, arguments, message):
    method = [] if "--method" in arguments else ["--method", "quest"]
    words = ["budget", "passkey", "--model", model_dir, "--out", str(tmp_path / "out"), *method, *arguments]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("error:")
    assert not (tmp_path / "out").exists()


def test_the_command_line_s_target_replaces_the_file_s():
    assert make_target({}, {}) == Target(target=0.98)
    assert make_target({"divergence": 0.1}, {}) == Target(divergence=0.1)
    assert make_target({"divergence": 0.1, "steps": {"quest": [64]}}, {"target": 0.5}) == Target(
        target=0.5, steps={"quest": [64]}
    )
    with pytest.raises(EvalError, match="search: 'targets' is unknown \\(did you mean 'target'"):
        make_target({"targets": 1}, {})
    with pytest.raises(EvalError, match=r"search: steps=\[64\] is not allowed: a mapping"):
        make_target({"steps": [64]}, {})


def test_runs_of_a_sweep_share_steps_of_methods_that_some_of_them_search(tmp_path, model_dir):
    path = tmp_path / "search.yaml"
    shared = f"model: {model_dir}\nlimit: 1\nquestion: prefill\nbenchmark: passkey\nlengths: 300\n"
    runs = "runs: [{method: [quest, arkvale]}, {method: quest, parameters: {quest.page_size: 8}}]\n"
    path.write_text(shared + "search: {divergence: 9.0, steps: {quest: [64], arkvale: [64]}}\n" + runs)
    result = CliRunner().invoke(app, ["budget", "--config", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    folders = sorted(folder.parent.name for folder in (tmp_path / "out").rglob("budget.json"))
    assert folders == ["01-passkey", "02-passkey"]
    path.write_text(shared + "search: {divergence: 9.0, steps: {quest: [64], psa: [0.5]}}\n" + runs)
    result = CliRunner().invoke(app, ["budget", "--config", str(path), "--out", str(tmp_path / "new")])
    assert "steps: 'psa' is not among the searched methods" in result.output


def test_budgets_cannot_be_both_searched_and_given(tmp_path, loaded):
    with pytest.raises(EvalError, match="the budget is searched"):
        go(tmp_path, loaded, Target(target=0.9), token_budget=[64])
