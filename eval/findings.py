"""Target and findings of a search for dense-equivalent budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import stdev
from typing import Any

from eval.bisection import is_monotone, smallest
from eval.errors import EvalError
from eval.summary import aggregate

Record = Mapping[str, Any]
Place = tuple[str, "int | None"]
"""A task and its length."""
POOLED = "all tasks"


@dataclass(frozen=True)
class Target:
    """The score that a method must reach, and the steps that are tried.

    Parameters
    ----------
    target : float or None
        Least share of dense attention's score, in (0, 1]; for perplexity, of its inverse.
    divergence : float or None
        Instead of ``target``: greatest mean KL divergence from dense attention, in nats per token along dense
        attention's own greedy answer.
    steps : dict
        Values of the searched hyperparameter by method, instead of those of :mod:`eval.knobs`.
    pool : bool
        Search one setting for the samples of all tasks of a length together, each with the same weight. For tasks with
        too few samples to be judged alone.
    """

    target: float | None = None
    divergence: float | None = None
    steps: dict[str, Any] = field(default_factory=dict)
    pool: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises
        ------
        EvalError
            Not exactly one of ``target`` and ``divergence`` is given, or a value is out of range.
        """
        if not isinstance(self.pool, bool):
            raise EvalError(f"pool={self.pool!r} is not allowed: true or false")
        if (self.target is None) == (self.divergence is None):
            raise EvalError(f"target={self.target}, divergence={self.divergence}: exactly one of the two must be given")
        for name, most in (("target", 1.0), ("divergence", float("inf"))):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
                allowed = "above 0 and at most 1" if name == "target" else "above 0"
                raise EvalError(f"{name}={value!r} is not allowed: a number {allowed}")

    def place_of(self, task: str, length: int | None) -> Place:
        """Return the task and length for which the setting of a sample is searched."""
        return (POOLED if self.pool else task, length)

    def is_reached(self, found: Mapping[str, Any], dense: Mapping[str, Any]) -> bool:
        """Whether the aggregate of a probe reaches the target, given that of dense attention on the same samples."""
        if self.divergence is not None:
            return found["divergence"] is not None and bool(found["divergence"] <= self.divergence)
        assert self.target is not None
        if dense["perplexity"] is not None:
            return found["perplexity"] is not None and bool(dense["perplexity"] >= self.target * found["perplexity"])
        return found["score"] is not None and bool(found["score"] >= self.target * dense["score"])


def sample_of(record: Record) -> tuple[str, str]:
    """Name a record's sample among those of all tasks of a length."""
    return record["task"], record["sample_id"]


class Findings:
    """Findings about one method on one task and length, or on all tasks of a length.

    Parameters
    ----------
    place
        Task and length.
    method
        The method's name in tables.
    parameter
        The hyperparameter that is varied.
    steps
        Its values, from the least read to the most.
    target
        What is to be reached.
    dense
        Dense attention's records, without failed ones.
    """

    def __init__(
        self,
        place: Place,
        method: str,
        parameter: str,
        steps: Sequence[float],
        target: Target,
        dense: Sequence[Record],
    ) -> None:
        self.place, self.method, self.parameter, self.steps = place, method, parameter, steps
        self._target = target
        self._dense = {sample_of(record): record for record in dense}
        self._dense_total = aggregate(list(dense))
        self._probes: dict[int, list[Record]] = {}
        self._failed: dict[int, int] = {}

    def add(self, step: int, records: Sequence[Record]) -> None:
        """Take over the records of a step whose samples have all been tried; a step that is known is kept."""
        if step not in self._probes:
            measured = {sample_of(record): record for record in records if record["error"] is None}
            self._probes[step] = [record for sample, record in measured.items() if sample in self._dense]
            self._failed[step] = len(self._dense.keys() - measured.keys())

    def result(self) -> dict[str, Any]:
        """Return the entry of the results file."""
        reason = self.nothing_to_reach()
        reached = {} if reason else self.reached()
        step = smallest(reached)
        if reason is None and step is None:
            reason = "no step reaches the target"
        return {
            "task": self.place[0],
            "length": self.place[1],
            "method": self.method,
            "parameter": self.parameter,
            "setting": None if step is None else self.steps[step],
            "reason": reason,
            "found": None if step is None else self._entry(step),
            "dense": {name: self._dense_total[name] for name in ("samples", "score", "perplexity", "prompt_tokens")},
            "steps": list(self.steps),
            "is_monotone": is_monotone(reached),
            "probes": [{"reached": reached[each], **self._entry(each)} for each in sorted(reached)],
        }

    def nothing_to_reach(self) -> str | None:
        """Say why nothing can be searched; None if there is something."""
        if not self._dense:
            return "dense attention failed on every sample"
        is_score = self._target.target is not None and self._dense_total["perplexity"] is None
        return "dense attention scores 0" if is_score and not self._dense_total["score"] else None

    def reached(self) -> dict[int, bool]:
        """Whether each probed step reaches the target."""
        return {
            step: not self._failed[step] and self._target.is_reached(aggregate(records), self._dense_total)
            for step, records in self._probes.items()
        }

    def _entry(self, step: int) -> dict[str, Any]:
        records = self._probes[step]
        total = aggregate(records)
        names = ("score", "perplexity", "divergence", "kv_fraction", "realised_budget")
        return {
            "setting": self.steps[step],
            "samples": len(records),
            "failed": self._failed[step],
            **{name: total[name] for name in names},
            "score_difference_error": self._standard_error(records),
        }

    def _standard_error(self, records: Sequence[Record]) -> float | None:
        """Return the standard error of the mean difference from dense attention's scores, sample by sample."""
        differences = [
            record["score"] - self._dense[sample_of(record)]["score"]
            for record in records
            if record["score"] is not None
        ]
        return stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else None
