"""LongBench (https://arxiv.org/abs/2308.14508): 21 tasks on long documents, English and Chinese."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks import quest
from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.errors import EvalError
from eval.examples import load_examples, unique_ids
from eval.prompts import Parts, encode_prompt, encode_within
from eval.protocols import load_protocol, render_prompt
from hf_sparse_attn.cli.models import first_line

ENGLISH_TASKS = (
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "gov_report",
    "qmsum",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
)
CHINESE_TASKS = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")

# The official code does not wrap these: few-shot examples and code are continued, not answered.
WITHOUT_CHAT_TEMPLATE = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
ENDING_AT_NEWLINE = frozenset({"samsum"})
CATEGORIES = {
    "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-document QA": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few-shot learning": ("trec", "triviaqa", "samsum"),
    "synthetic tasks": ("passage_count", "passage_retrieval_en"),
    "code completion": ("lcc", "repobench-p"),
}
"""The benchmark's categories of its English tasks, as its repository's task list has them."""
REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
"""Commit of the data set on the hub."""
QUESTION_STARTS = ("context", "input", "quest")


class LongBench(Benchmark):
    """LongBench, with prompts longer than the model or the requested length cut in the middle."""

    name: ClassVar[str] = "longbench"
    summary: ClassVar[str] = "LongBench: QA, summaries, few-shot, retrieval, code; 16 English and 5 Chinese tasks"
    tasks: ClassVar[tuple[str, ...]] = ENGLISH_TASKS + CHINESE_TASKS
    default_tasks: ClassVar[tuple[str, ...]] = ENGLISH_TASKS
    protocol: ClassVar[str | None] = "longbench"
    averages: ClassVar[dict[str, tuple[str, ...]]] = CATEGORIES | {
        "mean of the 6 categories": tuple(CATEGORIES),
        "mean of the 16 tasks": ENGLISH_TASKS,
    }
    options: ClassVar[dict[str, Any]] = {"cut": None, "question_from": "context"}
    suffix: ClassVar[str] = ""
    """Suffix of a task's file name after the task."""
    required: ClassVar[tuple[str, ...]] = ("context", "input", "answers", "all_classes")

    def categories(self, example: dict[str, Any]) -> dict[str, str]:
        """Return an example's categories."""
        return {}

    def items(self, setup: Setup) -> list[Item]:
        """Return the items of the requested tasks; ``setup.lengths`` are those of prompt and answer after the cut."""
        values = load_protocol("longbench", setup.protocol_dir).values
        for length in setup.lengths:
            setup.check_length(length)
        cut, start = (setup.option(name, self.options[name]) for name in ("cut", "question_from"))
        check_cut(cut)
        if start not in QUESTION_STARTS:
            raise EvalError(f"question_from={start!r} is not allowed: one of {', '.join(QUESTION_STARTS)}")
        items = []
        for task in setup.tasks:
            template, max_new_tokens = values["dataset2prompt"][task], values["dataset2maxlen"][task]
            examples, origin = load_examples(
                f"{task}{self.suffix}.jsonl",
                hub_id="THUDM/LongBench",
                hub_filename="data.zip",
                data_dir=setup.data_dir,
                benchmark="longbench",
                required=self.required,
                revision=REVISION,
            )
            for example in examples:
                for field in ("answers", "all_classes"):
                    example[field] = as_list(example[field], f"{origin}: {field} of example {example.get('_id')!r}")
            ids = unique_ids(examples, "_id")
            lengths: Sequence[int | None] = setup.lengths or (None,)
            for requested in lengths:
                max_tokens = (requested or setup.max_positions) - max_new_tokens
                if max_tokens < 2:
                    raise EvalError(
                        f"length={requested or setup.max_positions} leaves no room for a prompt: "
                        f"{task} generates max_new_tokens={max_new_tokens}"
                    )
                build = partial(_build, setup, task, template, max_new_tokens, max_tokens)
                items += [
                    Item(task, sample_id, partial(build, example), requested, categories=self.categories(example))
                    for sample_id, example in list(zip(ids, examples, strict=True))[: setup.limit]
                ]
        return items


def check_cut(cut: Any) -> None:
    """Raise if ``cut`` is not a number of tokens to which a prompt can be cut, or None."""
    if cut is not None and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 2):
        raise EvalError(f"cut={cut!r} is not allowed: a whole number of tokens, at least 2, or None")


def _build(
    setup: Setup, task: str, template: str, max_new_tokens: int, max_tokens: int, example: dict[str, Any]
) -> Sample:
    chat = setup.chat and task not in WITHOUT_CHAT_TEMPLATE
    text, context_chars = render_prompt(template, example["context"], input=example["input"])
    split: Callable[[str], Parts]
    if setup.option("question_from", "context") == "quest":
        split = partial(quest.split_longbench, setup.tokenizer, task, chat=chat)
    else:
        from_input = setup.option("question_from", "context") == "input"
        question_chars = _input_chars(template, example["input"]) if from_input else context_chars
        split = partial(encode_prompt, setup.tokenizer, question_chars=question_chars, chat=chat)
    prompt = encode_within(setup.tokenizer, text, split, max_tokens, setup.option("cut", None))
    return Sample(
        material_ids=prompt.material_ids,
        question_ids=prompt.question_ids,
        references=example["answers"],
        max_new_tokens=max_new_tokens,
        all_classes=example["all_classes"] or None,
        stop_at_newline=task in ENDING_AT_NEWLINE,
        min_new_tokens=int(task in ENDING_AT_NEWLINE),  # as in the official code: answers would often be empty
        truncated=prompt.truncated,
    )


def _input_chars(template: str, given: str) -> int:
    """Return the length of a prompt's end from the task's input on, or from the words after the context without one.

    Squeezed Attention's released code prepares everything before as the fixed context.
    """
    tail = template.rpartition("{context}")[2]
    tail = tail[tail.index("{input}") :] if "{input}" in tail else tail.lstrip()
    return len(tail.format(input=given))


def as_list(value: Any, place: str) -> list[str]:
    """Return a list of strings; some copies of the data store its Python source, or nothing if it is empty.

    Raises
    ------
    EvalError
        The value is neither; the message begins with ``place``.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise EvalError(f"{place} is not a Python list: {first_line(error)}") from error
    if value is None or value == "":
        return []
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(element, str) for element in listed):
        raise EvalError(f"{place} is not a list of strings but {value!r:.80}")
    return listed
