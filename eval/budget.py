"""Dense-equivalent accuracy: the smallest setting of each method that reaches a share of dense attention's score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eval.benchmarks import Item
from eval.bisection import next_probe
from eval.budget_table import RESULT
from eval.config import DENSE, MEASURES, RunConfig
from eval.engine import Variant, make_variants
from eval.errors import EvalError
from eval.findings import Findings, Place, Record, Target
from eval.knobs import ANY_LENGTH, Ladder, Ladders
from eval.processes import Processes
from eval.run_check import ModelSource
from eval.session import Session, key_of, open_session, write_result
from eval.store import record_key

OnRecord = Callable[[int, int, "dict[str, Any] | None"], None]


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
    methods of a round share the prefills. Probes are ordinary records in ``out``; existing ones are not measured again
    unless they failed, also those of a search with another target or with other methods.

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
    if config.variants:
        raise EvalError("variants: a search makes its own; name methods under method")
    if config.measure != MEASURES[:1]:
        raise EvalError(f"measure={list(config.measure)}: a search measures what it has to reach; see --divergence")
    ladders = Ladders(config.method, config.parameters, target.steps)
    [dense] = make_variants(replace(config, method=(DENSE,), parameters={}))
    cheapest = [ladders.of(name, ANY_LENGTH).variants[0] for name in ladders.names]
    follows_dense = target.divergence is not None
    measured = replace(config, measure=("divergence" if follows_dense else "score",))

    def identity(settings: dict[str, Any]) -> dict[str, Any]:
        shared = {name: settings[name] for name in settings if name not in ("method", "measure")}
        return {**shared, "follows_dense": follows_dense}

    with open_session(measured, [dense, *cheapest], out, source, processes, identity=identity) as session:
        searches = _search(session, dense, ladders, target, on_record)
        probed = [dense, *(variant for each in searches for variant in each.ladder.variants)]
        report: dict[str, Any] = {
            "config": config.as_json(),
            "search": asdict(target),
            **session.provenance,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "results": [each.findings.result() for each in searches],
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
        places.setdefault(target.place_of(item.task, item.length), []).append(item)
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
                each.probed.add(step)
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


class _MethodSearch:
    """The search of one method on one task and length, or on all tasks of a length."""

    def __init__(
        self, place: Place, items: Sequence[Item], ladder: Ladder, target: Target, dense: Sequence[Record]
    ) -> None:
        self.items, self.ladder = items, ladder
        self.probed: set[int] = set()
        """The steps that this session has probed."""
        self.findings = Findings(place, ladder.method, ladder.parameter, ladder.steps, target, dense)

    def take(self, records: Sequence[Record]) -> None:
        """Take over the steps whose samples have all been tried.

        A failure of an earlier session, such as for want of memory, may be past: such a step has yet to be probed.
        """
        by_key = {record_key(record): record for record in records}
        for step, variant in enumerate(self.ladder.variants):
            own = [by_key.get(key_of(item, variant)) for item in self.items]
            tried = [record for record in own if record and (record["error"] is None or step in self.probed)]
            if len(tried) == len(self.items):
                self.findings.add(step, tried)

    def next_step(self) -> int | None:
        """Return the step to probe next; None if the search is finished."""
        if self.findings.nothing_to_reach():
            return None
        return next_probe(self.findings.reached(), len(self.ladder.steps))
