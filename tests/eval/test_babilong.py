"""BABILong: prompts and scores of the official code, sizes, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eval.benchmarks.babilong as babilong
from eval import metrics
from eval.benchmarks.babilong import REVISION, Babilong
from eval.benchmarks.base import Item, Sample, Setup
from eval.errors import EvalError
from tests.eval.own_protocols import BABILONG_WORDING
from tests.eval.tokenizers import tiny_tokenizer

OFFICIAL: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden/dataset_prompts.json").read_text(encoding="utf-8")
)["babilong"]
EXAMPLE: dict[str, Any] = OFFICIAL["example"]


def items_of(folder: Path, protocols: Path, *examples: dict[str, Any], size: str = "4k", **values: Any) -> list[Item]:
    path = folder / f"qa1/{size}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(examples), encoding="utf-8")
    values = {"lengths": (4000,), "max_positions": 5000, "tokenizer": tiny_tokenizer(), **values}
    return Babilong().items(Setup(tasks=("qa1",), data_dir=folder, protocol_dir=protocols, **values))


def texts_of(sample: Sample) -> tuple[str, str]:
    decode = tiny_tokenizer().decode
    return str(decode(sample.material_ids)).removeprefix("<s>"), str(decode(sample.question_ids))


def test_prompt_is_the_official_one_and_the_question_follows_the_context(tmp_path: Path, protocols: Path) -> None:
    (item,) = items_of(tmp_path, protocols, EXAMPLE)
    sample = item.build()
    material, question = texts_of(sample)
    assert material + question == OFFICIAL["prompt"]
    assert question.startswith("\n]\n\nAsked: Where is Bill?")
    assert (sample.references, sample.max_new_tokens, item.length) == ("garden", 20, 4000)
    assert sample.all_classes == ["garden", "kitchen", "no", "yes", "nothing"]


def test_chat_template_wraps_the_official_prompt(tmp_path: Path, protocols: Path) -> None:
    (item,) = items_of(tmp_path, protocols, EXAMPLE, chat=True, tokenizer=tiny_tokenizer(chat=True))
    material, question = texts_of(item.build())
    assert material + question == f"<|user|>{OFFICIAL['prompt']}\n<|assistant|>"


def test_scores_are_the_official_ones() -> None:
    for case in OFFICIAL["scores"]:
        question = case["question"].lower()
        labels = [each for each in BABILONG_WORDING["labels"][case["task"]] if each.lower() not in question]
        found = metrics.score("babilong", case["task"], case["prediction"], case["target"], labels)
        assert found == case["score"], case
    assert {case["score"] for case in OFFICIAL["scores"]} == {0, 1}


def test_sizes_have_the_names_of_the_data(tmp_path: Path, protocols: Path) -> None:
    (item,) = items_of(tmp_path, protocols, EXAMPLE, size="0k", options={"facts_only": True})
    assert item.length is None
    items = items_of(tmp_path, protocols, EXAMPLE, EXAMPLE, size="1M", lengths=(1_000_000,), max_positions=2_000_000)
    assert [(each.sample_id, each.length) for each in items] == [("0", 1_000_000), ("1", 1_000_000)]
    with pytest.raises(EvalError, match="length=4096 is not allowed: babilong has 1000, 2000, 4000"):
        items_of(tmp_path, protocols, EXAMPLE, lengths=(4096,))
    with pytest.raises(EvalError, match="facts_only=1 is not allowed: True or False"):
        items_of(tmp_path, protocols, EXAMPLE, options={"facts_only": 1})


def test_a_prompt_beyond_the_positions_is_that_samples_error(tmp_path: Path, protocols: Path) -> None:
    (item,) = items_of(tmp_path, protocols, {**EXAMPLE, "input": "A boat. " * 3000})
    with pytest.raises(EvalError, match=r"prompt and answer have \d+ tokens, more than the model's 5000 positions"):
        item.build()


def test_malformed_rows_are_named(tmp_path: Path, protocols: Path) -> None:
    with pytest.raises(EvalError, match=r"4k\.json: target of example 1 is not a text but 3"):
        items_of(tmp_path, protocols, EXAMPLE, {**EXAMPLE, "target": 3})
    with pytest.raises(EvalError, match=r"4k\.json: example 0 lacks target"):
        items_of(tmp_path, protocols, {"input": "", "question": ""})


def test_rows_come_from_the_hub_at_their_revision(protocols: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*given: Any, **named: Any) -> list[dict[str, Any]]:
        asked.append((given[:2], named))
        return [EXAMPLE]

    monkeypatch.setattr(babilong, "load_hub_dataset", load)
    items = Babilong().items(Setup(tiny_tokenizer(), 5000, ("qa3",), (4000,), protocol_dir=protocols))
    assert len(items) == 1
    assert asked == [(("RMT-team/babilong", "qa3"), {"config": "4k", "revision": REVISION})]
