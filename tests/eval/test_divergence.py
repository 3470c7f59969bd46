"""Runs that measure the divergence from dense attention: records, scores beside it, resumption, tables, settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.config import make_config, read_sweep
from eval.continuations import Continuation, DensePath, same_answer
from eval.engine import make_variants
from eval.errors import EvalError
from eval.processes import Processes
from eval.runner import run
from eval.store import read_records
from eval.terminal import summary_table
from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.models import load_model
from tests.eval.test_run import Loaded, invoke
from tests.models import SPARSE

PASSKEY = {"benchmark": "passkey", "lengths": [400], "method": ["quest"], "token_budget": [64, 512], "limit": 2}


@pytest.fixture(scope="module")
def loaded(model_dir):
    return load_model(model_dir, torch.float32, "cpu")


def go(out, loaded, model_dir, seen=None, **values):
    config = make_config({**PASSKEY, "model": model_dir, **values})
    records: list[Any] = [] if seen is None else seen
    source = Loaded(*loaded)
    return run(config, out, source, Processes(), lambda done, total, record: record and records.append(record))


def test_the_divergence_alone_has_no_answers_of_the_methods(tmp_path, loaded, model_dir):
    summary = go(tmp_path, loaded, model_dir, measure="divergence")
    for dense, small, whole in _by_sample(tmp_path):
        assert (dense["divergence"], dense["prediction"] is None) == (None, False)
        assert dense["score"] in (0.0, 1.0)
        assert 0 < small["divergence"] <= small["divergence_max"]
        assert 0 <= small["top_agreement"] <= 1
        assert small["prediction"] is small["score"] is None
        assert whole["divergence"] < 1e-6
        assert small["dense_bytes"] == dense["dense_bytes"]  # the same tokens were fed
        assert small["kv_fraction"] < 1
    full, small, whole = summary["table"]
    samples = [record for record in read_records(tmp_path / "rows.jsonl") if record["token_budget"] == 64]
    assert small["divergence"] == pytest.approx(sum(record["divergence"] for record in samples) / 2)
    assert small["divergence_max"] == max(record["divergence_max"] for record in samples)
    assert (full["divergence"], whole["top_agreement"], whole["score"]) == (None, 1.0, None)


def _by_sample(folder):
    records = read_records(folder / "rows.jsonl")
    return [records[begin : begin + 3] for begin in range(0, len(records), 3)]


def test_both_measures_give_the_scores_and_the_divergences_of_each(tmp_path, loaded, model_dir):
    """The answer of a method that agrees with dense attention everywhere is dense attention's; others answer anew."""
    for measure in ("score", "divergence", ["score", "divergence"]):
        go(tmp_path / "".join(measure), loaded, model_dir, measure=measure)
    kept: dict[bool, int] = {True: 0, False: 0}
    for scored, followed, both in zip(
        *(read_records(tmp_path / name / "rows.jsonl") for name in ("score", "divergence", "scoredivergence")),
        strict=True,
    ):
        assert both["prediction"] == scored["prediction"]
        assert (both["score"], both["new_tokens"]) == (scored["score"], scored["new_tokens"])
        for name in ("divergence", "divergence_max", "top_agreement", "kv_bytes", "metadata_bytes", "dense_bytes"):
            assert both[name] == followed[name]
        if both["top_agreement"] is not None:
            kept[both["top_agreement"] == 1.0] += 1
    assert all(kept.values())  # both ways to an answer were taken


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"full"}))
def test_an_answer_departs_from_dense_attention_where_it_would_by_itself(tmp_path, loaded, model_dir, method):
    """The fork in which a method's own answer goes on gives what a new answer gives, whatever state a method has."""
    given = {"method": method, **SPARSE.get(method, {}), **({"n_local": 16} if method == "tokenselect" else {})}
    if "token_budget" in METHODS[method].__dataclass_fields__:
        given["token_budget"] = 100 if method == "infllm" else 64
    settings = {**PASSKEY, "method": [], "token_budget": [], "variants": [given], "question": "decode"}
    for measure in ("score", ["score", "divergence"]):
        go(tmp_path / "".join(measure), loaded, model_dir, **settings, measure=measure)
    own, beside = (read_records(tmp_path / name / "rows.jsonl") for name in ("score", "scoredivergence"))
    assert [record["error"] for record in beside] == [None] * 4
    assert [record["prediction"] for record in beside] == [record["prediction"] for record in own]
    assert [record["new_tokens"] for record in beside] == [record["new_tokens"] for record in own]
    if method not in ("ntk", "self_extend"):  # which change positions alone; the tiny model hardly heeds them
        assert min(record["top_agreement"] or 1.0 for record in beside) < 1  # it did depart


def test_perplexities_are_measured_beside_the_divergence_along_the_text(tmp_path, loaded, model_dir, data_dir):
    pg19 = {"benchmark": "pg19", "lengths": [300], "data_dir": str(data_dir), "options": {"scored": 8}, "limit": 1}
    go(tmp_path / "both", loaded, model_dir, **pg19, measure=["score", "divergence"])
    go(tmp_path / "score", loaded, model_dir, **pg19)
    both, score = (read_records(tmp_path / name / "rows.jsonl") for name in ("both", "score"))
    assert [record["perplexity"] for record in both] == [record["perplexity"] for record in score]
    assert both[1]["divergence"] > both[2]["divergence"] >= 0
    assert both[1]["nll_by_position"] == score[1]["nll_by_position"]


