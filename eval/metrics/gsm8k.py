"""GSM8K's scores, as lm-evaluation-harness extracts and compares numbers in its tasks gsm8k_cot(_zeroshot)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.metrics.references import Scorer

_STATED = re.compile(r"The answer is (-?[0-9.,]+).")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = re.compile(r"[,$]")


def stated(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the number after the first "The answer is" is the reference (``strict-match``)."""
    found = _STATED.search(prediction)
    return float(found is not None and _plain(found[1]) == _plain(references[0]))


def last_number(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the prediction's last number is the reference (``flexible-extract``)."""
    found = _NUMBER.findall(prediction)
    return float(bool(found) and _plain(found[-1]) == _plain(references[0]))


def _plain(number: str) -> str:
    """Return a number without thousands' separators, dollars and a full stop behind it."""
    return re.sub(r"\.$", "", _IGNORED.sub("", number.strip()))


SCORERS: dict[str, Scorer] = {"cot": stated, "zeroshot": last_number}
NAMED_SCORERS: dict[str, dict[str, Scorer]] = {
    "cot": {"strict-match": stated, "flexible-extract": last_number},
    "zeroshot": {"flexible-extract": last_number, "strict-match": stated},
}
"""The metrics of each task, the one of ``SCORERS`` first."""
