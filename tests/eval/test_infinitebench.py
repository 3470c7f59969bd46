"""InfiniteBench: official examples as the official code reads them, generated examples, and errors."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from eval.benchmarks import infinitebench_synthetic as synthetic
from eval.benchmarks.base import Item, Sample, Setup
from eval.benchmarks.infinitebench import InfiniteBench, answers_of, prompt_fields
from eval.errors import EvalError
from eval.protocols import load_protocol
from tests.eval.tokenizers import tiny_tokenizer
from tests.tiny import make_tokenizer

GENERATED = ("passkey", "number_string", "kv_retrieval", "math_find")
OPTIONS = ["alpha", "beta", "gamma", "delta"]
SECOND_LARGEST = "Answer with only one number, no other words. The second largest number of the list is: "
ROWS: dict[str, dict[str, Any]] = {
    "passkey": {"input": "What is it?", "answer": ["01234"], "options": []},
    "number_string": {"input": "What is it?", "answer": ["0011223344"], "options": []},
    "kv_retrieval": {"input": '\nKey: "a"\n', "answer": ["b-c"], "options": []},
    "longbook_sum_eng": {"input": "", "answer": ["A summary."], "options": []},
    "longbook_choice_eng": {"input": "Who?", "answer": ["gamma"], "options": OPTIONS},
    "longbook_qa_eng": {"input": "Who?", "answer": ["X", "the X"], "options": []},
    "longbook_qa_chn": {"input": "谁", "answer": ["某人"], "options": []},
    "longdialogue_qa_eng": {"input": "", "answer": ["JOHN"], "options": []},
    "math_find": {"input": SECOND_LARGEST, "answer": [17], "options": []},
    "math_calc": {"input": "", "answer": [4, 2, -1], "options": []},
    "code_run": {"input": "The return value of func_12(-3)?", "answer": [-7], "options": []},
    "code_debug": {"input": "", "answer": ["delta"], "options": OPTIONS},
}
EXPECTED: dict[str, Any] = {
    "passkey": ["01234"],
    "number_string": ["0011223344"],
    "kv_retrieval": "b-c",
    "longbook_sum_eng": "A summary.",
    "longbook_choice_eng": ["gamma", "C"],
    "longbook_qa_eng": ["X", "the X"],
    "longbook_qa_chn": ["某人"],
    "longdialogue_qa_eng": ["JOHN"],
    "math_find": [17],
    "math_calc": [4, 2, -1],
    "code_run": [-7],
    "code_debug": ["delta", "D"],
}


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def example_of(task: str, **changes: Any) -> dict[str, Any]:
    return {"id": 7, "context": "START " + "{code} is = [1] " * 30 + "END", **ROWS[task], **changes}


def items_of(
    protocols: Path, tasks: str | Sequence[str], folder: Path | None = None, *examples: dict[str, Any], **options: Any
) -> list[Item]:
    names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    if folder is not None and examples:
        lines = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
        (folder / f"{names[0]}.jsonl").write_text(lines, encoding="utf-8")
    options = {"tokenizer": tiny_tokenizer(chat=True), "max_positions": 40_000, **options}
    return InfiniteBench().items(Setup(tasks=names, data_dir=folder, protocol_dir=protocols, **options))


def text_of(sample: Sample, tokenizer: Any = None) -> str:
    decode = (tokenizer or tiny_tokenizer(chat=True)).decode
    return str(decode([*sample.material_ids, *sample.question_ids])).removeprefix("<s>")


def test_tasks_are_those_of_the_protocol(protocols: Path) -> None:
    prompts = load_protocol("infinitebench", protocols).values["prompts"]
    assert set(InfiniteBench.tasks) == set(prompts["max_new_tokens"]) == set(ROWS)
    assert InfiniteBench.options["template_set"] in prompts["templates"]
    assert set(synthetic.MAKERS) == set(GENERATED)


@pytest.mark.parametrize("task", InfiniteBench.tasks)
@pytest.mark.parametrize(
    "template_set", ["yarn_mistral_templates", "gpt4_templates", "claude2_templates", "kimi_templates"]
)
def test_official_examples_fill_the_official_templates(
    task: str, template_set: str, protocols: Path, tmp_path: Path
) -> None:
    prompts = load_protocol("infinitebench", protocols).values["prompts"]
    example = example_of(task)
    (item,) = items_of(protocols, task, tmp_path, example, options={"template_set": template_set})
    sample = item.build()
    fields = {
        "context": example["context"],
        "document": example["context"],
        "fcontext": example["context"],
        "input": example["input"],
        "question": example["input"],
        "func": "func_12",
        "func_call": "func_12(-3)",
        "prefix": "What is the second largest number in the following list?",
        **{f"OPTION_{letter}": option for letter, option in zip("ABCD", OPTIONS, strict=True)},
    }
    # Templates for an uploaded file have the text as a format specifier: here it is inserted plainly.
    template = re.sub(r"\{file:(\{\w+\})\}", r"\1", prompts["templates"][template_set][task])
    assert text_of(sample) == template.format(**fields)
    assert sample.references == EXPECTED[task]
    assert sample.max_new_tokens == prompts["max_new_tokens"][task]
    assert (item.sample_id, item.length) == ("row-7", None)


@pytest.mark.parametrize("value", ["17", 17])
def test_numbers_may_be_text(value: Any) -> None:
    assert answers_of("math_find", example_of("math_find", answer=[value])) == [17]
    assert answers_of("math_find", example_of("math_find", answer=["2.5"])) == [2.5]
    assert answers_of("code_run", example_of("code_run", answer=value)) == [17]
    assert answers_of("math_calc", example_of("math_calc", answer=[[value, "3"]])) == [17, 3]


def test_a_choice_may_bring_its_letter() -> None:
    assert answers_of("code_debug", example_of("code_debug", answer=["beta", "B"])) == ["beta", "B"]
    assert answers_of("code_debug", example_of("code_debug", answer="beta")) == ["beta", "B"]


@pytest.mark.parametrize("asked", ["largest", "third smallest", "median"])
def test_math_find_asks_ahead(asked: str) -> None:
    example = example_of("math_find", input=f"One number, no other words. The {asked} number of the list is: ")
    assert prompt_fields("math_find", example)["prefix"] == f"What is the {asked} number in the following list?"


def test_truncation_keeps_head_and_tail(protocols: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()  # only a token per byte or word, so the official cut is known exactly
    example = example_of("passkey", context="x" * 900)
    whole = (
        load_protocol("infinitebench", protocols)
        .values["prompts"]["templates"]["yarn_mistral_templates"]["passkey"]
        .format(**example)
    )
    for item in items_of(protocols, "passkey", tmp_path, example, lengths=(507, 606), tokenizer=tokenizer):
        assert item.length is not None
        half = (item.length - 6) // 2
        sample, ids = item.build(), tokenizer(whole)["input_ids"]
        assert [*sample.material_ids, *sample.question_ids] == ids[:half] + ids[-half:]
        assert len(ids) > item.length


@pytest.mark.parametrize(
    ("task", "changes", "problem"),
    [
        ("code_run", {"input": "run it"}, r"example 1: input='run it' has no function call"),
        ("math_find", {"input": "the sum"}, r"example 1: input='the sum' does not say"),
        ("math_find", {"answer": ["many"]}, "example 1: could not convert"),
        ("code_debug", {"answer": ["omega"]}, "example 1: answer='omega' is not one of the options"),
        ("code_debug", {"options": OPTIONS[:3]}, "example 1: options has 3 entries, not 4"),
        ("longbook_qa_eng", {"answer": []}, "example 1: answer is empty"),
        ("passkey", {"context": None}, r"passkey\.jsonl:1: context is of type NoneType"),
    ],
)
def test_malformed_examples_raise_before_any_work(
    task: str, changes: dict[str, Any], problem: str, protocols: Path, tmp_path: Path
) -> None:
    with pytest.raises(EvalError, match=problem):
        items_of(protocols, task, tmp_path, example_of(task, **changes))


def test_impossible_settings_are_refused(protocols: Path, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"template_set='gpt5' is not allowed: one of gpt4_templates, "):
        items_of(protocols, "passkey", options={"template_set": "gpt5"})
    with pytest.raises(EvalError, match=r"length=30000 .* math_calc generates max_new_tokens=30000"):
        items_of(protocols, "math_calc", tmp_path, example_of("math_calc"), lengths=(30_000,))
    with pytest.raises(EvalError, match=r"length=4096 is not allowed: at most .* 2048 positions"):
        items_of(protocols, "passkey", max_positions=2048)
    with pytest.raises(EvalError, match=r"longbook_qa_eng\.jsonl.*xinrongzhang2022/InfiniteBench.*--data-dir"):
        items_of(protocols, "longbook_qa_eng", tmp_path)


@pytest.mark.parametrize(
    ("chat", "template_set"),
    [(False, "gpt4_templates"), (True, "gpt4_templates"), (True, "yarn_mistral_templates")],
)
@pytest.mark.parametrize("task", GENERATED)
def test_generated_examples_fill_the_length_and_hold_the_answer(
    task: str, chat: bool, template_set: str, protocols: Path
) -> None:
    prompts = load_protocol("infinitebench", protocols).values["prompts"]
    unit = {"passkey": 60, "number_string": 60, "kv_retrieval": 120, "math_find": 4}[task]
    options = {"template_set": template_set}
    items = items_of(protocols, task, lengths=(700, 1500), limit=4, chat=chat, options=options)
    assert [(item.sample_id, item.length) for item in items] == [
        (f"generated-{index}", length) for length in (700, 1500) for index in range(4)
    ]
    texts = []
    for item in items:
        sample = item.build()
        total = len(sample.material_ids) + len(sample.question_ids) + prompts["max_new_tokens"][task]
        assert item.length is not None
        assert item.length - unit < total <= item.length
        texts.append(text_of(sample))
        # The sets for a base model are not wrapped: their answer begins where the prompt ends.
        assert ("<|user|>" in texts[-1]) == (chat and template_set == "gpt4_templates")
        check_answer(task, texts[-1], sample.references, item.depth)
    assert len(set(texts)) == len(texts)


def check_answer(task: str, text: str, references: Any, depth: float | None) -> None:
    if task == "math_find":
        numbers = json.loads(text[text.index("[") : text.index("]") + 1])
        asked = re.search(r"What is the ([\w ]+) number in", text)
        assert asked is not None
        ordered = sorted(set(numbers))
        expected = {
            "largest": ordered[-1],
            "second largest": ordered[-2],
            "third largest": ordered[-3],
            "smallest": ordered[0],
            "second smallest": ordered[1],
            "third smallest": ordered[2],
            "median": statistics.median(numbers),
        }
        assert references == [expected[asked[1]]]
        assert depth is None
        return
    assert depth is not None
    if task == "kv_retrieval":
        pairs = json.loads(text[text.index("{") : text.index("}") + 1])
        asked_key = re.search(r'Key: "([^"]+)"', text)
        assert asked_key is not None
        assert pairs[asked_key[1]] == references
        assert list(pairs).index(asked_key[1]) == int(depth * len(pairs))
        return
    (key,) = references
    assert text.count(key) == 2
    assert len(key) == (5 if task == "passkey" else 10)
    if task == "number_string":
        assert key.isdigit()
        assert sum(left == right for left, right in pairwise(key)) >= 5
    lines = text[text.index("The grass") : text.rindex("again.")].splitlines()
    place = next(index for index, line in enumerate(lines) if key in line)
    assert place == round(depth * (len(lines) - 1))


def test_generated_examples_depend_on_the_seed_and_not_on_the_limit(protocols: Path) -> None:
    few = items_of(protocols, GENERATED, lengths=(600,), limit=2, seed=3)
    many = {(item.task, item.sample_id): item for item in items_of(protocols, GENERATED, lengths=(600,), seed=3)}
    other = {(item.task, item.sample_id): item for item in items_of(protocols, GENERATED, lengths=(600,), seed=4)}
    assert len(many) == 50 * len(GENERATED)
    for item in few:
        name = (item.task, item.sample_id)
        assert item.build() == item.build() == many[name].build()
        assert item.depth == many[name].depth
        assert item.build() != other[name].build()


def test_generated_depths_are_spread() -> None:
    depths = sorted(synthetic.needle_depth("passkey", index) or 0.0 for index in range(20))
    assert depths[0] < 0.1
    assert depths[-1] > 0.9
    assert max(right - left for left, right in pairwise(depths)) < 0.1


@pytest.mark.parametrize("index", range(7))
def test_math_find_has_a_third_rank_without_filler(index: int) -> None:
    make = synthetic.example_maker("math_find", 0, 64, index)
    example = make(0)
    numbers = json.loads(example["context"])
    assert len(set(numbers)) == len(numbers) == 8
    assert all(0 <= number <= 99 for number in json.loads(make(500)["context"]))


def test_generated_without_lengths_have_the_default_one(protocols: Path) -> None:
    assert {item.length for item in items_of(protocols, GENERATED)} == {4096}


def test_official_examples_are_preferred(protocols: Path, tmp_path: Path) -> None:
    items = items_of(protocols, ("passkey", "kv_retrieval"), tmp_path, example_of("passkey"), limit=1)
    assert [item.sample_id for item in items] == ["row-7", "generated-0"]


def test_a_length_without_room_for_the_needle_fails_that_sample(protocols: Path) -> None:
    (item,) = items_of(protocols, "kv_retrieval", lengths=(80,), limit=1)
    with pytest.raises(ValueError, match=r"without filler has \d+ tokens, but only 30"):
        item.build()


@pytest.mark.parametrize("budget", [10, 11, 57, 1000, 12_345])
@pytest.mark.parametrize("jump", [0, 7])
def test_most_units_is_exact(budget: int, jump: int) -> None:
    tries = []

    def tokens_with(units: int) -> int:
        tries.append(units)
        return 10 + 3 * units + jump * (units > 20)

    most = synthetic.most_units(tokens_with, budget)
    assert tokens_with(most) <= budget < tokens_with(most + 1)
    assert len(tries) < 16
