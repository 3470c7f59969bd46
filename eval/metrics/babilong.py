"""BABILong's score (babilong/metrics.py of its repository): whether the answer names the right label and no other."""

from __future__ import annotations

from collections.abc import Sequence

from eval.metrics.references import Scorer


def only_label(prediction: str, references: list[str], labels: Sequence[str]) -> float:
    """Return whether the first sentence of the prediction names the reference, and no other label.

    A reference of several labels is a list with commas, all of which must be named. ``labels`` are those that the
    question does not name.
    """
    sentence = prediction.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    named = {label.lower() for label in labels if label.lower() in sentence}
    target = references[0].lower()
    # A direction, such as "n,w", is one label.
    wanted = set(target.split(",")) if "," in target and len(target) > 3 else {target}
    return float(wanted == named)


SCORERS: dict[str, Scorer] = {f"qa{number}": only_label for number in range(1, 21)}
