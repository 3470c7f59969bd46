"""Prompts that are cut in the middle: how the official codes put the halves together."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import BENCHMARKS
from eval.benchmarks.base import Setup
from eval.prompts import encode_prompt, truncate_middle
from tests.eval.tokenizers import tiny_tokenizer

UNKNOWN = "\ufffd"
"""What a byte that is no letter is decoded to."""
V2_FIELDS = ("question", "choice_A", "choice_B", "choice_C", "choice_D", "difficulty", "length", "domain")
ROW = {"context": "", "input": "?", "answers": ["x"], "all_classes": [], "answer": "A", **dict.fromkeys(V2_FIELDS, "x")}


def test_halves_that_are_decoded_at_once_join_the_bytes_of_a_letter() -> None:
    text = "é" * 100 + "a"  # two tokens for é; ten tokens from either end have half a letter
    apart, at_once = (truncate_middle(tiny_tokenizer(), text, 20, decode_once=each) for each in (False, True))
    assert apart == "éééé" + UNKNOWN * 2 + "éééé" + "a"
    assert at_once == "ééééééééé" + "a"


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] | upper }}", "answer: "])
def test_a_tokenizer_s_own_chat_template_must_hold_the_message(template: str) -> None:
    tokenizer = copy.copy(tiny_tokenizer(chat=True))
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="the tokenizer's chat template leaves out the message, or changes it"):
        encode_prompt(tokenizer, "a text and a question?", 9, chat=True)


@pytest.mark.parametrize(
    ("name", "task", "filename", "most_unknown"),
    [
        ("longbench", "qasper", "qasper.jsonl", 2),
        ("longbench_v2", "choice", "data.json", 1),
        ("infinitebench", "longbook_qa_eng", "longbook_qa_eng.jsonl", 1),
    ],
)
def test_benchmarks_decode_the_halves_as_officially(
    name: str, task: str, filename: str, most_unknown: int, tmp_path: Path, protocols: Path
) -> None:
    row: dict[str, Any] = ROW | {"context": "é" * 400 + "a"}
    rows = [row, row | {"context": "é" * 400}]
    lines = json.dumps(rows) if filename == "data.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / filename).write_text(lines, encoding="utf-8")
    lengths = tuple(range(400, 408))
    setup = Setup(tiny_tokenizer(), 10_000, (task,), lengths, data_dir=tmp_path, protocol_dir=protocols)
    samples = [item.build() for item in BENCHMARKS[name].items(setup)]
    texts = [str(tiny_tokenizer().decode([*each.material_ids, *each.question_ids])) for each in samples]
    assert all(each.truncated for each in samples)
    assert max(text.count(UNKNOWN) for text in texts) == most_unknown
