"""LongBench v2's score: whether the answer states the right choice (pred.py and result.py of its repository)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.metrics.references import Scorer

_STATEMENTS = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def stated_choice(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the letter in the first statement is the right one; with brackets comes before without."""
    plain = prediction.replace("*", "")  # bold in Markdown
    found = next((match for statement in _STATEMENTS if (match := statement.search(plain))), None)
    return float(found is not None and found[1] == references[0])


SCORERS: dict[str, Scorer] = {"choice": stated_choice}
