"""LongBench's prompts and scores against the official code's, which were computed once (golden/make_longbench.py)."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval import metrics
from eval.benchmarks import BENCHMARKS
from eval.benchmarks.base import Item, Sample, Setup
from eval.benchmarks.longbench import CHINESE_TASKS, ENGLISH_TASKS
from eval.benchmarks.longbench_e import LongBenchE
from eval.prompts import encode_prompt
from eval.protocols import Protocol
from eval.summary import category_scores
from tests.eval.own_protocols import FIGURES
from tests.eval.tokenizers import tiny_tokenizer

OFFICIAL: dict[str, Any] = json.loads((Path(__file__).parent / "golden/prompts.json").read_text(encoding="utf-8"))
LONGBENCH, LONGBENCH_E = OFFICIAL["longbench"], OFFICIAL["longbench_e"]
PROMPTS: dict[str, dict[str, Any]] = LONGBENCH["prompts"]


# LongBench


def test_every_english_task_has_an_official_prompt() -> None:
    assert set(PROMPTS) == set(ENGLISH_TASKS)
    for task, template in LONGBENCH["wording"].items():
        assert re.findall(r"{\w+}", template) == FIGURES["longbench"]["fields"][task]


def texts_of(sample: Sample) -> tuple[str, str]:
    tokenizer = tiny_tokenizer()
    return str(tokenizer.decode(sample.material_ids)), str(tokenizer.decode(sample.question_ids))


def longbench_items(
    monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, rows: list[dict[str, Any]], **setting: Any
) -> list[Item]:
    """Return the items of rows in a task's file, with the fixtures' wording and chat template."""
    values = {"dataset2prompt": LONGBENCH["wording"], "dataset2maxlen": dict.fromkeys(LONGBENCH["wording"], 4)}
    protocol = Protocol("longbench", values, "0" * 64, "here")
    monkeypatch.setattr("eval.benchmarks.longbench.load_protocol", lambda name, folder: protocol)
    (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = "{{ bos_token }}[INST]{{ messages[0]['content'] }}[/INST]"
    benchmark = "longbench_e" if file.endswith("_e") else "longbench"
    setup = Setup(tokenizer, 10_000, (file.removesuffix("_e"),), data_dir=folder, **setting)
    return BENCHMARKS[benchmark].items(setup)


@pytest.fixture
def sample_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that builds the fixtures' row of a task."""

    def build(task: str, chat: bool, **options: Any) -> Sample:
        options = {"cut": LONGBENCH["cut"], **options}
        rows = [LONGBENCH["examples"][task]]
        (item,) = longbench_items(monkeypatch, tmp_path, task, rows, chat=chat, options=options)
        return item.build()

    return build


@pytest.mark.parametrize("task", PROMPTS)
def test_longbench_prompt_is_the_official_one(task: str, sample_of: Any) -> None:
    sample = sample_of(task, chat=True)
    assert "".join(texts_of(sample)) == PROMPTS[task]["longbench"]
    assert sample.truncated
    assert ["\n"] * sample.stop_at_newline == PROMPTS[task]["ends_at"]
    assert sample.min_new_tokens == PROMPTS[task]["least_new_tokens"]


@pytest.mark.parametrize("task", [task for task in PROMPTS if "quest_material" in PROMPTS[task]])
def test_longbench_is_split_as_quest_does(task: str, sample_of: Any) -> None:
    sample = sample_of(task, chat=True, question_from="quest")
    assert texts_of(sample) == (PROMPTS[task]["quest_material"], PROMPTS[task]["quest_question"])


@pytest.mark.parametrize("task", [task for task in PROMPTS if "squeezed" in PROMPTS[task]])
def test_longbench_is_split_as_squeezed_attention_does(task: str, sample_of: Any) -> None:
    sample = sample_of(task, chat=False, question_from="input")
    assert "".join(texts_of(sample)).removeprefix("<s>") == PROMPTS[task]["squeezed"]
    # The official code counts the fixed part's tokens alone: a token may span its end, and another one the cut.
    assert abs(len(sample.material_ids) - PROMPTS[task]["squeezed_fixed_tokens"]) <= 2


