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
from eval.examples import ExamplesNotFoundError, load_examples, unique_ids
from eval.prompts import CutPrompt, encode_prompt, encode_within
from eval.protocols import load_protocol, render_prompt

REVISION = "90f0394333616266d9fe85824ceaf505093cbaa5"
"""Commit of the data set on the hub."""
CHOICE_TASKS = frozenset({"code_debug", "longbook_choice_eng"})
SINGLE_ANSWER_TASKS = frozenset({"kv_retrieval", "longbook_sum_eng"})
LETTERS = "ABCD"
GENERATED_LENGTHS = (4096,)
WITHOUT_CHAT_TEMPLATE = frozenset({"yarn_mistral_templates"})
"""Template sets for base models: most prompts end with the beginning of the answer."""
GENERATED_SAMPLES = 50

_FUNCTION_CALL = re.compile(r"(func_\d+)\(-?\d+\)")
_ASKED_NUMBER = re.compile(r"The (?:\w+ )+number")


@dataclass(frozen=True)
class _Task:
    """Settings shared by a task's samples."""

    name: str
    template: str
    max_new_tokens: int
    setup: Setup
    chat: bool

    def room(self, length: int) -> int:
        """Return the tokens left for the prompt if prompt and answer have ``length``."""
        if length - self.max_new_tokens < 2:
            raise EvalError(
                f"length={length} leaves no room for a prompt: {self.name} generates max_new_tokens="
                f"{self.max_new_tokens}; choose a larger length, or leave out the task"
            )
        return length - self.max_new_tokens

    def encode(self, example: dict[str, Any], max_tokens: int | None) -> CutPrompt:
        """Encode an example's prompt, cut in the middle to fit."""
        text, question_chars = render_prompt(self.template, example["context"], **prompt_fields(self.name, example))
        split = partial(encode_prompt, self.setup.tokenizer, question_chars=question_chars, chat=self.chat)
        return encode_within(self.setup.tokenizer, text, split, max_tokens, decode_once=True)

    def build(self, example: dict[str, Any], max_tokens: int | None) -> Sample:
        """Build the sample of an example, with the prompt cut in the middle."""
        prompt = self.encode(example, max_tokens)
        references = answers_of(self.name, example)
        return Sample(*prompt[:2], references, self.max_new_tokens, truncated=prompt.truncated)

    def build_generated(self, length: int, index: int) -> Sample:
        """Build a sample with as much filler as fits."""
        make_example = synthetic.example_maker(self.name, self.setup.seed, length, index)
        units = synthetic.most_units(
            lambda count: sum(map(len, self.encode(make_example(count), None)[:2])), self.room(length)
        )
        return self.build(make_example(units), None)


class InfiniteBench(Benchmark):
    """InfiniteBench, from its official examples; retrieval tasks and Math.Find without any are generated.

    An item's ``sample_id`` is ``row-<id>`` for an official example, and ``generated-<number>`` otherwise.
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
        """Return the items of the requested tasks; ``setup.lengths`` are those of prompt and answer together."""
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
            except ExamplesNotFoundError as error:
                if name not in synthetic.MAKERS:
                    raise
                logging.getLogger(__name__).warning("generating the samples of %s: %s", name, error)
                items += _generated_items(task)
        return items


def _official_items(task: _Task) -> list[Item]:
    setup = task.setup
    examples, origin = load_examples(
        f"{task.name}.jsonl",
        hub_id="xinrongzhang2022/InfiniteBench",
        hub_filename=f"{task.name}.jsonl",
        revision=REVISION,
        data_dir=setup.data_dir,
        benchmark="infinitebench",
        required=("context", "input", "answer", *(("options",) if task.name in CHOICE_TASKS else ())),
    )
    for number, example in enumerate(examples, start=1):
        try:
            prompt_fields(task.name, example)
            answers_of(task.name, example)
        except ValueError as error:
            raise EvalError(f"{origin}: example {number}: {error}") from error
    ids = unique_ids(examples, "id")
    items = []
    for length in setup.lengths or (None,):
        max_tokens = task.room(length or setup.max_positions)
        items += [
            Item(task.name, f"row-{example_id}", partial(task.build, example, max_tokens), length)
            for example_id, example in list(zip(ids, examples, strict=True))[: setup.limit]
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


def prompt_fields(task: str, example: dict[str, Any]) -> dict[str, str]:
    """Return the fields of the task's template, except the context.

    Raises
    ------
    ValueError
        The example's ``input`` or ``options`` lack what the task needs.
    """
    question = example["input"]
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
        fields |= {f"OPTION_{letter}": str(option) for letter, option in zip(LETTERS, _options(example), strict=True)}
    return fields


def answers_of(task: str, example: dict[str, Any]) -> Any:
    """Return an example's answer in the form that ``eval.metrics.score`` takes.

    Raises
    ------
    ValueError
        The answer is empty, not one of the options, or not a number although the task requires one.
    """
    answers = example["answer"] if isinstance(example["answer"], list) else [example["answer"]]
    if len(answers) == 1 and isinstance(answers[0], list):
        answers = answers[0]
    if not answers:
        raise ValueError("answer is empty")
    if task in CHOICE_TASKS:
        return _choice(answers, example)
    if task in {"code_run", "math_calc"}:
        return [int(answer) for answer in answers]
    if task == "math_find":
        return [answer if isinstance(answer, (int, float)) else _number(answer) for answer in answers]
    return str(answers[0]) if task in SINGLE_ANSWER_TASKS else [str(answer) for answer in answers]


def _choice(answers: Sequence[Any], example: dict[str, Any]) -> list[str]:
    text, options = str(answers[0]), _options(example)
    if len(answers) == 2 and answers[1] in tuple(LETTERS):
        return [text, answers[1]]
    if text not in options:
        raise ValueError(f"answer={text!r:.80} is not one of the options {options!r:.200}")
    return [text, LETTERS[options.index(text)]]


def _options(example: dict[str, Any]) -> list[str]:
    options = [str(option) for option in example["options"]]
    if len(options) != len(LETTERS):
        raise ValueError(f"options has {len(options)} entries, not {len(LETTERS)}")
    return options


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text.strip()) else float(text)
