"""SCBench's scores (scbench/compute_scores.py of MInference's repository), most of which are InfiniteBench's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.metrics import infinitebench
from eval.metrics.references import Scorer, as_number


def contains(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the prediction contains the reference literally."""
    return float(references[0] in prediction)


def contains_any(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the prediction contains a reference, in any case of its letters."""
    return float(any(reference.upper() in prediction.strip().upper() for reference in references))


def contains_all(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return the share of the references that the prediction contains, in any case, in whole hundredths."""
    found = [reference.lower() in prediction.lower() for reference in references]
    return round(sum(found) / len(found), 2)


def number(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the first number is the reference, or its whole part if the reference is written as an int."""
    wanted = as_number(references[0])
    found = re.search(r"\d+(?:\.\d+)?", prediction)
    if found is None:
        return 0.0
    value = as_number(found[0])
    is_whole = re.fullmatch(r"[+-]?\d+", references[0].strip()) is not None
    return float((int(value) if is_whole else value) == wanted)


SCORERS: dict[str, Scorer] = {
    "kv": contains,
    "prefix_suffix": contains,
    "vt": contains_all,
    "qa_eng": contains_any,
    "qa_chn": infinitebench.qa_zh,
    "choice_eng": infinitebench.choice,
    "many_shot": contains_any,
    "mf": number,
    "summary": infinitebench.summary,
    "needles_summary": infinitebench.summary,
    "needles_passkey": infinitebench.first_integer,
}
