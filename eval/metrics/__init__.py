"""The benchmarks' own scores, between 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.errors import EvalError
from eval.metrics import babilong, gsm8k, infinitebench, longbench, longbench_v2, prefixqa, retrieval, ruler, scbench
from eval.metrics.references import as_texts

_SCORERS = {
    "longbench": longbench.SCORERS,
    "longbench_e": longbench.E_SCORERS,
    "longbench_v2": longbench_v2.SCORERS,
    "infinitebench": infinitebench.SCORERS,
    "ruler": ruler.SCORERS,
    "babilong": babilong.SCORERS,
    "gsm8k": gsm8k.SCORERS,
    "scbench": scbench.SCORERS,
    "passkey": retrieval.PASSKEY_SCORERS,
    "questpasskey": retrieval.QUEST_PASSKEY_SCORERS,
    "needle": retrieval.NEEDLE_SCORERS,
    "prefixqa": prefixqa.SCORERS,
}
_NAMED_SCORERS = {
    "longbench": longbench.NAMED_SCORERS,
    "longbench_e": longbench.NAMED_SCORERS,
    "gsm8k": gsm8k.NAMED_SCORERS,
}

_MAY_LACK_REFERENCES = ("longbench", "longbench_e")
"""Benchmarks whose official code scores an answer without a reference as 0."""


def score(
    benchmark: str, task: str, prediction: str, references: Any, all_classes: Sequence[str] | None = None
) -> float:
    """Score a prediction with the benchmark's official scorer.

    LongBench and LongBench v2 are scored as at commit 2e00731 of their repository, InfiniteBench as at 88b3daa, RULER
    as at c3f5e3b, BABILong as at 7a6efee, SCBench as at fb56c91 of MInference's, and GSM8K as by
    lm-evaluation-harness at 4e7e0d4. See
    ``eval/metrics/retrieval.py`` for passkey, questpasskey and needle, ``eval/metrics/prefixqa.py`` for prefixqa.

    Parameters
    ----------
    benchmark : str
        The name of a benchmark that has scores.
    task : str
        One of ``tasks(benchmark)``.
    prediction : str
        The model's unprocessed answer; this function does cuts such as the one to the first line.
    references : str, int, float, or a list of these
        The right answers from the benchmark's data. Without any the score is 0 in LongBench; others need at least one.
    all_classes : sequence of str, optional
        The names of all classes: required by LongBench's ``trec`` and ``lsht``, and by BABILong, where they are the
        labels that the question does not name; ignored by other tasks.

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
        return float(_SCORERS[benchmark][task](prediction, reference_texts(benchmark, references), all_classes or ()))
    except EvalError as error:
        raise EvalError(f"{benchmark}/{task}: {error}") from None


def named_scores(
    benchmark: str, task: str, prediction: str, references: Any, all_classes: Sequence[str] | None = None
) -> dict[str, float] | None:
    """Score a prediction with each metric of a task that officially has several; None for the others.

    ``score`` returns the first of them. LongBench's code metric depends on whether python-Levenshtein is installed:
    ``levenshtein``, or ``difflib``. GSM8K's are of a stated or of the last number. Parameters and errors are as for
    ``score``.
    """
    check_task(benchmark, task)
    scorers = _NAMED_SCORERS.get(benchmark, {}).get(task)
    if scorers is None:
        return None
    texts = reference_texts(benchmark, references)
    return {name: float(scorer(prediction, texts, all_classes or ())) for name, scorer in scorers.items()}


def reference_texts(benchmark: str, references: Any) -> list[str]:
    """Convert the references of a benchmark's sample to a list of texts.

    Raises
    ------
    EvalError
        One is neither text nor number, or there is none although the benchmark needs one.
    """
    return as_texts(references, may_be_empty=benchmark in _MAY_LACK_REFERENCES)


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


__all__ = ["check_task", "named_scores", "reference_texts", "score", "tasks"]