def test_a_finished_run_is_not_run_again_and_another_measure_is_another_run(tmp_path, loaded, model_dir):
    first, again = [], []
    go(tmp_path, loaded, model_dir, first, measure="divergence")
    go(tmp_path, loaded, model_dir, again, measure="divergence")
    assert (len(first), len(again)) == (6, 0)
    with pytest.raises(EvalError, match=r"measure was \['divergence'\] and is \['score'\]"):
        go(tmp_path, loaded, model_dir)


def test_folders_from_before_there_was_a_choice_measured_scores(tmp_path, loaded, model_dir):
    go(tmp_path, loaded, model_dir)
    config = tmp_path / "config.json"
    lines = config.read_text().splitlines()
    kept = "\n".join(line for line in lines if '"measure"' not in line and '"score"' not in line)
    config.write_text(kept.replace('  ],\n  "dtype"', '  "dtype"'))
    seen: list[Any] = []
    go(tmp_path, loaded, model_dir, seen)
    assert seen == []


def test_the_terminal_shows_divergences_where_they_were_measured(tmp_path, loaded, model_dir):
    names = [column.header for column in summary_table(go(tmp_path / "a", loaded, model_dir), "a").columns]
    assert not {"mean KL", "max KL", "agreement"} & set(names)
    summary = go(tmp_path / "b", loaded, model_dir, measure=["score", "divergence"])
    table = summary_table(summary, "a")
    names = [column.header for column in table.columns]
    assert names[names.index("score") + 1 :][:3] == ["mean KL", "max KL", "agreement"]
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["mean KL"] == ["-", *(f"{entry['divergence']:.4f}" for entry in summary["table"][1:])]
    assert cells["agreement"][2] == "100.0%"


def test_the_command_takes_measures_and_refuses_others(tmp_path, model_dir):
    small = ("passkey", "--model", model_dir, "--lengths", "400", "--method", "quest", "--token-budget", "64")
    result = invoke("run", *small, "--limit", "1", "--measure", "score,divergence", "--out", str(tmp_path / "a"))
    assert result.exit_code == 0, result.output
    assert "mean KL" in result.output
    result = invoke("run", *small, "--measure", "speed", "--out", str(tmp_path / "b"))
    assert result.exit_code == 2
    assert "measure='speed' is not allowed: one of score, divergence" in result.output
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (["score", "score"], "duplicate"),
        ([], r"measure=\(\) is not allowed: a list of at least 1"),
        (["score", 1], "measure=1 is not allowed: one of score"),
    ],
)
def test_measures_that_are_not_allowed_are_refused(measure, said):
    with pytest.raises(EvalError, match=said):
        make_config({"benchmark": "passkey", "model": "m", "measure": measure})


def test_a_minimum_length_hides_what_would_have_been_answered(loaded):
    from eval.benchmarks import Sample

    path = DensePath((1, 2), [], (1, 2, 3))
    agreeing = Continuation({"top_agreement": 1.0}, 0, 0, 0, 0, 0, False)
    sample = Sample([1], [2], references="", max_new_tokens=3)
    assert same_answer(sample, path, agreeing) == (1, 2, 3)
    assert same_answer(sample, path, Continuation({"top_agreement": 0.9}, 0, 0, 0, 0, 0, False)) is None
    sample = Sample([1], [2], references="", max_new_tokens=3, min_new_tokens=1)
    assert same_answer(sample, path, agreeing) is None


def test_variants_are_named_by_what_is_not_their_default(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "benchmark: passkey\nmodel: m\nvariants:\n"
        "  - {method: quest, token_budget: [64, 128]}\n"
        "  - {method: psa, threshold: [0.5, 0.95]}\n"
        "  - {method: keycodes_study, token_budget: 256, rotation: [true, false]}\n"
    )
    [config] = read_sweep(path, {})
    variants = make_variants(config)
    assert [(variant.method.name, variant.token_budget, variant.name) for variant in variants] == [
        ("full", None, ""),
        ("quest", 64, ""),
        ("quest", 128, ""),
        ("psa", None, "threshold=0.5"),
        ("psa", None, ""),
        ("keycodes_study", 256, ""),
        ("keycodes_study", 256, "rotation=False"),
    ]


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        (["quest"], "variants='quest' is not allowed: a mapping"),
        ([{"token_budget": 64}], "it needs a method's name under 'method'"),
        ([{"method": "quests"}], "did you mean 'quest'"),
        ([{"method": "quest", "pages": 1}], "unknown parameter 'pages'"),
        ([{"method": "quest"}, {"method": "quest", "page_size": 16}], "given twice"),
    ],
)
def test_variants_that_are_not_allowed_are_refused(variants, said):
    with pytest.raises(EvalError, match=said):
        make_variants(make_config({"benchmark": "passkey", "model": "m", "variants": variants}))


def test_the_study_s_selector_runs_beside_the_shipped_method(tmp_path, loaded, model_dir):
    shared = {"token_budget": 96, "page_size": 16}
    variants = [{"method": "keycodes", **shared, "correction": "unbiased"}, {"method": "keycodes_study", **shared}]
    go(tmp_path, loaded, model_dir, method=[], token_budget=[], variants=variants, measure="divergence", limit=1)
    _, shipped, studied = read_records(tmp_path / "rows.jsonl")
    assert studied["divergence"] == pytest.approx(shipped["divergence"], rel=1e-3)
    assert studied["kv_fraction"] == shipped["kv_fraction"]
