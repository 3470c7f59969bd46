"""LongBench: the real examples, truncation, chat template, and malformed examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from transformers import PreTrainedTokenizerBase

from eval.benchmarks.base import Item, Setup
from eval.benchmarks.longbench import CHINESE_TASKS, ENGLISH_TASKS, WITHOUT_CHAT_TEMPLATE, LongBench
from eval.errors import EvalError
from eval.protocols import load_protocol
from tests.eval.tokenizers import tiny_tokenizer
from tests.tiny import make_tokenizer

GOLDEN = Path(__file__).parent / "golden"


def make_example(**changes: Any) -> dict[str, Any]:
    example = {
        "context": "START " + "filler {words} " * 40 + "END",
        "input": "Who?",
        "answers": ["A", "B"],
        "length": 80,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "row-1",
    }
    return {**example, **changes}


def items_of(
    folder: Path, protocols: Path, task: str, *examples: dict[str, Any], max_positions: int = 10_000, **options: Any
) -> list[Item]:
    lines = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
    (folder / f"{task}.jsonl").write_text(lines, encoding="utf-8")
    options = {"tokenizer": tiny_tokenizer(chat=True), **options}
    setup = Setup(max_positions=max_positions, tasks=(task,), data_dir=folder, protocol_dir=protocols, **options)
    return LongBench().items(setup)


def text_of(tokenizer: PreTrainedTokenizerBase, *parts: Any) -> str:
    return str(tokenizer.decode([token for part in parts for token in part]))


def test_tasks_are_those_of_the_protocol(protocols: Path) -> None:
    assert set(LongBench.tasks) == set(load_protocol("longbench", protocols).values["dataset2maxlen"])
    assert len(LongBench.tasks) == 21
    assert LongBench.default_tasks == ENGLISH_TASKS
    assert len(ENGLISH_TASKS) == 16
    assert not set(CHINESE_TASKS) & set(ENGLISH_TASKS)


def real_setup(tasks: Sequence[str], protocols: Path, max_positions: int = 8_000) -> Setup:
    tokenizer = tiny_tokenizer(chat=True)
    return Setup(tokenizer, max_positions, tasks, data_dir=GOLDEN, protocol_dir=protocols, chat=True)


def test_every_real_example_is_an_item(protocols: Path) -> None:
    items = LongBench().items(real_setup(ENGLISH_TASKS, protocols))
    assert sorted(item.task for item in items) == sorted(ENGLISH_TASKS)


@pytest.mark.parametrize("max_positions", [8_000, 1_600], ids=["whole", "cut"])
@pytest.mark.parametrize("task", ENGLISH_TASKS)
def test_every_real_example_builds_within_the_limit_with_its_question(
    task: str, max_positions: int, protocols: Path
) -> None:
    values = load_protocol("longbench", protocols).values
    template, max_new_tokens = values["dataset2prompt"][task], values["dataset2maxlen"][task]
    setup = real_setup((task,), protocols, max_positions)
    examples = [json.loads(line) for line in (GOLDEN / f"longbench/{task}.jsonl").open(encoding="utf-8")]
    for example, item in zip(examples, LongBench().items(setup), strict=True):
        sample = item.build()
        total = len(sample.material_ids) + len(sample.question_ids)
        assert total + max_new_tokens <= setup.max_positions
        official, tail = template.format(**example), template.partition("{context}")[2].format(**example)
        whole = text_of(setup.tokenizer, sample.material_ids, sample.question_ids).removeprefix("<s>")
        question = text_of(setup.tokenizer, sample.question_ids)
        if task not in WITHOUT_CHAT_TEMPLATE:
            official, tail = official.strip(), tail.rstrip()
            assert whole.startswith("<|user|>")
            assert whole.endswith("\n<|assistant|>")
            whole = whole.removeprefix("<|user|>").removesuffix("\n<|assistant|>")
            question = question.removesuffix("\n<|assistant|>")
        assert question.endswith(tail)
        assert len(question) - len(tail) < 16  # at most the rest of a token that holds the material's end
        assert (whole != official) == (max_positions == 1_600)
        if whole != official:
            assert total + max_new_tokens > setup.max_positions - 16  # cuts only what it must
            assert whole[:800] == official[:800]
            assert whole[-800:] == official[-800:]
        assert (item.sample_id, sample.references) == (example["_id"], example["answers"])
        assert sample.max_new_tokens == max_new_tokens
        assert (sample.all_classes is not None) == (task == "trec")
        assert sample.stop_at_newline == (task == "samsum")


def test_truncation_keeps_head_and_tail_at_each_requested_length(protocols: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()  # only a token per byte or word, so the official cut is known exactly
    examples = [make_example(), make_example(_id="row-2", context="short")]
    lengths = (480, 600)
    items = items_of(tmp_path, protocols, "hotpotqa", *examples, lengths=lengths, tokenizer=tokenizer)
    assert [(item.sample_id, item.length) for item in items] == [
        ("row-1", 480),
        ("row-2", 480),
        ("row-1", 600),
        ("row-2", 600),
    ]
    values = load_protocol("longbench", protocols).values
    official = values["dataset2prompt"]["hotpotqa"].format(**examples[0])
    for item, length in ((items[0], 480), (items[2], 600)):
        sample = item.build()
        whole = text_of(tokenizer, sample.material_ids, sample.question_ids)
        room = length - values["dataset2maxlen"]["hotpotqa"]
        half = room // 2
        assert len(sample.material_ids) + len(sample.question_ids) == 2 * half
        ids = tokenizer(official)["input_ids"]
        assert len(ids) > room
        assert list(sample.material_ids) + list(sample.question_ids) == ids[:half] + ids[-half:]
        assert "Who?" in whole


def test_limit_holds_for_each_task_and_length(protocols: Path, tmp_path: Path) -> None:
    examples = [make_example(_id=str(index)) for index in range(5)]
    items = items_of(tmp_path, protocols, "hotpotqa", *examples, lengths=(500, 600), limit=2)
    assert [(item.sample_id, item.length) for item in items] == [("0", 500), ("1", 500), ("0", 600), ("1", 600)]


def test_examples_without_lengths_have_none(protocols: Path, tmp_path: Path) -> None:
    (item,) = items_of(tmp_path, protocols, "hotpotqa", make_example())
    assert item.length is None


@pytest.mark.parametrize("task", LongBench.tasks)
def test_chat_template_only_where_the_official_code_has_it(task: str, protocols: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    for chat in (True, False):
        (item,) = items_of(tmp_path, protocols, task, make_example(), chat=chat)
        sample = item.build()
        whole = text_of(tokenizer, sample.material_ids, sample.question_ids)
        few_shot_or_code = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
        assert ("<|user|>" in whole) == (chat and task not in few_shot_or_code)
        assert "filler {words} filler" in whole  # braces of the context are not the template's


def test_lists_kept_as_python_source_are_read(protocols: Path, tmp_path: Path) -> None:
    example = make_example(answers="['it\\'s', \"B\"]", all_classes="['x', 'y']", _id="")
    (item,) = items_of(tmp_path, protocols, "trec", example)
    sample = item.build()
    assert sample.references == ["it's", "B"]
    assert sample.all_classes == ["x", "y"]
    assert item.sample_id == "0"
    (plain,) = items_of(tmp_path, protocols, "trec", make_example(answers="one answer", all_classes=""))
    assert plain.build().references == ["one answer"]
    assert plain.build().all_classes is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"answers": "['open"}, "answers of example 'row-1' is not a Python list"),
        ({"answers": "[{[]: 1}]"}, "answers of example 'row-1' is not a Python list: unhashable"),
        ({"answers": f"[{'-' * 20_000}1]"}, "answers of example 'row-1' is not a Python list: [MR]"),
        ({"answers": "[__import__('os').getcwd()]"}, "answers of example 'row-1' is not a Python list"),
        ({"answers": [1]}, "answers of example 'row-1' is not a list of strings"),
        ({"all_classes": {"a": 1}}, "all_classes of example 'row-1' is not a list of strings"),
        ({"context": None}, r"hotpotqa\.jsonl:1: context is of type NoneType"),
    ],
)
def test_malformed_examples_raise_before_any_work(
    changes: dict[str, Any], problem: str, protocols: Path, tmp_path: Path
) -> None:
    with pytest.raises(EvalError, match=problem):
        items_of(tmp_path, protocols, "hotpotqa", make_example(**changes))


def test_impossible_lengths_raise(protocols: Path, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="length=20000 is not allowed: at most"):
        items_of(tmp_path, protocols, "hotpotqa", make_example(), lengths=(20_000,))
    with pytest.raises(EvalError, match=r"length=512 leaves no room .* gov_report generates max_new_tokens=512"):
        items_of(tmp_path, protocols, "gov_report", make_example(), max_positions=512)


def test_absent_examples_raise_before_any_work(
    protocols: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    setup = Setup(tiny_tokenizer(), 4096, tasks=("lsht",), data_dir=tmp_path, protocol_dir=protocols)
    with pytest.raises(EvalError, match=r"lsht\.jsonl.*data\.zip.*THUDM/LongBench.*--data-dir"):
        LongBench().items(setup)
