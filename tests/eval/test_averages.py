"""Averages over a benchmark's tasks, and a run's expected time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import eval.expected as expected
from eval.benchmarks import BENCHMARKS, Item, Sample
from eval.benchmarks.longbench import CATEGORIES, ENGLISH_TASKS
from eval.benchmarks.ruler import Ruler
from eval.cli import app
from eval.config import make_config
from eval.engine import make_variants
from eval.report.sections import make_sections
from eval.report.tables import score_table
from eval.summary import category_means, category_scores, group_means
from hf_sparse_attn.cli.models import load_model
from tests.eval.report_records import record


def entries(scores: dict[str, float | None], **others: Any) -> list[dict[str, Any]]:
    column = {"benchmark": "b", "length": None, "method": "quest", "token_budget": 64, "variant": "", **others}
    return [{**column, "task": task, "score": score, "samples": 4, "errors": 1} for task, score in scores.items()]


def test_categories_are_averaged_and_so_are_they() -> None:
    scores = {task: (number % 7) / 10 for number, task in enumerate(ENGLISH_TASKS)}
    found = group_means(entries(scores), BENCHMARKS["longbench"].averages)
    means = {entry["group"]: entry["score"] for entry in found}
    by_hand = {name: sum(scores[task] for task in tasks) / len(tasks) for name, tasks in CATEGORIES.items()}
    assert means == pytest.approx(
        by_hand
        | {
            "mean of the 6 categories": sum(by_hand.values()) / 6,
            "mean of the 16 tasks": sum(scores.values()) / 16,
        }
    )
    assert sorted(task for tasks in CATEGORIES.values() for task in tasks) == sorted(ENGLISH_TASKS)
    assert [entry["samples"] for entry in found][-2:] == [64, 64]


def test_an_average_needs_all_its_tasks_in_each_column() -> None:
    groups = {"two": ("a", "b")}
    whole = entries({"a": 0.5, "b": 1.0, "c": 0.0})
    lacking = entries({"a": 0.5, "b": None}, method="full", token_budget=None) + entries({"a": 0.5}, length=10)
    (found,) = group_means(whole + lacking, groups)
    assert (found["method"], found["score"], found["samples"], found["errors"]) == ("quest", 0.75, 8, 2)
    assert Ruler.averages == {"mean of the 13 tasks": Ruler.tasks}
    assert len(Ruler.tasks) == 13


def categorised(
    task: str, number: int, score: float | None, method: str = "quest", **categories: str
) -> dict[str, Any]:
    error, budget = None if score is not None else "broken", None if method == "full" else 64
    return record("b", task, number, method, budget, score=score, error=error, categories=categories or None)


def test_categories_are_averaged_within_tasks_and_then_over_them() -> None:
    records = [
        *(categorised("a", number, score, turn="2") for number, score in enumerate((1.0, 0.0, 0.5, None))),
        categorised("b", 0, 0.0, turn="2"),
        categorised("a", 9, 1.0, turn="10", difficulty="hard"),
        categorised("c", 0, 0.25),
    ]
    scores = {(each["category"], each["value"], each["task"]): each for each in category_scores(records)}
    assert list(scores) == [("difficulty", "hard", "a"), ("turn", "2", "a"), ("turn", "2", "b"), ("turn", "10", "a")]
    assert (scores["turn", "2", "a"]["score"], scores["turn", "2", "a"]["errors"]) == (0.5, 1)
    means = {each["group"]: (each["score"], each["samples"], each["errors"]) for each in category_means(records)}
    assert means == {"difficulty: hard": (1.0, 1, 0), "turn: 2": (0.25, 5, 1), "turn: 10": (1.0, 1, 0)}
    (section,) = make_sections(records)
    name, length, means = section.benchmark_averages()[1]
    assert (name, length, means["quest", 64]["score"]) == ("turn: 2", None, 0.25)
    assert ["turn: 2", "", "", "25.0 (n=4)"] in score_table(section).footer


def test_a_category_s_average_needs_every_task_that_another_method_has() -> None:
    scores = {"full": {"easy": 0.9, "hard": 0.1}, "quest": {"easy": 0.8, "hard": None}, "tova": {"easy": 0.8}}
    records = [
        categorised(task, number, score, method, turn="2")
        for method, by_task in scores.items()
        for task, score in by_task.items()
        for number in range(4)
    ]
    (found,) = category_means(records)
    assert (found["method"], found["score"], found["samples"], found["errors"]) == ("full", 0.5, 8, 0)
    (section,) = make_sections(records)
    (line,) = (line for line in score_table(section).footer if line[0] == "turn: 2")
    assert line[3] == "50.0"
    assert line[4] == line[5] != "80.0"
    assert len(category_scores(records)) == 4  # what was measured is shown task by task


def test_a_task_that_every_method_failed_leaves_an_average_over_the_rest_and_its_errors() -> None:
    records = [
        categorised(task, number, score, method, turn="2")
        for method in ("full", "quest")
        for task, score in (("easy", 0.5), ("hard", None))
        for number in range(2)
    ]
    found = category_means(records)
    assert [(each["method"], each["score"], each["samples"], each["errors"]) for each in found] == [
        ("full", 0.5, 4, 2),
        ("quest", 0.5, 4, 2),
    ]


def test_the_report_has_the_averages_of_the_benchmark() -> None:
    records = [
        record("ruler", task, number, method, budget, length=4096, score=score)
        for task in Ruler.tasks
        for method, budget, score in (("full", None, 1.0), ("quest", 64, 0.5))
        for number in range(2)
    ]
    (section,) = make_sections(records)
    assert ["mean of the 13 tasks", "4,096", "", "", "100.0", "50.0"] in score_table(section).footer
    (section,) = make_sections([each for each in records if each["task"] != "vt"])
    assert section.benchmark_averages() == []


def sample(material: int, question: int, new_tokens: int) -> Sample:
    return Sample([1] * material, [1] * question, "a", new_tokens)


def test_work_counts_one_dense_prefill_and_every_variants_steps() -> None:
    config = make_config({"benchmark": "passkey", "model": "m", "method": ["quest", "tokenselect"]})
    variants = make_variants(config)  # dense, quest, tokenselect, whose prefill is sparse
    assert expected.work_of(sample(100, 10, 5), variants, feeds_question=True) == (200, 45)
    assert expected.work_of(sample(100, 10, 5), variants, feeds_question=False) == (230, 15)
    items = [Item("t", str(number), lambda: sample(100, 10, 5), 110) for number in range(7)]
    assert expected.total_work([(item, variants) for item in items], True) == (1400, 315)
    assert expected.total_work([(items[0], [])], True) == (0, 0)


def test_a_probe_estimates_only_long_runs(model_dir: str) -> None:
    model, _ = load_model(model_dir, None, "cpu")
    assert expected.expected_seconds(model, (1000, 10)) is None
    first, twice = (expected.expected_seconds(model, (10**9, steps)) for steps in (0, 10**9))
    assert first is not None
    assert twice is not None
    assert first > 0
    assert twice > 0


def test_a_long_run_says_its_expected_time_first(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected, "WORTH_PROBING_TOKENS", 0)
    monkeypatch.setattr("eval.terminal.WORTH_EXPECTING_SECONDS", 0)
    words = ["run", "passkey", "--model", model_dir, "--lengths", "300", "--limit", "1", "--out", str(tmp_path / "out")]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    assert "passkey: expected to take about 1 s or more" in first.stderr
    monkeypatch.setattr(expected, "WORTH_PROBING_TOKENS", 1)
    assert "expected" not in CliRunner().invoke(app, words).stderr  # nothing is left to do
