"""InfiniteBench (https://arxiv.org/abs/2402.13718): 12 tasks on inputs around 100,000 tokens and more."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks import infinitebench_synthetic as synthetic
from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.errors import EvalError
from eval.prompts import encode_prompt
from eval.protocols import load_protocol, render_prompt
from eval.rows import RowsNotFoundError, load_rows, unique_ids

CHOICE_TASKS = frozenset({"code_debug", "longbook_choice_eng"})
SINGLE_ANSWER_TASKS = frozenset({"kv_retrieval", "longbook_sum_eng"})
LETTERS = "ABCD"
GENERATED_LENGTHS = (4096,)
WITHOUT_CHAT_TEMPLATE = frozenset({"yarn_mistral_templates"})
"""Sets for a base model: most prompts end with the beginning of the answer, and new tokens are counted from there."""
GENERATED_SAMPLES = 50

_FUNCTION_CALL = re.compile(r"(func_\d+)\(-?\d+\)")
_ASKED_NUMBER = re.compile(r"The (?:\w+ )+number")


@dataclass(frozen=True)
class _Task:
    """The settings that a task's samples share."""

    name: str
    template: str
    max_new_tokens: int
    setup: Setup
    chat: bool

    def room(self, length: int) -> int:
        """Tokens for the prompt where prompt and answer have ``length``."""
        if length - self.max_new_tokens < 2:
            raise EvalError(
                f"length={length} leaves no room for a prompt: {self.name} generates max_new_tokens="
                f"{self.max_new_tokens}; ask for more, or leave the task out"
            )
        return length - self.max_new_tokens

    def encode(self, row: dict[str, Any], max_tokens: int | None) -> tuple[list[int], list[int]]:
        """Tokens of a row's prompt: material and question."""
        text, question_chars = render_prompt(self.template, row["context"], **prompt_fields(self.name, row))
        return encode_prompt(self.setup.tokenizer, text, question_chars, chat=self.chat, max_tokens=max_tokens)

    def build(self, row: dict[str, Any], max_tokens: int | None) -> Sample:
        """The sample of a row, its prompt cut in the middle."""
        material, question = self.encode(row, max_tokens)
        return Sample(material, question, answers_of(self.name, row), self.max_new_tokens)

    def build_generated(self, length: int, index: int) -> Sample:
        """A sample with as much filler as fits."""
        make_row = synthetic.row_maker(self.name, self.setup.seed, length, index)
        units = synthetic.most_units(
            lambda count: sum(len(part) for part in self.encode(make_row(count), None)), self.room(length)
        )
        return self.build(make_row(units), None)


class InfiniteBench(Benchmark):
    """InfiniteBench, from its official rows; the retrieval tasks and Math.Find are generated where there are none.

    An item's ``sample_id`` says which it is: ``row-<id>`` or ``generated-<number>``.
    """

    name: ClassVar[str] = "infinitebench"
    summary: ClassVar[str] = "InfiniteBench: retrieval, books, dialogue, code, arithmetic; 12 tasks around 100K tokens"
    tasks: ClassVar[tuple[str, ...]] = (
        "passkey",
        "number_string",
        "kv_retrieval",
        "longbook_sum_eng",
        "longbook_choice_eng",
        "longbook_qa_eng",
        "longbook_qa_chn",
        "longdialogue_qa_eng",
        "math_find",
        "math_calc",
        "code_run",
        "code_debug",
    )
    protocol: ClassVar[str | None] = "infinitebench"
    options: ClassVar[dict[str, Any]] = {"template_set": "yarn_mistral_templates"}

    def items(self, setup: Setup) -> list[Item]:
        """Rows of the requested tasks; ``setup.lengths`` are lengths to which prompt and answer are cut or made."""
        prompts = load_protocol("infinitebench", setup.protocol_dir).values["prompts"]
        template_set = setup.option("template_set", self.options["template_set"])
        if template_set not in prompts["templates"]:
            raise EvalError(f"template_set={template_set!r} is not allowed: one of {', '.join(prompts['templates'])}")
        for length in setup.lengths:
            setup.check_length(length)
        items = []
        for name in setup.tasks:
            template, max_new_tokens = prompts["templates"][template_set][name], prompts["max_new_tokens"][name]
            chat = setup.chat and template_set not in WITHOUT_CHAT_TEMPLATE
            task = _Task(name, template, max_new_tokens, setup, chat)
            try:
                items += _official_items(task)
            except RowsNotFoundError as error:
                if name not in synthetic.MAKERS:
                    raise
                logging.getLogger(__name__).warning("generating the samples of %s: %s", name, error)
                items += _generated_items(task)
        return items


