"""docs/results.md is what the results files say, and nothing else."""

import json
from pathlib import Path

import pytest

from eval.errors import EvalError
from eval.markdown import results_page, write_results
from eval.store import read_rows
from eval.summary import summarise

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_what_the_results_give(monkeypatch):
    monkeypatch.chdir(ROOT)
    written = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert written == results_page(Path("eval/results")), "run: python -m eval docs"


@pytest.mark.parametrize("path", sorted(ROOT.glob("eval/results/*/*/summary.json")), ids=lambda path: path.parent.name)
def test_kept_summaries_are_those_of_their_rows(path):
    summary = json.loads(path.read_text(encoding="utf-8"))
    rows = read_rows(path.parent / "rows.jsonl")
    assert summary["table"] == summarise(rows)
    assert summary["finished"]
    assert summary["rows"] == len(rows)
    assert (ROOT / "eval/configs" / f"{path.parent.parent.name}.yaml").exists()
    assert {row["device"] for row in rows} == {summary["device"]}


def test_cells_hold_scores_perplexities_and_speeds(tmp_path):
    entry = {
        "benchmark": "passkey", "task": "filler", "length": 400, "method": "full", "token_budget": None, "samples": 4,
        "errors": 1, "score": 0.75, "perplexity": None, "kv_fraction": 1.0, "realised_budget": 401.0,
        "ttft_seconds": 1.5, "tpot_ms": 12.34, "prompt_tokens": 412.0, "peak_memory_bytes": 2**21,
    }  # fmt: skip
    summary = {
        "model": "m", "dtype": "float32", "device": "a CPU", "versions": {"torch": "2"}, "date": "2026-01-02T00:00:00",
        "rows": 8, "errors": 1, "harness_seconds": 1.0, "model_seconds": 40.0, "protocol_sha256": "abcdef" * 10,
        "config": {"benchmark": "passkey", "question": "decode", "seed": 3},
        "table": [entry, entry | {"method": "quest", "token_budget": 1024, "score": None, "perplexity": 9.8765}],
    }  # fmt: skip
    (tmp_path / "sweep" / "01-passkey").mkdir(parents=True)
    (tmp_path / "sweep" / "01-passkey" / "summary.json").write_text(json.dumps(summary))
    write_results(tmp_path, tmp_path / "docs" / "page.md")
    text = (tmp_path / "docs" / "page.md").read_text()
    assert "| filler | 400 | 3 | 75.0 | 9.877 |" in text
    assert "| filler | 400 | quest 1,024 | 412 | 401 | 100.0 | 1.50 | 12.3 | 2 |" in text
    assert "the harness added 2.5%" in text
    assert "protocol abcdefabcdef" in text


def test_no_results_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(EvalError, match=str(tmp_path)):
        write_results(tmp_path, tmp_path / "page.md")
    assert not (tmp_path / "page.md").exists()
