"""RULER's samples: lengths, reproducibility, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import eval.benchmarks.ruler as ruler
from eval.benchmarks.base import Setup
from eval.benchmarks.ruler import Ruler
from eval.benchmarks.ruler.needles import NOISE
from eval.benchmarks.ruler.prompt import Draft, Prompt, encoder, fit, token_count
from eval.errors import EvalError
from eval.protocols import load_protocol
from tests.eval.ruler_data import PARAGRAPHS, items_of, texts_of
from tests.eval.tokenizers import tiny_tokenizer

ESSAY_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
# Maximum tokens of the unit by which a prompt grows; in addition, a thousandth of the length may stay unused.
UNIT = {"niah_multikey_2": 70, "niah_multikey_3": 140, "niah_single_1": 50, "vt": 50, "cwe": 60, "qa_1": 130}
UNIT |= {"qa_2": 130, "fwe": 25, **dict.fromkeys(ESSAY_TASKS, 12)}


# Lengths


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("task", Ruler.tasks)
def test_length_is_never_exceeded_and_nearly_reached(setup: Setup, protocol: Any, task: str, chat: bool) -> None:
    answer_tokens = protocol["templates"][protocol["tasks"][task]["task"]]["tokens_to_generate"]
    changes = {"tokenizer": tiny_tokenizer(chat=True), "chat": True} if chat else {}
    for length in (500, 1501, 2500, 5000) if task not in ("vt", "cwe", "qa_2") else (2500, 3000, 8000):
        if task == "qa_2" and length > 3000:
            continue  # beyond the invented file
        for item in items_of(setup, task, length, limit=3, **changes):
            sample = item.build()
            total = len(sample.material_ids) + len(sample.question_ids) + sample.max_new_tokens
            assert sample.max_new_tokens == answer_tokens
            assert length - UNIT[task] - length / 1000 <= total <= length, (item.sample_id, length)
            assert (item.task, item.length) == (task, length)


def test_material_and_question_meet_where_the_context_ends(setup: Setup, protocol: Any) -> None:
    for task in Ruler.tasks:
        material, question, _ = texts_of(setup, items_of(setup, task)[0])
        after_context = protocol["templates"][protocol["tasks"][task]["task"]]["template"].partition("{context}")[2]
        assert question.startswith(after_context.partition("{")[0][:9]), task
        assert after_context[:9] not in material[-40:], task


def test_worked_examples_stay_inside_the_chat_template(setup: Setup) -> None:
    for task in ("vt", "cwe"):
        item = items_of(setup, task, 3000, tokenizer=tiny_tokenizer(chat=True), chat=True)[0]
        material, question, _ = texts_of(setup, item)
        assert (material + question).count("<|user|>") == 1
        assert question.count("<|assistant|>") == 1
        assert material.startswith("<s><|user|>")


class Units:
    """A draft of words, and how often it was rendered."""

    def __init__(self, tokens_per_unit: list[int], largest: int | None = None) -> None:
        self.sizes: list[int] = []
        self.units = tokens_per_unit
        self.draft = Draft(self.render, 1, 100, [], largest=largest)

    def render(self, size: int) -> Prompt:
        self.sizes.append(size)
        return Prompt("x" * sum(self.units[:size]), 1, "")

    @staticmethod
    def encode(prompt: Prompt) -> tuple[list[int], list[int]]:
        return [0] * (len(prompt.text) - 1), [0]


def test_search_finds_the_largest_size_in_a_handful_of_encodings() -> None:
    rng = Random(1)
    for room in (999, 5000, 60_000):
        units = Units([rng.choice([1, 2, 3, 9]) for _ in range(40_000)])
        size, parts = fit(units.draft, room, units.encode)
        assert token_count(parts) == sum(units.units[:size]) <= room
        assert room - token_count(parts) <= room / 1000 or sum(units.units[: size + 1]) > room
        assert len(units.sizes) <= 10, units.sizes


def test_search_ends_on_lumpy_units_and_at_the_last_one() -> None:
    lumpy = Units([1] * 500 + [700] * 30 + [1] * 500)
    size, parts = fit(lumpy.draft, 5000, lumpy.encode)
    assert (size, token_count(parts)) == (506, 4700)
    assert len(lumpy.sizes) < 30
    assert fit(Units([10] * 50, largest=50).draft, 5000, lumpy.encode)[0] == 50
    assert fit(Units([10] * 50).draft, 10, lumpy.encode)[0] == 1
    with pytest.raises(EvalError, match="takes 10 tokens, but only 9 are allowed"):
        fit(Units([10] * 50).draft, 9, lumpy.encode)


# Items


def test_samples_depend_on_seed_task_length_and_index(setup: Setup) -> None:
    for task in Ruler.tasks:
        first, second = (item.build() for item in items_of(setup, task))
        again = items_of(setup, task, limit=1)[0].build()
        other_seed = items_of(setup, task, seed=1)[0].build()
        assert first == again, task
        assert first.material_ids != second.material_ids, task
        assert first.material_ids != other_seed.material_ids, task
    everything = Ruler().items(replace(setup, lengths=(2500, 3000)))
    assert len({(item.task, item.length, item.sample_id) for item in everything}) == len(everything) == 13 * 2 * 2
    alone = items_of(setup, "vt")[1]
    (same,) = (item for item in everything if (item.task, item.length, item.sample_id) == ("vt", 2500, "1"))
    assert same.build() == alone.build()


def test_no_limit_means_the_papers_500(setup: Setup) -> None:
    assert len(items_of(setup, "niah_single_1", limit=None)) == 500
    assert {item.length for item in Ruler().items(replace(setup, lengths=()))} == {4096}


def test_impossible_lengths_are_refused_before_any_work(setup: Setup) -> None:
    for task in ("vt", "cwe", "qa_2"):
        with pytest.raises(EvalError, match=rf"length=300 is too small for RULER's {task}: .* takes \d+ tokens"):
            items_of(setup, task, 300)
    with pytest.raises(EvalError, match="length=0 is not allowed"):
        items_of(setup, "fwe", 0)
    with pytest.raises(EvalError, match=r"length=200001 is not allowed: at most .* 200000 positions"):
        items_of(setup, "fwe", 200_001)


def test_length_beyond_all_documents_is_refused(setup: Setup) -> None:
    with pytest.raises(EvalError, match=rf"length=50000 is too large for RULER's qa_1: all its {PARAGRAPHS} documents"):
        items_of(setup, "qa_1", 50_000)


def test_missing_and_malformed_files_are_named_before_any_work(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_SPARSE_ATTN_CACHE", str(tmp_path / "cache"))
    for task, name in [("niah_single_2", "PaulGrahamEssays.json"), ("qa_1", "squad.json"), ("qa_2", "hotpotqa.json")]:
        with pytest.raises(EvalError, match=rf"{name} .*is missing: looked at .*--data-dir"):
            items_of(setup, task, data_dir=tmp_path)
    assert len(items_of(setup, "niah_single_1", data_dir=tmp_path)) == 2  # needs no file
    (tmp_path / "squad.json").write_text('{"rows": []}')
    with pytest.raises(EvalError, match=r"squad.json is not in the format of SQuAD 2.0 \(dev\): KeyError 'data'"):
        items_of(setup, "qa_1", data_dir=tmp_path)


# Settings and wording from files


@pytest.mark.parametrize("task", Ruler.tasks)
def test_wording_of_a_protocols_files_at_4096_tokens(
    setup: Setup, protocols: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr(ruler, "load_protocol", load_protocol)
    values = load_protocol("ruler", protocols).values["tasks"]
    length = 3000 if task == "qa_2" else 8192 if task == "cwe" else 4096
    (item,) = items_of(setup, task, length, limit=1, protocol_dir=protocols)
    sample = item.build()
    total = len(sample.material_ids) + len(sample.question_ids) + sample.max_new_tokens
    assert length - UNIT[task] - 5 <= total <= length
    assert sample.max_new_tokens == values["templates"][values["tasks"][task]["task"]]["tokens_to_generate"]
    material, question, references = texts_of(setup, item)
    assert "{" not in material.replace(NOISE, "") + question
    if task == "niah_single_1":  # the grammar that the official code bends templates to, for one value
        assert material.startswith("<s>A number is below")
        assert question.endswith(" is")
    if task == "niah_multiquery":
        assert material.startswith("<s>Some numbers are below")
        assert question.endswith(" are")
    if task.startswith("niah"):
        assert all(material.count(f"is: {reference}.") == 1 for reference in references)


def test_encoder_counts_the_chat_template_and_the_answers_beginning() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    prompt = Prompt("material question", 9, " answer")
    plain, chat = (token_count(encoder(tokenizer, chat)(prompt)) for chat in (False, True))
    assert plain == len(tokenizer("material question answer").input_ids)
    assert chat > plain
