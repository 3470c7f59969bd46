"""Dense-equivalent accuracy: the smallest setting of each method that reaches a share of dense attention's score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

from eval.benchmarks import Item
from eval.bisection import is_monotone, next_probe, smallest
from eval.budget_table import RESULT
from eval.config import DENSE, RunConfig
from eval.engine import Variant, make_variants
from eval.errors import EvalError
from eval.knobs import ANY_LENGTH, Ladder, Ladders
from eval.session import ModelSource, Processes, Session, key_of, open_session, write_result
from eval.store import record_key
from eval.summary import aggregate

Record = Mapping[str, Any]
Place = tuple[str, "int | None"]
"""A task and its length."""
POOLED = "all tasks"
OnRecord = Callable[[int, int, "dict[str, Any] | None"], None]


@dataclass(frozen=True)
class Target:
    """What a method must reach, and the steps that are tried.

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

    def place_of(self, item: Item) -> Place:
        """Return the task and length for which an item's setting is searched."""
        return (POOLED if self.pool else item.task, item.length)

    def is_reached(self, found: Mapping[str, Any], dense: Mapping[str, Any]) -> bool:
        """Whether the aggregate of a probe reaches the target, given that of dense attention on the same samples."""
        if self.divergence is not None:
            return found["divergence"] is not None and bool(found["divergence"] <= self.divergence)
        assert self.target is not None
        if dense["perplexity"] is not None:
            return found["perplexity"] is not None and bool(dense["perplexity"] >= self.target * found["perplexity"])
        return found["score"] is not None and bool(found["score"] >= self.target * dense["score"])


def search(
    config: RunConfig,
    target: Target,
    out: Path,
    source: ModelSource,
    processes: Processes,
    on_record: OnRecord = lambda done, total, record: None,
) -> dict[str, Any]:
    """Find each method's smallest setting on each task and length by bisection, and write ``budget.json``.

    Dense attention is measured first. Then every round probes one step for each search that is not finished. The
    methods of a round share the prefills. Probes are ordinary records in ``out``; existing ones are not measured again,
    also those of a search with another target or with other methods.

    Parameters
    ----------
    config : RunConfig
        The run; ``token_budget`` must be empty, since it is searched.
    target : Target
        What to reach.
    out, source, processes, on_record
        As for :func:`eval.runner.run`; ``on_record`` counts within a round.

    Returns
    -------
    dict
        The contents of ``budget.json``: ``config``, ``search``, the machine, and ``results``, an entry per task,
        length and method.

    Raises
    ------
    EvalError
        The run is invalid. No record is written.
    """
    if config.token_budget:
        raise EvalError(
            f"token_budget={list(config.token_budget)}: the budget is searched; name its steps with --steps"
        )
    ladders = Ladders(config.method, config.parameters, target.steps)
    [dense] = make_variants(replace(config, method=(DENSE,), parameters={}))
    cheapest = [ladders.of(name, ANY_LENGTH).variants[0] for name in ladders.names]
    follows_dense = target.divergence is not None

    def identity(settings: dict[str, Any]) -> dict[str, Any]:
        return {**{name: settings[name] for name in settings if name != "method"}, "follows_dense": follows_dense}

    with open_session(
        config, [dense, *cheapest], out, source, processes, identity=identity, follows_dense=follows_dense
    ) as session:
        searches = _search(session, dense, ladders, target, on_record)
        probed = [dense, *(variant for each in searches for variant in each.ladder.variants)]
        report: dict[str, Any] = {
            "config": config.as_json(),
            "search": asdict(target),
            **session.provenance,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "results": [each.result() for each in searches],
        }
        if processes.is_main:
            session.store.merge(
                list(dict.fromkeys(key_of(item, variant) for item in session.items for variant in probed))
            )
            write_result(out / RESULT, report)
        processes.wait()
    return report


def _search(
    session: Session, dense: Variant, ladders: Ladders, target: Target, on_record: OnRecord
) -> list[_MethodSearch]:
    records = _measured(session, [(item, [dense]) for item in session.items], on_record)
    places: dict[Place, list[Item]] = {}
    for item in session.items:
        places.setdefault(target.place_of(item), []).append(item)
    searches = []
    for place, items in places.items():
        found = _of(records, items, dense)
        longest = max((record["prompt_tokens"] + record["new_tokens"] for record in found), default=1)
        for name in ladders.names:
            searches.append(_MethodSearch(place, items, ladders.of(name, longest), target, found))
    while True:
        for each in searches:
            each.take(records)
        wanted: dict[int, list[Variant]] = {}
        for each in searches:
            if (step := each.next_step()) is not None:
                for item in each.items:
                    wanted.setdefault(id(item), []).append(each.ladder.variants[step])
        if not wanted:
            return searches
        jobs = [(item, wanted[id(item)]) for item in session.items if id(item) in wanted]
        records = _measured(session, jobs, on_record)


