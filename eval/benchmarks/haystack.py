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
    """Split an English text into sentences, by punctuation only, and collapse whitespace."""
    return [sentence for part in _SENTENCE_END.split(text) if (sentence := " ".join(part.split()))]


def text_haystack(task: str, setup: Setup) -> list[str]:
    """Return the sentences of a task's haystack: ``book`` (the books of ``--data-dir``) or ``essay``.

    Raises
    ------
    EvalError
        The text is missing, or has no sentence.
    """
    if task == "essay":
        return split_sentences(essays(setup.data_dir))
    sentences = [sentence for path in books(setup.data_dir) for sentence in split_sentences(read_book(path))]
    if not sentences:
        raise EvalError(f"the books in {str(setup.data_dir)!r} have no sentence")
    return sentences


def rotated(sentences: Sequence[str], seed: str) -> list[str]:
    """Return the sentences from a random start, so that samples have different haystacks."""
    start = random.Random(seed).randrange(len(sentences))
    return [*sentences[start:], *sentences[:start]]


def check_depths(depths: object) -> tuple[float, ...]:
    """Convert depths to a tuple of floats.

    Raises
    ------
    EvalError
        A depth is not a number from 0 to 1, or given twice.
    """
    values = depths if isinstance(depths, (list, tuple)) else (depths,)
    if not values or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1 for value in values
    ):
        raise EvalError(f"depths={depths!r} is not allowed: numbers from 0 (start of the haystack) to 1 (its end)")
    if len({f"{value:g}" for value in values}) < len(values):  # as they are named in records
        raise EvalError(f"depths={depths!r} is not allowed: each once, to six digits")
    return tuple(float(value) for value in values)
