"""A whole run: its records and its summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eval.benchmarks import BENCHMARKS
from eval.config import RunConfig, with_dense
from eval.engine import Variant, make_variants
from eval.errors import EvalError
from eval.processes import Processes
from eval.run_check import ModelSource, OnRefusal
from eval.session import key_of, open_session, write_result
from eval.store import read_json
from eval.summary import category_means, category_scores, group_means, summarise


def run(
    config: RunConfig,
    out: Path,
    source: ModelSource,
    processes: Processes,
    on_record: Callable[[int, int, dict[str, Any] | None], None] = lambda done, total, record: None,
    on_start: Callable[[float], None] = lambda seconds: None,
    *,
    variants: Sequence[Variant] | None = None,
    on_refusal: OnRefusal | None = None,
    beside: Sequence[Path] = (),
) -> dict[str, Any]:
    """Run a benchmark, append each record to ``out`` as it finishes, and write and return the summary.

    Existing records are not run again, except those with an error.

    Parameters
    ----------
    config : RunConfig
        The run; dense attention is added to its methods.
    out : Path
        The results folder.
    source : ModelSource
        Source of the model, which is loaded after all checks that need no weights.
    processes : Processes
        The processes that share the items.
    on_record : callable
        Called with this process's number of finished records, its total number of records, and the newest record.
    on_start : callable
        Called before the first sample of a long run, with an estimate of its seconds.
    variants : sequence of Variant, optional
        The run's variants, dense attention first; those of ``config`` by default.
    on_refusal : callable, optional
        Called with each variant that cannot be used with the model, and the reason; the others run. None raises it.
    beside : sequence of Path
        Results folders of the run's sweep, whose samples must be the same where they are of the same name.

    Raises
    ------
    EvalError
        The run is invalid. No record is written.
    """
    config = with_dense(config)
    wanted_variants = make_variants(config) if variants is None else variants
    former = _former_times(out / "summary.json")
    with open_session(config, wanted_variants, out, source, processes, on_refusal=on_refusal, beside=beside) as session:
        variants = session.variants
        wanted = [(item, variants) for item in session.items]
        expected = session.expected_seconds(wanted)
        if expected is not None:
            on_start(expected)
        seconds = session.measure(wanted, on_record)
        times = _times_of_all(session.engine.model_seconds, seconds, processes)
        summary: dict[str, Any] = {}
        if processes.is_main:
            items = session.items
            order = [key_of(item, variant) for item in items for variant in variants]
            records = session.store.merge(order, session.completed)
            summary = {
                "config": config.as_json(),
                **session.provenance,
                **_measured_with(records),
                **_summed_times(former, times),
                "rows": len(records),
                "errors": sum(record["error"] is not None for record in records),
                "finished": len(records) == len(items) * len(variants),
                "table": (table := summarise(records)),
                "averages": [
                    *group_means(table, BENCHMARKS[config.benchmark].averages),
                    *category_means(records),
                ],
                "categories": category_scores(records),
            }
            write_result(out / "summary.json", summary)
        processes.wait()
    return summary


def _measured_with(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return device, dtype and versions of the records, since another machine may have measured some or all of them."""
    found: dict[str, Any] = {}
    for name in ("device", "dtype"):
        if values := {record[name] for record in records}:
            found[name] = ", ".join(sorted(values))
    if records and all(record["versions"] == records[0]["versions"] for record in records):
        found["versions"] = records[0]["versions"]
    return found


def _times_of_all(model_seconds: float, seconds: float, processes: Processes) -> dict[str, float]:
    """Return the seconds in model and harness, summed over the processes.

    Every process must call it, with its own seconds in the model and in total.
    """
    each = processes.gathered((model_seconds, seconds))
    in_model = sum(model for model, _ in each)
    return {"model_seconds": in_model, "harness_seconds": sum(whole for _, whole in each) - in_model}


def _former_times(path: Path) -> dict[str, Any] | None:
    """Return date and times of the run's earlier parts that finished; None if there are none."""
    if not path.exists():
        return None
    summary = read_json(path, "the summary of a run")
    date, times = summary.get("date"), {name: summary.get(name) for name in ("model_seconds", "harness_seconds")}
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EvalError(
                f"{path} is not the summary of a run: {name}={value!r} (delete the file to continue the run)"
            )
    return {"date": date, **times}


def _summed_times(former: dict[str, Any] | None, times: dict[str, float]) -> dict[str, Any]:
    """Return date and times of all parts of the run."""
    now: dict[str, Any] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **times}
    if former is None:
        return now
    if times["model_seconds"] == 0:  # all records existed already
        return former
    return now | {name: former[name] + value for name, value in times.items()}
