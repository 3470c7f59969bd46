"""Invented files in RULER's formats, a protocol with our own wording, and shortcuts to samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import eval.benchmarks.ruler as ruler
from eval.benchmarks.base import Item, Setup
from eval.benchmarks.ruler.vocabulary import words
from eval.protocols import Protocol
from tests.eval.tokenizers import tiny_tokenizer

PARAGRAPHS = 90
HOTPOT_ROWS = 9
_NEEDLE_WORDING = {
    "tokens_to_generate": 20,
    "template": "Some {type_needle_v} are below, keep them.\n{context}\nName: what are all {type_needle_v} of {query}?",
    "answer_prefix": " The {type_needle_v} of {query} are",
}
_WORDINGS = {
    "niah": _NEEDLE_WORDING,
    "variable_tracking": {
        "tokens_to_generate": 10,
        "template": "Follow the copies.\n\n{context}\nWhich hold {query}?",
        "answer_prefix": " These {num_v} hold {query}: ",
    },
    "common_words_extraction": {
        "tokens_to_generate": 40,
        "template": "A list.\n{context}\nWhich are common?",
        "answer_prefix": " Common are:",
    },
    "freq_words_extraction": {
        "tokens_to_generate": 12,
        "template": "Count. {context}\nWhich three lead?",
        "answer_prefix": " They are:",
    },
    "qa": {
        "tokens_to_generate": 16,
        "template": "Read.\n\n{context}\n\nNow answer: {query}",
        "answer_prefix": " Answer:",
    },
}


def needle_args(haystack: str, keys: str, values: str, counts: tuple[int, int, int] = (1, 1, 1)) -> dict[str, Any]:
    """Settings of a needle task; ``counts`` of keys, of values of each, and of keys asked for."""
    key_count, value_count, asked_count = counts
    return {
        "type_haystack": haystack,
        "type_needle_k": keys,
        "type_needle_v": values,
        "num_needle_k": key_count,
        "num_needle_v": value_count,
        "num_needle_q": asked_count,
    }


def make_protocol() -> dict[str, Any]:
    """Return a protocol's values with our own wording and the usual settings."""
    needle_tasks = {
        "niah_single_1": needle_args("noise", "words", "numbers"),
        "niah_single_2": needle_args("essay", "words", "numbers"),
        "niah_single_3": needle_args("essay", "words", "uuids"),
        "niah_multikey_1": needle_args("essay", "words", "numbers", (4, 1, 1)),
        "niah_multikey_2": needle_args("needle", "words", "numbers"),
        "niah_multikey_3": needle_args("needle", "uuids", "uuids"),
        "niah_multivalue": needle_args("essay", "words", "numbers", (1, 4, 1)),
        "niah_multiquery": needle_args("essay", "words", "numbers", (1, 1, 4)),
    }
    tasks = {name: {"task": "niah", "args": args} for name, args in needle_tasks.items()}
    tasks["vt"] = {"task": "variable_tracking", "args": {"type_haystack": "noise", "num_chains": 1, "num_hops": 4}}
    tasks["cwe"] = {"task": "common_words_extraction", "args": {"freq_cw": 30, "freq_ucw": 3, "num_cw": 10}}
    tasks["fwe"] = {"task": "freq_words_extraction", "args": {"alpha": 2.0}}
    tasks["qa_1"] = {"task": "qa", "args": {"dataset": "squad"}}
    tasks["qa_2"] = {"task": "qa", "args": {"dataset": "hotpotqa"}}
    return {"tasks": {"templates": json.loads(json.dumps(_WORDINGS)), "tasks": tasks}, "chat_templates": {}}


def write_files(folder: Path) -> Path:
    """Write the three files; every paragraph names a different number, and every question asks for one."""
    rng = Random(0)
    sentences = " ".join(_sentence(rng, "Essay") for _ in range(900))
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": sentences.replace(". ", ".\n\n ", 40)}))

    texts = [f"Place {i} lies north. {_sentence(rng, 'It')} {_sentence(rng, 'There')}" for i in range(PARAGRAPHS)]
    paragraphs = [{"context": text, "qas": _squad_questions(i)} for i, text in enumerate(texts)]
    articles = [{"title": str(i), "paragraphs": paragraphs[i : i + 6]} for i in range(0, PARAGRAPHS, 6)]
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))

    rows = [
        {
            "question": f"Which town is row {row}?",
            "answer": f"Town {row}-0",
            "context": [[f"Town {row}-{i}", [_sentence(rng, "One"), " Two."]] for i in range(10)],
        }
        for row in range(HOTPOT_ROWS)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(rows))
    return folder


def use_own_protocol(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make RULER load ``make_protocol()``; return its ``tasks``, which may be changed before items are created."""
    values = make_protocol()
    monkeypatch.setattr(ruler, "load_protocol", lambda name, folder: Protocol(name, values, "0" * 64, "here"))
    tasks: dict[str, Any] = values["tasks"]
    return tasks


def make_setup(data_dir: Path) -> Setup:
    """All tasks at 2,500 tokens, two samples of each."""
    return Setup(
        tiny_tokenizer(), max_positions=200_000, tasks=ruler.Ruler.tasks, lengths=(2500,), limit=2, data_dir=data_dir
    )


def items_of(setup: Setup, task: str, length: int = 2500, **changes: Any) -> list[Item]:
    """Items of one task at one length."""
    return ruler.Ruler().items(replace(setup, tasks=(task,), lengths=(length,), **changes))


def texts_of(setup: Setup, item: Item) -> tuple[str, str, list[str]]:
    """Material, question and references of a sample, in text."""
    sample = item.build()
    tokenizer = setup.tokenizer
    return tokenizer.decode(sample.material_ids), tokenizer.decode(sample.question_ids), sample.references


def _sentence(rng: Random, start: str) -> str:
    return f"{start} {' '.join(rng.choices(words('noun'), k=rng.randint(4, 12)))}."


def _squad_questions(place: int) -> list[dict[str, Any]]:
    answers = [{"text": f"Place {place}", "answer_start": 0}] * 2 + [{"text": str(place), "answer_start": 6}]
    return [
        {"question": f"No answer {place}?", "answers": [], "is_impossible": True},
        {"question": f"What lies north, {place}?", "answers": answers, "is_impossible": False},
    ]
