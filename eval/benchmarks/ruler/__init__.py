"""RULER (arXiv 2404.06654): 13 tasks in prompts generated at any length with the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.ruler import chains, counting, documents, needles
from eval.benchmarks.ruler.prompt import Draft, Order, Template, encoder, fit, token_count
from eval.errors import EvalError
from eval.protocols import load_protocol

_SAMPLES = 500
"""Samples of each task and length in the paper."""
_MOST_CHARS_PER_TOKEN = 8
_FAMILIES: dict[str, Callable[[Order], Draft]] = {
    "niah": needles.draft,
    "variable_tracking": chains.draft,
    "common_words_extraction": counting.common_words,
    "freq_words_extraction": counting.frequent_words,
    "qa": documents.draft,
}


class Ruler(Benchmark):
    """Prompts of exact lengths: needles, variable chains, word counts, and questions among distractors.

    A length includes the prompt, the chat template, the answer's beginning and the tokens to generate. No sample
    exceeds it, or is shorter by more than a unit of its haystack (a word, a line, a document) or a thousandth. Settings
    and wording come from the protocol's file. A sample depends only on seed, task, length and index.

    There are four differences from RULER's generator. Sizes are searched for, not raised in fixed steps. Essays are
    split into sentences by a regular expression. Keys and values never repeat. Worked examples are inside the chat
    template.
    """

    name = "ruler"
    summary = "13 synthetic tasks at any length: needles, variable tracking, word counts, questions (2404.06654)"
    tasks = (
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
        "vt",
        "cwe",
        "fwe",
        "qa_1",
        "qa_2",
    )
    default_lengths = (4096,)
    averages: ClassVar[dict[str, tuple[str, ...]]] = {"mean of the 13 tasks": tasks}
    protocol = "ruler"

    def items(self, setup: Setup) -> list[Item]:
        """Return ``setup.limit`` items, or the paper's 500, of every task and length.

        Raises
        ------
        EvalError
            A file is missing or malformed, or a length is too small for its task, or exceeds the model's positions or
            the task's documents.
        """
        content = load_protocol("ruler", setup.protocol_dir).values["tasks"]
        lengths = setup.lengths or self.default_lengths
        for length in lengths:
            setup.check_length(length)
        makers = [_Maker(setup, content, task, length) for task in setup.tasks for length in lengths]
        for maker in makers:
            maker.check()
        return [maker.item(index) for maker in makers for index in range(maker.sample_count)]


class _Maker:
    """Creates the samples of one task at one length."""

    def __init__(self, setup: Setup, content: dict[str, Any], task: str, length: int) -> None:
        self.setup, self.task, self.length = setup, task, length
        self.family, self.args = content["tasks"][task]["task"], content["tasks"][task]["args"]
        wording = content["templates"][self.family]
        self.template = Template(wording["template"], wording["answer_prefix"], wording["tokens_to_generate"])
        self.encode = encoder(setup.tokenizer, setup.chat)
        self.room = length - self.template.tokens_to_generate

    @property
    def sample_count(self) -> int:
        wanted = _SAMPLES if self.setup.limit is None else self.setup.limit
        if self.family != "qa":
            return wanted
        return min(wanted, documents.question_count(self.args["dataset"], self.setup.data_dir))

    def check(self) -> None:
        """Raise if the first sample cannot be created, or not at this length."""
        draft = self.draft(0)
        shortest = token_count(self.encode(draft.render(draft.smallest)))
        if shortest > self.room:
            raise EvalError(
                f"length={self.length} is too small for RULER's {self.task}: its shortest prompt takes {shortest} "
                f"tokens and its answer {self.template.tokens_to_generate}"
            )
        if draft.largest is None:
            return
        whole = draft.render(draft.largest)
        if len(whole.text) < _MOST_CHARS_PER_TOKEN * self.room:  # otherwise it is certainly long enough
            longest = token_count(self.encode(whole)) + self.template.tokens_to_generate
            if longest < self.length:
                raise EvalError(
                    f"length={self.length} is too large for RULER's {self.task}: all its {draft.largest} documents "
                    f"have {longest} tokens"
                )

    def draft(self, index: int) -> Draft:
        setup = self.setup
        # A string seeds the same numbers on every machine.
        rng = Random(f"ruler/{setup.seed}/{self.task}/{self.length}/{index}")
        order = Order(self.template, self.args, self.length, index, rng, setup.tokenizer, setup.data_dir)
        return _FAMILIES[self.family](order)

    def item(self, index: int) -> Item:
        # Only needles have a single position, which is known without a file or a long text.
        depth = self.draft(index).depth if self.family == "niah" else None
        return Item(self.task, str(index), partial(self.sample, index), self.length, depth)

    def sample(self, index: int) -> Sample:
        draft = self.draft(index)
        _, (material_ids, question_ids) = fit(draft, self.room, self.encode)
        return Sample(
            material_ids=material_ids,
            question_ids=question_ids,
            references=draft.references,
            max_new_tokens=self.template.tokens_to_generate,
        )