def _official_items(task: _Task) -> list[Item]:
    setup = task.setup
    rows, origin = load_rows(
        f"{task.name}.jsonl",
        hub_id="xinrongzhang2022/InfiniteBench",
        hub_filename=f"{task.name}.jsonl",
        data_dir=setup.data_dir,
        benchmark="infinitebench",
        required=("context", "input", "answer", *(("options",) if task.name in CHOICE_TASKS else ())),
    )
    for number, row in enumerate(rows, start=1):
        try:
            prompt_fields(task.name, row)
            answers_of(task.name, row)
        except ValueError as error:
            raise EvalError(f"{origin}: row {number}: {error}") from error
    ids = unique_ids(rows, "id")
    items = []
    for length in setup.lengths or (None,):
        max_tokens = task.room(length or setup.max_positions)
        items += [
            Item(task.name, f"row-{row_id}", partial(task.build, row, max_tokens), length)
            for row_id, row in list(zip(ids, rows, strict=True))[: setup.limit]
        ]
    return items


def _generated_items(task: _Task) -> list[Item]:
    setup = task.setup
    items = []
    for length in setup.lengths or GENERATED_LENGTHS:
        setup.check_length(length)
        task.room(length)
        items += [
            Item(
                task.name,
                f"generated-{index}",
                partial(task.build_generated, length, index),
                length,
                synthetic.needle_depth(task.name, index),
            )
            for index in range(GENERATED_SAMPLES if setup.limit is None else min(setup.limit, GENERATED_SAMPLES))
        ]
    return items


def prompt_fields(task: str, row: dict[str, Any]) -> dict[str, str]:
    """Return the fields of the task's template beside the context.

    Raises
    ------
    ValueError
        The row's ``input`` or ``options`` do not have what the task needs.
    """
    question = row["input"]
    fields = {"input": question, "question": question}
    if task == "code_run":
        call = _FUNCTION_CALL.search(question)
        if call is None:
            raise ValueError(f"input={question!r:.80} has no function call such as func_1(2)")
        fields |= {"func": call[1], "func_call": call[0]}
    elif task == "math_find":
        asked = _ASKED_NUMBER.search(question)
        if asked is None:
            raise ValueError(f"input={question!r:.80} does not say 'The ... number'")
        fields["prefix"] = f"What is {asked[0].lower()} in the following list?"
    elif task in CHOICE_TASKS:
        fields |= {f"OPTION_{letter}": str(option) for letter, option in zip(LETTERS, _options(row), strict=True)}
    return fields


def answers_of(task: str, row: dict[str, Any]) -> Any:
    """A row's answer, in the form that ``eval.metrics.score`` takes.

    Raises
    ------
    ValueError
        The answer is empty, not a number where one is asked for, or not one of the options.
    """
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    if len(answers) == 1 and isinstance(answers[0], list):
        answers = answers[0]
    if not answers:
        raise ValueError("answer is empty")
    if task in CHOICE_TASKS:
        return _choice(answers, row)
    if task in {"code_run", "math_calc"}:
        return [int(answer) for answer in answers]
    if task == "math_find":
        return [answer if isinstance(answer, (int, float)) else _number(answer) for answer in answers]
    return str(answers[0]) if task in SINGLE_ANSWER_TASKS else [str(answer) for answer in answers]


def _choice(answers: Sequence[Any], row: dict[str, Any]) -> list[str]:
    text, options = str(answers[0]), _options(row)
    if len(answers) == 2 and answers[1] in tuple(LETTERS):
        return [text, answers[1]]
    if text not in options:
        raise ValueError(f"answer={text!r:.80} is not one of the options {options!r:.200}")
    return [text, LETTERS[options.index(text)]]


def _options(row: dict[str, Any]) -> list[str]:
    options = [str(option) for option in row["options"]]
    if len(options) != len(LETTERS):
        raise ValueError(f"options has {len(options)} entries, not {len(LETTERS)}")
    return options


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text.strip()) else float(text)
