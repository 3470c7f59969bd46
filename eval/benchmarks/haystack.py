"""Haystacks for passkey and needle: sentences of a text, and depths."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from eval.benchmarks.base import Setup
from eval.errors import EvalError
from eval.sources import books, essays, read_book

_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'\u201d\u2019)]))\s+(?=[\"'\u201c\u2018(]?[A-Z])")


def split_sentences(text: str) -> list[str]:
    """Sentences of an English text, whitespace made single; by punctuation alone, so an abbreviation may end one."""
    return [sentence for part in _SENTENCE_END.split(text) if (sentence := " ".join(part.split()))]


def text_haystack(task: str, setup: Setup) -> list[str]:
    """Sentences that a haystack of a task is made of: ``book`` (the books of ``--data-dir``) or ``essay``.

    Raises
    ------
    EvalError
        The text is not there.
    """
    if task == "essay":
        return split_sentences(essays(setup.data_dir))
    return [sentence for path in books(setup.data_dir) for sentence in split_sentences(read_book(path))]


def rotated(sentences: Sequence[str], seed: str) -> list[str]:
    """The sentences from another start, so that samples do not all have the same haystack."""
    start = random.Random(seed).randrange(len(sentences))
    return [*sentences[start:], *sentences[:start]]


def check_depths(depths: object) -> tuple[float, ...]:
    """Depths as a tuple of floats.

    Raises
    ------
    EvalError
        They are not numbers from 0 to 1.
    """
    values = depths if isinstance(depths, (list, tuple)) else (depths,)
    if not values or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1 for value in values
    ):
        raise EvalError(f"depths={depths!r} is not allowed: numbers from 0 (start of the haystack) to 1 (its end)")
    return tuple(float(value) for value in values)
