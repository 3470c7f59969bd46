"""The score of prefixqa: the F1 over words of SQuAD and LongBench, on the answer's first line."""

from __future__ import annotations

from collections.abc import Sequence

from eval.metrics.longbench import qa_f1
from eval.metrics.references import Scorer


def first_line_f1(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return ``qa_f1`` of the prediction's first line that is not empty; the best of several references counts."""
    first, *_ = prediction.strip().split("\n")
    return max(qa_f1(first, reference, ()) for reference in references)


SCORERS: dict[str, Scorer] = {"qa": first_line_f1}
