"""RULER's scores (arXiv 2404.06654): case-insensitive search for the references in the prediction."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.metrics.references import Scorer

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f]")


def match_all(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return the share of the references that the prediction contains."""
    found = _found(prediction, references)
    return sum(found) / len(found)


def match_any(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the prediction contains at least one of the references."""
    return float(any(_found(prediction, references)))


def _found(prediction: str, references: list[str]) -> list[bool]:
    cleaned = _CONTROL_CHARACTER.sub("\n", prediction.strip()).strip().lower()
    return [reference.lower() in cleaned for reference in references]


_MATCH_ALL_TASKS = (
    *(f"niah_single_{n}" for n in (1, 2, 3)),
    *(f"niah_multikey_{n}" for n in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)
SCORERS: dict[str, Scorer] = {**dict.fromkeys(_MATCH_ALL_TASKS, match_all), "qa_1": match_any, "qa_2": match_any}
