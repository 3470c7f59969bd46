"""Conversion of right answers, which have many types in the benchmarks' data, to a list of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from eval.errors import EvalError

Scorer = Callable[[str, list[str], Sequence[str]], float]
"""Function of prediction, references and class names that returns a score."""


def as_texts(references: Any, *, may_be_empty: bool = False) -> list[str]:
    """Convert references of any allowed type to a list of texts; flatten nested lists.

    Raises
    ------
    EvalError
        There is no reference, unless ``may_be_empty``; or one is neither text nor number.
    """
    texts = list(_flat(references))
    if not texts and not may_be_empty:
        raise EvalError(f"references={references!r} has no answer; at least one is needed")
    return texts


def as_number(reference: str) -> Decimal:
    """Convert a reference to a number.

    Raises
    ------
    EvalError
        The reference is not a number.
    """
    try:
        return Decimal(reference)
    except InvalidOperation:
        raise EvalError(f"reference {reference!r} is not allowed for this task: only a number") from None


def _flat(references: Any) -> list[str]:
    if isinstance(references, str):
        return [references]
    if isinstance(references, int | float):
        return [str(references)]
    if isinstance(references, list | tuple):
        return [text for reference in references for text in _flat(reference)]
    kind = type(references).__name__
    raise EvalError(f"reference {references!r} is of type {kind}; allowed are str, int, float and lists of these")
