"""GSM8K: prompts and scores of lm-evaluation-harness, the pinned file, and the texts that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import eval.benchmarks.gsm8k as gsm8k
from eval import metrics
from eval.benchmarks.base import Item, Sample, Setup
from eval.benchmarks.gsm8k import GSM8K
from eval.continuations import ends_of_texts, prediction_of
from eval.errors import EvalError
from tests.eval.tokenizers import tiny_tokenizer

OFFICIAL: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden/dataset_prompts.json").read_text(encoding="utf-8")
)["gsm8k"]
NAMES = {"gsm8k_cot": "cot", "gsm8k_cot_zeroshot": "zeroshot"}


def items_of(folder: Path, protocols: Path, task: str, *rows: dict[str, Any], **values: Any) -> list[Item]:
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = {"max_positions": 10_000, **values}
    return GSM8K().items(Setup(tiny_tokenizer(), tasks=(task,), data_dir=folder, protocol_dir=protocols, **values))


def text_of(ids: Any) -> str:
    return str(tiny_tokenizer().decode(ids)).removeprefix("<s>")


@pytest.mark.parametrize("official", NAMES)
def test_prompts_are_the_official_ones(official: str, tmp_path: Path, protocols: Path) -> None:
    items = items_of(tmp_path, protocols, NAMES[official], *OFFICIAL["rows"])
    samples = [item.build() for item in items]
    texts = [(text_of(sample.material_ids), text_of(sample.question_ids)) for sample in samples]
    assert [material + question for material, question in texts] == OFFICIAL["prompts"][official]
    assert all(question.startswith(("Puzzle: How", "Puzzle: And")) for _, question in texts)
    assert [sample.references for sample in samples] == ["1,234", "-7"]
    assert {(each.max_new_tokens, each.min_new_tokens, tuple(each.stop_texts)) for each in samples} == {
        (4096, 0, ("Puzzle:", "<end>"))
    }


def test_scores_are_the_official_ones() -> None:
    for case in OFFICIAL["scores"]:
        task, reference = NAMES[case["task"]], case["reference"].rpartition("####")[2].strip()
        assert metrics.named_scores("gsm8k", task, case["prediction"], reference) == case["scores"], case
        first = "strict-match" if task == "cot" else "flexible-extract"
        assert metrics.score("gsm8k", task, case["prediction"], reference) == case["scores"][first]
    assert {score for case in OFFICIAL["scores"] for score in case["scores"].values()} == {0, 1}


def test_answers_can_be_made_long(tmp_path: Path, protocols: Path) -> None:
    row = OFFICIAL["rows"][0]
    (item,) = items_of(tmp_path, protocols, "cot", row, options={"new_tokens": 900, "least_tokens": 800})
    sample = item.build()
    assert (sample.max_new_tokens, sample.min_new_tokens) == (900, 800)
    for options, said in (
        ({"new_tokens": 0}, "new_tokens=0 is not allowed: a whole number, at least 1"),
        ({"least_tokens": True}, "least_tokens=True is not allowed: a whole number, at least 0"),
        ({"least_tokens": 5000}, "least_tokens=5000 is not allowed: at most new_tokens=4096"),
        ({"new_tokens": 20_000}, "new_tokens=20000 is not allowed: fewer than the model's 10000 positions; give --set"),
    ):
        with pytest.raises(EvalError, match=said):
            items_of(tmp_path, protocols, "cot", row, options=options)
    with pytest.raises(EvalError, match=r"lengths=\[500\] is not allowed"):
        items_of(tmp_path, protocols, "cot", row, lengths=(500,))
    (item,) = items_of(tmp_path, protocols, "cot", row, max_positions=4100)
    with pytest.raises(EvalError, match=r"may have \d+ tokens, more than the model's 4100 positions; set new_tokens"):
        item.build()


def test_the_official_file_is_fetched_with_its_hash(
    tmp_path: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(what: str, url: str, file: Path, instead: str, sha256: str) -> Path:
        asked.append((url, sha256))
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(OFFICIAL["rows"][0]) + "\n", encoding="utf-8")
        return file

    monkeypatch.setattr(gsm8k, "fetch_file", fetch)
    monkeypatch.setenv("HF_SPARSE_ATTN_CACHE", str(tmp_path / "cache"))
    items = GSM8K().items(Setup(tiny_tokenizer(), 10_000, ("zeroshot",), protocol_dir=protocols))
    assert len(items) == 1
    address = "https://raw.githubusercontent.com/openai/grade-school-math/"
    assert asked == [(f"{address}{gsm8k.COMMIT}/grade_school_math/data/test.jsonl", gsm8k.SHA256)]


def test_malformed_rows_are_named(tmp_path: Path, protocols: Path) -> None:
    with pytest.raises(EvalError, match=r"test\.jsonl:1: .* the answer must have its number after ####"):
        items_of(tmp_path, protocols, "cot", {"question": "How?", "answer": "Seven."})


def test_an_answer_ends_at_the_first_of_its_stop_texts() -> None:
    tokenizer = tiny_tokenizer()
    sample = Sample([1], [1], "a", 100, stop_texts=("Puzzle:", "<end>"))
    ids = tokenizer("The answer is 3.\nPuzzle: more <end>", add_special_tokens=False)["input_ids"]
    is_ended = ends_of_texts(tokenizer, sample)
    assert is_ended is not None
    ended = next(number for number in range(1, len(ids) + 1) if is_ended(ids[:number]))
    assert "Puzzle:" in tokenizer.decode(ids[:ended])
    assert "Puzzle:" not in tokenizer.decode(ids[: ended - 1])
    assert prediction_of(tokenizer, sample, ids) == "The answer is 3.\n"
    late = ends_of_texts(tokenizer, Sample([1], [1], "a", 100, stop_texts=("Puzzle:",), min_new_tokens=ended + 1))
    assert late is not None
    assert not late(ids[:ended])
    assert ends_of_texts(tokenizer, Sample([1], [1], "a", 100)) is None
    assert prediction_of(tokenizer, SimpleNamespace(stop_texts=()), ids).endswith("<end>")  # type: ignore[arg-type]
