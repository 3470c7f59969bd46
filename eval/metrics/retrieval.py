"""Scores of the benchmarks that hide a sentence in a text: passkey, Quest's passkey test, and needle."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.metrics import text
from eval.metrics.references import Scorer


def contains(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the prediction contains a reference literally."""
    return float(any(reference in prediction for reference in references))


def words_found(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return the share of the reference's distinct words in the prediction; the best of several references counts.

    Words are those of ``eval.metrics.text.words``: lower case, no punctuation, no articles. Order, repetition and other
    words of the prediction do not matter.
    """
    predicted = set(text.words(prediction))
    wanted = [set(text.words(reference)) for reference in references]
    return max(len(some & predicted) / len(some) if some else 0.0 for some in wanted)


def first_number(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the prediction's first digits are the reference as a number, as in Quest's passkey test."""
    found = re.search(r"\d+", prediction)
    return float(found is not None and any(int(found[0]) == int(reference) for reference in references))


PASSKEY_SCORERS: dict[str, Scorer] = {"filler": contains, "book": contains}
NEEDLE_SCORERS: dict[str, Scorer] = {"essay": words_found, "book": words_found}
QUEST_PASSKEY_SCORERS: dict[str, Scorer] = {"filler": first_number}