@pytest.mark.parametrize("strips", [False, True])
def test_the_space_at_a_prompts_end_stays_unless_the_chat_template_strips_it(strips: bool) -> None:
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = f"[INST]{{{{ messages[0]['content']{' | trim' * strips} }}}}[/INST]"
    material, question = encode_prompt(
        tokenizer, "Some lamps.\n\nThe number is: ", len("\n\nThe number is: "), chat=True
    )
    assert tokenizer.decode(material) == "[INST]Some lamps."
    assert tokenizer.decode(question) == f"\n\nThe number is:{' ' * (not strips)}[/INST]"


def test_tasks_without_a_split_are_those_that_the_papers_leave_out() -> None:
    assert [task for task in PROMPTS if "quest_material" not in PROMPTS[task]] == ["samsum"]
    assert [task for task in PROMPTS if "squeezed" not in PROMPTS[task]] == ["passage_count", "passage_retrieval_en"]


@pytest.mark.parametrize("task", ["lcc", "repobench-p"])
def test_code_has_both_official_metrics(task: str) -> None:
    for case in OFFICIAL["code_scores"]:
        arguments = ("longbench", task, case["prediction"], [case["reference"]])
        assert metrics.named_scores(*arguments) == case["scores"], case
        assert metrics.score(*arguments) == case["scores"]["levenshtein"]
    assert any(case["scores"]["levenshtein"] != case["scores"]["difflib"] for case in OFFICIAL["code_scores"])
    assert metrics.named_scores("longbench", "qasper", "a", ["a"]) is None


def test_chinese_answers_have_the_official_scores() -> None:
    cases = OFFICIAL["chinese_scores"]
    assert {case["task"] for case in cases} == set(CHINESE_TASKS)
    for case in cases:
        found = metrics.score("longbench", case["task"], case["prediction"], case["references"], case["all_classes"])
        assert 100 * found == pytest.approx(case["percent"], abs=0.0051), case  # rounded to hundredths


# LongBench-E


def test_longbench_e_has_the_official_tasks() -> None:
    assert LongBenchE.tasks == tuple(LONGBENCH_E["tasks"])


@pytest.fixture
def e_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives the items of a task's rows."""

    def items(task: str) -> list[Item]:
        official = LONGBENCH_E["tasks"][task]
        common = {name: LONGBENCH_E[name] for name in ("context", "input")}
        common |= {name: official[name] for name in ("answers", "all_classes")}
        rows = [{**common, "length": row["length"]} for row in official["rows"]]
        options = {"cut": LONGBENCH_E["cut"]}
        return longbench_items(monkeypatch, tmp_path, f"{task}_e", rows, chat=True, options=options)

    return items


@pytest.mark.parametrize("task", LONGBENCH_E["tasks"])
def test_longbench_e_prompt_is_the_official_one(task: str, e_items: Any) -> None:
    samples = [item.build() for item in e_items(task)]
    assert {"".join(texts_of(sample)) for sample in samples} == {LONGBENCH_E["tasks"][task]["prompt"]}
    assert all(sample.truncated for sample in samples)


@pytest.mark.parametrize("task", LONGBENCH_E["tasks"])
def test_longbench_e_has_the_official_scores_of_each_length(task: str, e_items: Any) -> None:
    official = LONGBENCH_E["tasks"][task]
    column = {"benchmark": "longbench_e", "task": task, "length": None, "method": "dense", "token_budget": None}
    records = []
    for item, row in zip(e_items(task), official["rows"], strict=True):
        sample = item.build()
        score = metrics.score("longbench_e", task, row["prediction"], sample.references, sample.all_classes)
        records.append({**column, "categories": item.categories, "score": score})
    found = {entry["value"]: entry["score"] for entry in category_scores(records)}
    expected = {value: mean for value, mean in official["scores"].items() if mean is not None}
    assert found.keys() == expected.keys()  # a length without rows has no score; officially it is not a number
    for value, mean in expected.items():
        assert 100 * found[value] == pytest.approx(mean, abs=0.0051), value  # rounded to hundredths