def _measured(
    session: Session, jobs: Sequence[tuple[Item, Sequence[Variant]]], on_record: OnRecord
) -> list[dict[str, Any]]:
    """Measure what is missing, and return all records, the same ones in every process."""
    session.measure(jobs, on_record)
    session.processes.wait()
    records = session.store.records()
    session.processes.wait()  # before another process writes the next round's
    return records


def _of(records: Iterable[Record], items: Sequence[Item], variant: Variant) -> list[Record]:
    """Return the records of a variant on some items that did not fail."""
    keys = {key_of(item, variant) for item in items}
    return [record for record in records if record_key(record) in keys and record["error"] is None]


def _sample_of(record: Record) -> tuple[str, str]:
    """Name a record's sample among those of all tasks."""
    return record["task"], record["sample_id"]


class _MethodSearch:
    """The search of one method on one task and length, or on all tasks of a length."""

    def __init__(
        self,
        place: Place,
        items: Sequence[Item],
        ladder: Ladder,
        target: Target,
        found: Sequence[Record],
    ) -> None:
        self.place, self.items, self.ladder = place, items, ladder
        self._target = target
        self._dense = {_sample_of(record): record for record in found}
        self._dense_total = aggregate(list(found))
        self._probes: dict[int, list[Record]] = {}
        self._failed: dict[int, int] = {}

    def take(self, records: Sequence[Record]) -> None:
        """Take over the steps whose samples have all been tried."""
        by_key = {record_key(record): record for record in records}
        for step, variant in enumerate(self.ladder.variants):
            own = [by_key.get(key_of(item, variant)) for item in self.items]
            tried = [record for record in own if record is not None]
            if len(tried) == len(self.items) and step not in self._probes:
                measured = [record for record in tried if record["error"] is None]
                self._probes[step] = [record for record in measured if _sample_of(record) in self._dense]
                self._failed[step] = len(self._dense) - len(self._probes[step])

    def next_step(self) -> int | None:
        """Return the step to probe next; None if the search is finished."""
        return None if self._nothing_to_reach() else next_probe(self._reached(), len(self.ladder.steps))

    def result(self) -> dict[str, Any]:
        """Return the entry of the results file."""
        reason = self._nothing_to_reach()
        reached = {} if reason else self._reached()
        step = smallest(reached)
        if reason is None and step is None:
            reason = "no step reaches the target"
        return {
            "task": self.place[0],
            "length": self.place[1],
            "method": self.ladder.method,
            "parameter": self.ladder.parameter,
            "setting": None if step is None else self.ladder.steps[step],
            "reason": reason,
            "found": None if step is None else self._entry(step),
            "dense": {name: self._dense_total[name] for name in ("samples", "score", "perplexity", "prompt_tokens")},
            "steps": list(self.ladder.steps),
            "is_monotone": is_monotone(reached),
            "probes": [{"reached": reached[each], **self._entry(each)} for each in sorted(reached)],
        }

    def _nothing_to_reach(self) -> str | None:
        if not self._dense:
            return "dense attention failed on every sample"
        is_score = self._target.target is not None and self._dense_total["perplexity"] is None
        return "dense attention scores 0" if is_score and not self._dense_total["score"] else None

    def _reached(self) -> dict[int, bool]:
        return {
            step: not self._failed[step] and self._target.is_reached(aggregate(records), self._dense_total)
            for step, records in self._probes.items()
        }

    def _entry(self, step: int) -> dict[str, Any]:
        records = self._probes[step]
        total = aggregate(records)
        names = ("score", "perplexity", "divergence", "kv_fraction", "realised_budget")
        return {
            "setting": self.ladder.steps[step],
            "samples": len(records),
            "failed": self._failed[step],
            **{name: total[name] for name in names},
            "score_difference_error": self._standard_error(records),
        }

    def _standard_error(self, records: Sequence[Record]) -> float | None:
        """Return the standard error of the mean difference from dense attention's scores, sample by sample."""
        differences = [
            record["score"] - self._dense[_sample_of(record)]["score"]
            for record in records
            if record["score"] is not None
        ]
        return stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else None
