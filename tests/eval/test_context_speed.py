"""The speed of questions about a context: both sides answer, the check is real, and the tables show the report."""

import json
from dataclasses import replace

import pytest
import torch

from eval import context_speed
from eval.context_speed import ContextSpeedConfig, measure_context_speed
from eval.context_table import HEAD, context_markdown, context_table, side_lines
from eval.errors import EvalError
from hf_sparse_attn import Squeezed

CONFIG = ContextSpeedConfig(
    "tiny", context=150, question=12, new_tokens=9, method=Squeezed(window=10, clusters=0.1), repeats=2, chunk_size=64
)


@pytest.fixture(scope="module")
def report():
    said = []
    measured = measure_context_speed(CONFIG, torch.device("cpu"), torch.float32, said.append)
    assert len(said) == 4
    return json.loads(json.dumps(measured))


def test_a_report_has_both_sides_and_what_the_preparation_took(report):
    stock, squeezed = report["sides"]
    assert (stock["name"], squeezed["name"]) == ("stock", "squeezed")
    assert 0 < squeezed["kv_fraction"] < 1
    assert squeezed["ratio"] == stock["answer_seconds"]["median"] / squeezed["answer_seconds"]["median"]
    assert len(stock["answer_seconds"]["all"]) == 2
    assert report["checked"]["tokens_in_common"] > 0
    assert set(report["preparation_seconds"]) == {"prefill", "clustering", "calibration"}
    assert report["settings"]["context"] == 150
    assert "target_sparsity=0.9" in report["settings"]["method"]


def test_tables_show_every_side(report):
    lines = side_lines(report)
    assert [line[0] for line in lines] == ["stock", "squeezed"]
    assert all(len(line) == len(HEAD) for line in lines)
    assert context_table(report).row_count == 2
    text = context_markdown("tiny", report, "| table |")
    assert "`python -m eval context-speed --shape tiny --context 150 --question 12 --new-tokens 9 --repeats 2`" in text
    assert "The stock model has the same 150 tokens" in text


def test_an_answer_of_one_token_has_no_time_per_token():
    config = replace(CONFIG, new_tokens=1, repeats=1)
    measured = measure_context_speed(config, torch.device("cpu"), torch.float32, lambda text: None)
    assert [side["tpot_ms"] for side in measured["sides"]] == [None, None]
    assert all(line[HEAD.index("ms per token")] == "-" for line in side_lines(measured))


def test_wrong_tokens_are_found(monkeypatch):
    generate = context_speed._generate

    monkeypatch.setattr(
        context_speed,
        "_generate",
        lambda model, ids, cache, count: (
            generate(model, ids, cache, count) + (1 if hasattr(cache, "prefix_tokens") else 0)
        ),
    )
    with pytest.raises(EvalError, match="with a target sparsity of 0 the patched model began with"):
        measure_context_speed(CONFIG, torch.device("cpu"), torch.float32, lambda text: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "none"}, "--shape 'none' is unknown"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(EvalError, match=message):
        replace(CONFIG, **changes)
