"""Dense-equivalent budgets from records that exist: nothing is measured, and no model is loaded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eval.config import DENSE
from eval.data_files import from_json
from eval.errors import EvalError
from eval.findings import Findings, Place, Record, Target, sample_of
from eval.knobs import check_searchable, knob_of
from eval.session import write_result
from eval.store import Store, read_json

_SAME = ("model", "dtype", "device", "versions", "seed", "protocol", "protocol_sha256")
"""Fields in which all records must agree."""
_Sample = tuple[str, "int | None", str]


def judge(folders: Sequence[Path], target: Target, out: Path | None = None) -> dict[str, Any]:
    """Find the smallest recorded setting of each method, over the samples that have every setting.

    Parameters
    ----------
    folders : sequence of Path
        Results folders of the same benchmark, model and machine. A method whose other hyperparameters differ between
        records is several, named by the differences. A sample with the same setting in several folders counts once.
    target : Target
        What to reach. ``steps`` must be empty: the recorded settings are the steps.
    out : Path or None
        Where to write the report, a file ``budget.json``; None writes nothing.

    Returns
    -------
    dict
        As of :func:`eval.budget.search`; ``records`` names the folders.

    Raises
    ------
    EvalError
        A folder has no records, records do not belong together or are of files that have changed between them, there is
        no dense attention or no other method, or a method reads everything.
    """
    if target.steps:
        raise EvalError(f"steps={target.steps}: with --records, the recorded settings are the steps")
    recorded = [record for folder in folders for record in _records(folder)]
    configs = [read_json(folder / "config.json", "the configuration of a run") for folder in folders]
    _check_together(recorded)
    _check_files(folders, [config.pop("data", {}) for config in configs])
    config = {**configs[0], "parameters": {}}
    check_searchable(dict.fromkeys(record["method"] for record in recorded if record["method"] != DENSE))
    records = _counted_once(recorded, target)
    dense = {_key(record): record for record in records if record["method"] == DENSE}
    methods = _by_method([record for record in records if record["method"] != DENSE])
    if not dense or not methods:
        raise EvalError(f"records={[str(folder) for folder in folders]}: dense attention and another method are needed")
    _check_measured(records, target)
    report: dict[str, Any] = {
        "config": {**config, "method": list(dict.fromkeys(name for name, _ in methods))},
        "search": asdict(target),
        "records": [folder.as_posix() for folder in folders],
        **{name: records[0][name] for name in _SAME},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "results": [found.result() for found in _judge(dense, methods, target)],
    }
    if out is not None:
        write_result(out, report)
    return report


def _records(folder: Path) -> list[dict[str, Any]]:
    if not (records := Store(folder).records()):
        raise EvalError(f"records={str(folder)!r} holds no records of `python -m eval`")
    return records


def _has_measure(record: Record, target: Target) -> bool:
    """Whether a record has what the target is about."""
    names = ("divergence",) if target.divergence is not None else ("score", "perplexity")
    return any(record[name] is not None for name in names)


def _counted_once(records: Sequence[Record], target: Target) -> list[Record]:
    """Merge the records of each sample and setting, as when each folder has its own dense attention.

    A failed record never replaces a measured one. Of several measured ones, the last with what the target is about
    counts; the others fill what it lacks, as when one folder has the score and another the divergence.
    """
    alike: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        parameters = json.dumps({} if record["method"] == DENSE else record["parameters"], sort_keys=True)
        alike[(*_key(record), record["method"], parameters)].append(record)
    merged: list[Record] = []
    for found in alike.values():
        measured = [record for record in found if record["error"] is None]
        one: dict[str, Any] = {}
        for record in sorted(measured or found, key=lambda each: _has_measure(each, target)):
            one |= {name: value for name, value in record.items() if value is not None or name not in one}
        merged.append(one)
    return merged


def _check_measured(records: Sequence[Record], target: Target) -> None:
    """Raise if no record has what the target is about."""
    if not any(_has_measure(record, target) for record in records if record["method"] != DENSE):
        measure = "score" if target.divergence is None else "divergence"
        raise EvalError(
            f"the records have no {measure}, so no setting can be judged by it: run them with --measure {measure}"
        )


def _check_together(records: Sequence[Record]) -> None:
    for name in ("benchmark", "question", *_SAME):
        values = [record[name] for record in records]
        if any(value != values[0] for value in values):
            found = list(dict.fromkeys(map(str, values)))
            raise EvalError(f"records differ in {name}: {', '.join(found)}")


def _check_files(folders: Sequence[Path], data: Sequence[Any]) -> None:
    """A task's file must have the same contents in all folders that name it; fewer samples may need fewer files."""
    known: dict[tuple[str, str], tuple[Path, str]] = {}
    for folder, value in zip(folders, data, strict=True):
        for task, files in from_json(value).items():
            for file in files:
                first, contents = known.setdefault((task, file.file), (folder, str(file)))
                if contents != str(file):
                    both = f"{contents} in {first} and {file} in {folder}"
                    raise EvalError(f"records differ in the data of {task}: {file.file} has {both}")


def _by_method(records: Sequence[Record]) -> dict[tuple[str, str], dict[float, list[Record]]]:
    """Group records by method and the differing hyperparameters besides the searched one, then by that one's value."""
    values: dict[tuple[str, str], set[str]] = {}
    for record in records:
        for name, value in _fixed(record).items():
            values.setdefault((record["method"], name), set()).add(str(value))
    groups: dict[tuple[str, str], dict[float, list[Record]]] = {}
    for record in records:
        method = record["method"]
        differing = {name: value for name, value in _fixed(record).items() if len(values[method, name]) > 1}
        label = ", ".join(f"{name}={value}" for name, value in differing.items())
        setting = record["parameters"][knob_of(method).parameter]
        groups.setdefault((method, label), {}).setdefault(setting, []).append(record)
    return groups


def _fixed(record: Record) -> Mapping[str, Any]:
    searched = knob_of(record["method"]).parameter
    return {name: value for name, value in record["parameters"].items() if name != searched}


def _judge(
    dense: Mapping[_Sample, Record],
    methods: Mapping[tuple[str, str], Mapping[float, Sequence[Record]]],
    target: Target,
) -> list[Findings]:
    shared = {key for key, record in dense.items() if record["error"] is None}
    for settings in methods.values():
        for tried in settings.values():
            shared &= {_key(record) for record in tried if record["error"] is not None or _has_measure(record, target)}
    places: dict[Place, list[Record]] = {}
    for key, record in dense.items():
        if key in shared:
            places.setdefault(target.place_of(record["task"], record["length"]), []).append(record)
    if not places:
        raise EvalError("no sample has been tried with every recorded setting")
    found = []
    for place, own in places.items():
        samples = {_key(record) for record in own}
        for (name, label), settings in methods.items():
            knob = knob_of(name)
            rising = knob.steps(max(record["prompt_tokens"] for record in own))
            steps = sorted(settings, reverse=rising[0] > rising[-1])
            method = f"{name} ({label})" if label else name
            each = Findings(place, method, knob.parameter, steps, target, own)
            for number, step in enumerate(steps):
                each.add(number, [record for record in settings[step] if _key(record) in samples])
            found.append(each)
    return found


def _key(record: Record) -> _Sample:
    task, sample_id = sample_of(record)
    return task, record["length"], sample_id
