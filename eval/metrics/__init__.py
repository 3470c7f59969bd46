"""The benchmarks' own scores, between 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.errors import EvalError
from eval.metrics import infinitebench, longbench, prefixqa, retrieval, ruler
from eval.metrics.references import as_texts

_SCORERS = {
    "longbench": longbench.SCORERS,
    "infinitebench": infinitebench.SCORERS,
    "ruler": ruler.SCORERS,
    "passkey": retrieval.PASSKEY_SCORERS,
    "questpasskey": retrieval.QUEST_PASSKEY_SCORERS,
    "needle": retrieval.NEEDLE_SCORERS,
    "prefixqa": prefixqa.SCORERS,
}


def score(
    benchmark: str, task: str, prediction: str, references: Any, all_classes: Sequence[str] | None = None
) -> float:
    """Score a prediction with the benchmark's official scorer.

    LongBench is scored as at commit 2e00731 of its repository, InfiniteBench as at 88b3daa and RULER as at c3f5e3b. See
    ``eval/metrics/retrieval.py`` for passkey, questpasskey and needle, ``eval/metrics/prefixqa.py`` for prefixqa.

    Parameters
    ----------
    benchmark : str
        ``longbench``, ``infinitebench``, ``ruler``, ``passkey``, ``questpasskey``, ``needle`` or ``prefixqa``.
    task : str
        One of ``tasks(benchmark)``.
    prediction : str
        The model's unprocessed answer; this function does cuts such as the one to the first line.
    references : str, int, float, or a list of these
        The right answers from the benchmark's data.
    all_classes : sequence of str, optional
        The names of all classes; required by LongBench's ``trec`` and ``lsht``, ignored by other tasks.

    Returns
    -------
    float
        From 0 to 1.

    Raises
    ------
    EvalError
        Unknown benchmark or task, or references of a wrong type for the task.
    """
    check_task(benchmark, task)
    try:
        return float(_SCORERS[benchmark][task](prediction, as_texts(references), all_classes or ()))
    except EvalError as error:
        raise EvalError(f"{benchmark}/{task}: {error}") from None


def named_scores(
    benchmark: str, task: str, prediction: str, references: Any, all_classes: Sequence[str] | None = None
) -> dict[str, float] | None:
    """Score a prediction with each metric of a task that officially has several; None for the others.

    LongBench's code metric depends on whether python-Levenshtein is installed: ``levenshtein``, which ``score``
    returns, or ``difflib``. Parameters and errors are as for ``score``.
    """
    check_task(benchmark, task)
    scorers = longbench.NAMED_SCORERS.get(task) if benchmark == "longbench" else None
    if scorers is None:
        return None
    texts = as_texts(references)
    return {name: float(scorer(prediction, texts, all_classes or ())) for name, scorer in scorers.items()}


def tasks(benchmark: str) -> tuple[str, ...]:
    """Return the tasks of a benchmark that ``score`` knows, in the benchmark's order.

    Raises
    ------
    EvalError
        The benchmark is unknown.
    """
    if benchmark not in _SCORERS:
        raise EvalError(f"benchmark={benchmark!r} has no scores; allowed are {', '.join(_SCORERS)}")
    return tuple(_SCORERS[benchmark])


def check_task(benchmark: str, task: Any) -> None:
    """Check that a benchmark has a task.

    Raises
    ------
    EvalError
        The benchmark or task is unknown.
    """
    allowed = tasks(benchmark)
    if task not in allowed:
        raise EvalError(f"{benchmark} has no task={task!r}; allowed are {', '.join(allowed)}")


__all__ = ["check_task", "named_scores", "score", "tasks"]
