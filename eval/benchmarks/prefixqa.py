"""PrefixQA: many questions over one shared context, which is prepared once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.data_files import first_file
from eval.errors import EvalError
from eval.examples import ExamplesNotFoundError, read_jsonl
from eval.prompts import encode_prompt, truncate_middle

FILENAME = "prefixqa.jsonl"
MAX_NEW_TOKENS = 32
_LEAST_CONTEXT = 16
"""Tokens of a context after the cut, below which questions would be about nothing."""
_INTRODUCTION = (
    "Read the text. A question about it follows; answer with a few words from the text and nothing else.\n\n"
)
_QUESTION = "\n\nQuestion: {question}\nAnswer:"


class PrefixQA(Benchmark):
    """Questions with short answers, several on each context; the score is the F1 over words of the first line.

    All prompts over a context begin with the same tokens: a context that is too long is cut once, for its longest
    question.
    """

    name: ClassVar[str] = "prefixqa"
    summary: ClassVar[str] = "many questions over one context, which is prepared once"
    tasks: ClassVar[tuple[str, ...]] = ("qa",)
    options: ClassVar[dict[str, Any]] = {"questions": None}

    def items(self, setup: Setup) -> list[Item]:
        """Return an item for each question, those of a context together; a length covers prompt and answer."""
        most = setup.option("questions", self.options["questions"])
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise EvalError(f"questions={most!r} is not allowed: a whole number, at least 1, or None for all")
        for requested in setup.lengths:
            setup.check_length(requested)
        contexts = read_contexts(setup.data_dir)
        items: list[Item] = []
        lengths: Sequence[int | None] = setup.lengths or (None,)
        for length in lengths:
            left = setup.limit
            for number, context in enumerate(contexts):
                chosen = spread(len(context["questions"]), most)[:left]
                if not chosen:
                    break
                left = None if left is None else left - len(chosen)
                asked = [context["questions"][place] for place in chosen]
                prompt = _SharedPrompt(setup, context["context"], tuple(entry["question"] for entry in asked), length)
                prompt.check_room()
                items += [
                    Item("qa", f"{number}-{place}", partial(prompt.sample, entry), length, material=f"{number}")
                    for place, entry in zip(chosen, asked, strict=True)
                ]
        return items


def read_contexts(data_dir: Path | None) -> list[dict[str, Any]]:
    """Read the contexts with their questions, from the data folder or its subfolder ``prefixqa``.

    Raises
    ------
    EvalError
        The file is missing or malformed; the message names file and line.
    """
    if data_dir is None:
        raise EvalError(f"--data-dir is missing; allowed: a folder with {FILENAME}. {_ADVICE}")
    names = (FILENAME, f"prefixqa/{FILENAME}")
    if (found := first_file(data_dir, names)) is not None:
        return read_jsonl(found, ("context", "questions"), check_context)
    places = ", ".join(str(data_dir / name) for name in names)
    raise ExamplesNotFoundError(f"prefixqa: no file of contexts; looked for {places}. {_ADVICE}")


_ADVICE = (
    f"Make one from SQuAD's articles with: python -m eval make-prefixqa --out D/{FILENAME}, D being the folder of "
    "--data-dir"
)


def check_context(entry: dict[str, Any], place: str) -> None:
    """Check a context and its questions, whose types ``read_jsonl`` has not checked.

    Raises
    ------
    EvalError
        The context is empty, or a question is not a text with at least one answer; the message names the question.
    """
    if not entry["context"].strip():
        raise EvalError(f"{place}: context is empty")
    if not entry["questions"]:
        raise EvalError(f"{place}: questions is empty; at least one question is needed")
    for number, asked in enumerate(entry["questions"], start=1):
        where = f"{place}: question {number}"
        if not isinstance(asked, dict):
            raise EvalError(f"{where} is {asked!r:.80}, not an object with question and answers")
        if missing := [name for name in ("question", "answers") if name not in asked]:
            raise EvalError(f"{where} lacks {', '.join(missing)} (it has: {', '.join(asked) or 'nothing'})")
        question, answers = asked["question"], asked["answers"]
        if not isinstance(question, str) or not question.strip():
            raise EvalError(f"{where}: question={question!r:.80} is not allowed: a text that is not empty")
        if not isinstance(answers, list) or not answers or not all(isinstance(each, str) for each in answers):
            raise EvalError(f"{where}: answers={answers!r:.80} is not allowed: a list of at least one text")


def spread(count: int, most: int | None) -> list[int]:
    """Return the places of at most ``most`` of a context's questions, evenly spread over them."""
    kept = count if most is None else min(most, count)
    return [index * count // kept for index in range(kept)]


@dataclass(frozen=True)
class _SharedPrompt:
    """The prompts of the questions over one context, which begin with the same tokens."""

    setup: Setup
    context: str
    questions: tuple[str, ...]
    length: int | None

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a prompt."""
        return (self.length or self.setup.max_positions) - MAX_NEW_TOKENS

    def sample(self, entry: dict[str, Any]) -> Sample:
        """Return the sample of one of the questions."""
        material, question = self._encode(self.cut_context, entry["question"])
        return Sample(
            material_ids=material,
            question_ids=question,
            references=entry["answers"],
            max_new_tokens=MAX_NEW_TOKENS,
            stop_at_newline=True,
            min_new_tokens=1,  # or answers that begin with a newline would be empty
        )

    def check_room(self) -> None:
        """Check that a context of some tokens fits beside the longest question.

        Raises
        ------
        EvalError
            The length is too small.
        """
        least = self._tokens("") + MAX_NEW_TOKENS + _LEAST_CONTEXT
        if (length := self.length or self.setup.max_positions) < least:
            raise EvalError(f"length={length} is not allowed: at least {least}, for context, question and answer")

    @cached_property
    def cut_context(self) -> str:
        """The context, cut in the middle so that the longest question fits."""
        tokenizer, room = self.setup.tokenizer, self.max_tokens
        text = truncate_middle(tokenizer, self.context, room)
        while (excess := self._tokens(text) - self.max_tokens) > 0:
            # The joined halves may encode to more tokens than they had.
            room = min(room, len(tokenizer(text)["input_ids"])) - excess
            text = truncate_middle(tokenizer, self.context, room)
        return text

    @cached_property
    def _longest(self) -> str:
        return max(self.questions, key=lambda question: len(self._encode("", question)[1]))

    def _tokens(self, context: str) -> int:
        return sum(map(len, self._encode(context, self._longest)))

    def _encode(self, context: str, question: str) -> tuple[list[int], list[int]]:
        asked = _QUESTION.format(question=question)
        text = _INTRODUCTION + context + asked
        return encode_prompt(self.setup.tokenizer, text, len(asked), chat=self.setup.chat)
