"""Runs of benchmarks with rows of their own, scores and divergence, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.cli import app
from eval.store import read_records

LONG = "On day three the boat came home with fish. " * 12
CHOICES = {f"choice_{letter}": f"harbour {letter}" for letter in "ABCD"}
ROWS: dict[str, tuple[str, Any]] = {
    "longbench_e": (
        "qasper_e.jsonl",
        {"context": LONG, "input": "Who?", "answers": ["a boat"], "all_classes": None, "length": 5000},
    ),
    "longbench_v2": (
        "data.json",
        {"context": LONG, "question": "Which?", "answer": "A", "difficulty": "easy", "length": "short"}
        | {"domain": "Invented"}
        | CHOICES,
    ),
    "babilong": ("qa1/1k.json", {"input": LONG, "question": "Where is the boat?", "target": "kitchen"}),
    "scbench": (
        "scbench_kv.jsonl",
        {"context": LONG, "multi_turns": [{"input": f"Key {key}?", "answer": key} for key in ("ab", "cd", "ef")]},
    ),
    "gsm8k": ("test.jsonl", {"question": "How many boats?", "answer": "One.\n#### 1"}),
}
SETTINGS = {
    "scbench": ["--tasks", "kv"],
    "longbench_e": ["--tasks", "qasper"],
    "babilong": ["--tasks", "qa1", "--lengths", "1000"],
    "gsm8k": ["--tasks", "cot,zeroshot", "--set", "new_tokens=60", "--set", "least_tokens=40"],
}
CATEGORIES = {"longbench_e": {"words": "4-8k"}, "longbench_v2": {"difficulty": "easy", "length": "short"}}
CATEGORIES["scbench"] = {}


def write_rows(folder: Path, benchmark: str) -> Path:
    name, row = ROWS[benchmark]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row] if name.endswith(".json") else row), encoding="utf-8")
    return folder


@pytest.mark.parametrize("benchmark", ROWS)
def test_scores_and_divergence_of_every_benchmark(
    benchmark: str, model_dir: str, protocols: Path, tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "data", benchmark), tmp_path / "out"
    arguments = ["run", benchmark, "--model", model_dir, "--method", "quest", "--token-budget", "64"]
    arguments += ["--data-dir", str(data), "--protocol-dir", str(protocols), "--out", str(out)]
    arguments += ["--measure", "score,divergence", *SETTINGS.get(benchmark, [])]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    records = read_records(out / "rows.jsonl")
    assert [record["error"] for record in records] == [None] * len(records)
    assert {record["method"] for record in records} == {"full", "quest"}
    for record in records:
        assert record["score"] is not None
        assert (record["divergence"] is None) == (record["method"] == "full")
        assert (record["categories"] or {}).items() >= CATEGORIES.get(benchmark, {}).items()
        if benchmark == "scbench":
            assert record["prefill_seconds"] == records[0]["prefill_seconds"]  # one prefill serves all turns
        if benchmark == "gsm8k":
            assert 40 <= record["new_tokens"] <= 60
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {entry["category"] for entry in summary["categories"]} >= CATEGORIES.get(benchmark, {}).keys()
    assert {f"{name}: {value}" for name, value in CATEGORIES.get(benchmark, {}).items()} <= {
        entry["group"] for entry in summary["averages"]
    }
