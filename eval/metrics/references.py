"""Right answers, which the benchmarks' data give in many types, as a list of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from eval.errors import EvalError

Scorer = Callable[[str, list[str], Sequence[str]], float]
"""From prediction, references and class names to a score."""


def as_texts(references: Any) -> list[str]:
    """References of any allowed type as a list of texts; nested lists are flattened.

    Raises
    ------
    EvalError
        There is no reference, or one that is neither text nor number.
    """
    texts = list(_flat(references))
    if not texts:
        raise EvalError(f"references={references!r} holds no answer; at least one is needed")
    return texts


def as_number(reference: str) -> Decimal:
    """A reference as the number it stands for.

    Raises
    ------
    EvalError
        It stands for none.
    """
    try:
        return Decimal(reference)
    except InvalidOperation:
        raise EvalError(f"reference {reference!r} is not a number, as this task's are") from None


def _flat(references: Any) -> list[str]:
    if isinstance(references, str):
        return [references]
    if isinstance(references, int | float):
        return [str(references)]
    if isinstance(references, list | tuple):
        return [text for reference in references for text in _flat(reference)]
    kind = type(references).__name__
    raise EvalError(f"reference {references!r} is of type {kind}; allowed are str, int, float and lists of these")
