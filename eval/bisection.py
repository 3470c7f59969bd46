"""Bisection over the steps of a knob, from what has been probed so far."""

from __future__ import annotations

from collections.abc import Mapping


def bounds(reached: Mapping[int, bool]) -> tuple[int, int | None]:
    """Return the lowest step that may be the answer, and the lowest that is known to do.

    Parameters
    ----------
    reached : mapping
        Whether each probed step reaches the target. Scores need not be monotone: a step counts only if all larger
        probed steps reach the target too.

    Returns
    -------
    lowest : int
        One above the largest step that fails; 0 if none fails.
    known : int or None
        The smallest probed step above all that fail; None if there is none.
    """
    lowest = max((step for step, good in reached.items() if not good), default=-1) + 1
    return lowest, min((step for step in reached if step >= lowest), default=None)


def next_probe(reached: Mapping[int, bool], count: int) -> int | None:
    """Return the step to probe next among ``count`` steps; None if the search is finished."""
    lowest, known = bounds(reached)
    end = count if known is None else known
    return (lowest + end) // 2 if lowest < end else None


def smallest(reached: Mapping[int, bool]) -> int | None:
    """Return the answer of a finished search: None if the largest step fails."""
    return bounds(reached)[1]


def is_monotone(reached: Mapping[int, bool]) -> bool:
    """Whether no probed step reaches the target below one that fails."""
    lowest, _ = bounds(reached)
    return not any(good for step, good in reached.items() if step < lowest)
