"""A RULER prompt of variable size, and the search for the largest size within a length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from eval.errors import EvalError
from eval.prompts import encode_prompt
from eval.protocols import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INTERPOLATIONS = 8
"""Guesses by slope before the search falls back to halving."""
_SPARE = 0.001
"""Share of a length that may stay unused."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's text; its last ``question_chars`` characters are the question."""

    text: str
    question_chars: int
    answer_prefix: str

    def after(self, example: str) -> Prompt:
        """Return this prompt with a worked example before it."""
        return replace(self, text=example + self.text)


@dataclass(frozen=True)
class Template:
    """Wording of a family of tasks, from the protocol's file."""

    text: str
    """Text with the fields ``{context}`` and, by family, ``{query}``, ``{type_needle_v}``, ``{num_v}``."""
    answer_prefix: str
    tokens_to_generate: int

    def singular(self) -> Template:
        """Return the wording for a single value."""

        def reword(text: str) -> str:
            for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
                text = text.replace(plural, single)
            return text

        return replace(self, text=reword(self.text), answer_prefix=reword(self.answer_prefix))

    def fill(self, context: str, **fields: object) -> Prompt:
        """Return the prompt with this context; the question is the text after it."""
        text, question_chars = render_prompt(self.text, context, **fields)
        return Prompt(text, question_chars, self.answer_prefix.format(**fields))


@dataclass(frozen=True)
class Order:
    """Settings and random numbers of one sample."""

    template: Template
    args: dict[str, Any]
    """The task's settings, from the protocol's file."""
    length: int
    """Tokens of prompt and answer together."""
    index: int
    rng: Random
    """The sample's own random numbers."""
    tokenizer: PreTrainedTokenizerBase
    data_dir: Path | None


@dataclass(frozen=True)
class Draft:
    """A sample of variable size."""

    render: Callable[[int], Prompt]
    """Returns the prompt with a number of units of haystack: words, lines, documents."""
    smallest: int
    """Minimum number of units for the task."""
    step: int
    """Units with a few hundred tokens in total, which the search adds first."""
    references: list[str]
    depth: float | None = None
    largest: int | None = None
    """Maximum number of units; None for no limit."""


TokenParts = tuple[list[int], list[int]]
Encode = Callable[[Prompt], TokenParts]


def encoder(tokenizer: PreTrainedTokenizerBase, chat: bool) -> Encode:
    """Return a function that encodes a prompt as tokens of its material and of its question."""

    def encode(prompt: Prompt) -> TokenParts:
        return encode_prompt(
            tokenizer, prompt.text, prompt.question_chars, chat=chat, answer_prefix=prompt.answer_prefix
        )

    return encode


def token_count(parts: TokenParts) -> int:
    """Return the number of tokens of material and question together."""
    return len(parts[0]) + len(parts[1])


def fit(draft: Draft, room: int, encode: Encode) -> tuple[int, TokenParts]:
    """Find the largest size whose prompt has at most ``room`` tokens; return it with the prompt's tokens.

    Guesses from the tokens per unit, counts exactly, and corrects the guess: a few encodings at any length. Leaves at
    most one unit or a thousandth of ``room`` unused, unless the draft has no more units.

    Raises
    ------
    EvalError
        Even the smallest prompt has more tokens.
    """
    size, parts = draft.smallest, encode(draft.render(draft.smallest))
    used = start_used = token_count(parts)
    if used > room:
        raise EvalError(f"the shortest prompt of this sample takes {used} tokens, but only {room} are allowed")
    beyond: int | None = None
    beyond_used = 0
    guess = size + draft.step
    for attempt in count():
        if draft.largest is not None:
            guess = min(guess, draft.largest)
        if guess == size or room - used <= _SPARE * room:
            break
        guess_parts = encode(draft.render(guess))
        guess_used = token_count(guess_parts)
        if guess_used <= room:
            size, parts, used = guess, guess_parts, guess_used
        else:
            beyond, beyond_used = guess, guess_used
        if beyond is None:
            tokens_per_unit = (used - start_used) / (size - draft.smallest)
            guess = size + max(1, int((room - used) / max(tokens_per_unit, 0.01)))
        elif attempt < _INTERPOLATIONS:
            tokens_per_unit = (beyond_used - used) / (beyond - size)
            guess = size + max(1, int((room - used) / tokens_per_unit))
            guess = min(guess, beyond - 1)
        else:
            guess = (size + beyond) // 2
    return size, parts
