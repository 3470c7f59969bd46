"""SCBench: prompts and scores of the official code, turns that share a prefill, the cut, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval import metrics
from eval.benchmarks.base import Item, Setup
from eval.benchmarks.scbench import SCBench
from eval.errors import EvalError
from eval.session import by_material
from tests.eval.tokenizers import tiny_tokenizer

OFFICIAL: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden/dataset_prompts.json").read_text(encoding="utf-8")
)["scbench"]
ROWS: dict[str, dict[str, Any]] = OFFICIAL["rows"]
KINDS = {"scbench_summary": "needles_summary", "scbench_passkey": "needles_passkey"}


def items_of(folder: Path, protocols: Path, task: str, *rows: dict[str, Any], **values: Any) -> list[Item]:
    name = "summary_with_needles" if task.startswith("needles") else task
    lines = "".join(json.dumps(row) + "\n" for row in rows or [ROWS[name]])
    (folder / f"scbench_{name}.jsonl").write_text(lines, encoding="utf-8")
    values = {"max_positions": 10_000, "tokenizer": tiny_tokenizer(values.get("chat", False)), **values}
    return SCBench().items(Setup(tasks=(task,), data_dir=folder, protocol_dir=protocols, **values))


def text_of(*ids: Any) -> str:
    return str(tiny_tokenizer().decode([token for part in ids for token in part]))


@pytest.mark.parametrize("case", OFFICIAL["prompts"])
def test_prompts_are_the_official_ones(case: str, tmp_path: Path, protocols: Path) -> None:
    name, mode, wrapped = case.split(", ")
    tasks = ["needles_passkey", "needles_summary"] if name == "summary_with_needles" else [name]
    options = {"options": {"mode": mode}, "chat": wrapped == "chat"}
    items = [item for task in tasks for item in items_of(tmp_path, protocols, task, **options)]
    first, *later = OFFICIAL["prompts"][case]
    samples = [item.build() for item in sorted(items, key=lambda item: item.sample_id)]
    assert len({tuple(sample.material_ids) for sample in samples}) == 1
    found = [text_of(sample.material_ids, sample.question_ids) for sample in samples]
    plain = "" if wrapped == "chat" else "<s>"
    expected = [plain + first] if mode == "turns" else []
    for part in later:
        expected.append((expected[-1] if mode == "turns" else plain + first) + part)
    assert found == expected
    end_of_context = "3.5, 7.0]" if name == "mf" else ROWS[name]["context"].strip()[-20:]
    assert end_of_context in text_of(samples[0].material_ids)


def test_scores_are_the_official_ones() -> None:
    for case in OFFICIAL["scores"]:
        task = KINDS[case["kind"]] if case["task"] == "summary_with_needles" else case["task"]
        found = metrics.score("scbench", task, case["prediction"], case["label"])
        assert found == pytest.approx(case["score"]), case
    for task in {case["task"] for case in OFFICIAL["scores"]}:
        scores = {case["score"] for case in OFFICIAL["scores"] if case["task"] == task}
        assert min(scores) == 0 < max(scores), task


def test_turns_of_a_context_share_it_and_have_their_place(tmp_path: Path, protocols: Path) -> None:
    items = items_of(tmp_path, protocols, "kv", ROWS["kv"], ROWS["kv"])
    assert [(item.sample_id, item.categories["turn"]) for item in items] == [
        *(("0-0", "1"), ("0-1", "2")),
        *(("1-0", "1"), ("1-1", "2")),
    ]
    assert [len(group) for group in by_material(items)] == [2, 2]
    assert [each.sample_id for each in items_of(tmp_path, protocols, "kv", limit=1)] == ["0-0"]
    assert [each.sample_id for each in items_of(tmp_path, protocols, "kv", options={"turns": 1})] == ["0-0"]
    (needle,) = items_of(tmp_path, protocols, "needles_summary")
    assert (needle.sample_id, needle.build().max_new_tokens) == ("0-1", 20)
    (choice, _) = items_of(tmp_path, protocols, "choice_eng")
    assert choice.build().references == ["lamp", "B"]


@pytest.mark.parametrize("mode", ["turns", "requests"])
def test_the_context_is_cut_once_so_that_all_turns_fit(mode: str, tmp_path: Path, protocols: Path) -> None:
    items = items_of(tmp_path, protocols, "kv", lengths=(150,), options={"mode": mode})
    samples = [item.build() for item in items]
    assert all(sample.truncated for sample in samples)
    assert len({tuple(sample.material_ids) for sample in samples}) == 1
    sizes = [len(each.material_ids) + len(each.question_ids) + each.max_new_tokens for each in samples]
    assert 148 <= max(sizes) <= 150
    whole = [item.build() for item in items_of(tmp_path, protocols, "kv", options={"mode": mode})]
    assert [list(each.question_ids) for each in samples] == [list(each.question_ids) for each in whole]
    material, cut = list(whole[0].material_ids), list(samples[0].material_ids)
    ends = next(number for number, (a, b) in enumerate(zip(material, cut, strict=False)) if a != b)
    tail = len(cut) - ends
    assert cut[ends:] == material[len(material) - tail :]
    (first, _) = items_of(tmp_path, protocols, "kv", lengths=(27,), options={"mode": mode})
    with pytest.raises(EvalError, match=r"length=27 leaves no room for a context beside the \d+ tokens"):
        first.build()


@pytest.mark.parametrize(
    ("task", "turn", "said"),
    [
        ("kv", 3, r"scbench_kv\.jsonl: turn 0 of example 0 is 3, not an object"),
        ("kv", {"input": "?"}, "turn 0 of example 0 lacks answer"),
        ("needles_summary", {"input": "?", "answer": "a"}, "turn 0 of example 0 lacks task"),
        ("choice_eng", {"input": "?", "answer": "a", "options": list("bcde")}, "must be four, with the answer among"),
    ],
)
def test_malformed_turns_are_named(task: str, turn: Any, said: str, tmp_path: Path, protocols: Path) -> None:
    with pytest.raises(EvalError, match=said):
        items_of(tmp_path, protocols, task, {"context": "c", "multi_turns": [turn]})


def test_malformed_rows_and_settings_are_named(tmp_path: Path, protocols: Path) -> None:
    with pytest.raises(EvalError, match="multi_turns of example 0 is not a list of turns but"):
        items_of(tmp_path, protocols, "kv", {"context": "c", "multi_turns": []})
    with pytest.raises(EvalError, match="context of example 0 is not a text or a list but None"):
        items_of(tmp_path, protocols, "kv", {"multi_turns": [{"input": "?", "answer": "a"}]})
    with pytest.raises(EvalError, match="mode='both' is not allowed: turns or requests"):
        items_of(tmp_path, protocols, "kv", options={"mode": "both"})
    with pytest.raises(EvalError, match="turns=0 is not allowed"):
        items_of(tmp_path, protocols, "kv", options={"turns": 0})
    row = {"context": "c", "multi_turns": [{"input": "How many?", "answer": 3}]}
    (item,) = items_of(tmp_path, protocols, "mf", row)
    with pytest.raises(EvalError, match=r"input='How many\?' of scbench_mf does not have 'The ... is'"):
        item.build()


def test_a_template_that_strips_messages_strips_requests(tmp_path: Path, protocols: Path) -> None:
    row = {"context": "\n c", "multi_turns": [{"input": "?", "answer": "a"}, {"input": "Which key? \n", "answer": "b"}]}
    items = items_of(tmp_path, protocols, "vt", row, chat=True, options={"mode": "requests"})
    assert text_of(items[1].build().question_ids).endswith("Which key?\n<|assistant|>")


def test_numbers_of_a_file_with_a_float_are_all_floats(tmp_path: Path, protocols: Path) -> None:
    def row(*numbers: float) -> dict[str, Any]:
        turns = [{"input": "The median is", "answer": number} for number in numbers]
        return {"context": list(numbers), "multi_turns": turns}

    (_, whole) = items_of(tmp_path, protocols, "mf", row(7, 3))
    assert repr(whole.build().references) == "3"
    assert "[7, 3]" in text_of(whole.build().material_ids)
    (_, mixed, _) = items_of(tmp_path, protocols, "mf", row(7, 3), row(2.5))
    assert repr(mixed.build().references) == "3.0"
    assert "[7.0, 3.0]" in text_of(mixed.build().material_ids)


def test_a_template_that_rewrites_the_dialogue_is_refused(tmp_path: Path, protocols: Path) -> None:
    import copy

    tokenizer = copy.copy(tiny_tokenizer(chat=True))
    tokenizer.chat_template = "{{ messages | length }} {{ messages[-1]['content'] }} Say:"
    items = items_of(tmp_path, protocols, "kv", chat=True, tokenizer=tokenizer)
    with pytest.raises(EvalError, match="does not continue a dialogue where its answer begins; use --chat off"):
        items[1].build()
