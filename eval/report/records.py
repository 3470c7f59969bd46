"""Finds the records on disk, checks them, and removes repeats."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.record_check import FIELDS, read_records

Record = Mapping[str, Any]

RUN_SETTINGS = "run_settings"
"""Added to a record: the settings of its run that change what is measured, but are not in records, as texts by name.
Empty if the run did not note them."""
TOLD_APART = "told_apart"
"""Added to a record: those of its run's settings in which records of its benchmark differ that look like repeats."""
_SAME_MEASUREMENT = (
    *("benchmark", "task", "length", "sample_id", "seed", "method", "token_budget", "question"),
    *("model", "dtype", "device", "protocol_sha256"),
)


@dataclass(frozen=True)
class Run:
    """The records of one folder."""

    name: str
    """The folder, relative to the report's folder."""
    files: list[str]
    records: list[Record]
    config: str | None
    """The text of ``config.json``; None without this file."""


def load_runs(directory: Path) -> list[Run]:
    """Load all runs in a folder and its subfolders.

    Raises
    ------
    EvalError
        There is no record, one is malformed, or a file cannot be read; the message names the file.
    """
    folders: dict[Path, list[Path]] = {}
    for path in sorted([*directory.rglob("rows.jsonl"), *directory.rglob("rows-*.jsonl")]):
        folders.setdefault(path.parent, []).append(path)
    runs = []
    for folder, paths in folders.items():
        config = _shown(folder / "config.json") if (folder / "config.json").is_file() else None
        records = [_encodable(record) for path in paths for record in read_records(path, FIELDS)]
        settings = _settings(config)
        by_task = {task: _settings_of(settings, task) for task in {record["task"] for record in records}}
        runs.append(
            Run(
                name=str(folder.relative_to(directory)),
                files=[path.name for path in paths],
                records=[{**record, RUN_SETTINGS: by_task[record["task"]]} for record in records],
                config=config,
            )
        )
    if not any(run.records for run in runs):
        raise EvalError(
            f"directory={str(directory)!r} has no records: neither it nor a subfolder has a rows.jsonl with a record"
        )
    return runs


def _shown(path: Path) -> str:
    """Read a file that is shown unchanged, with any content."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error}") from error


def _settings(config: str | None) -> Mapping[str, Any]:
    """Read a run's settings; nothing of a file that is missing or damaged, which a report only shows."""
    try:
        settings = _encodable(json.loads(config or "{}"))  # refuses a nesting that cannot be written again
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _settings_of(config: Mapping[str, Any], task: str) -> dict[str, str]:
    """Return the settings of a task of a run that decide what is measured, as texts by name."""
    if not config:
        return {}
    options, data = config.get("options"), config.get("data")
    options = {name: value for name, value in options.items() if name != "repeats"} if isinstance(options, dict) else {}
    files = data.get(task) if isinstance(data, dict) else None
    files = files if isinstance(files, list) else []
    settings = {
        "measure": config.get("measure") or ["score"],
        "chat": config.get("chat"),
        "chat template": config.get("chat_template_sha256"),
        "options": options,
        "data": [str(file.get("sha256"))[:12] for file in files if isinstance(file, dict)],
    }
    return {name: _text(value) for name, value in settings.items() if value not in (None, [], {})}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _encodable(value: Any) -> Any:
    """Return the value with lone surrogates, which a page cannot hold, replaced by Python's escapes."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(entry) for key, entry in value.items()}
    return [_encodable(entry) for entry in value] if isinstance(value, list) else value


def counted_once(records: Sequence[Record]) -> list[Record]:
    """Remove repeats of the same sample under the same settings, as when each run has its own dense records.

    The last record is kept, but a failed one never replaces a measured one. Records that differ in a setting of their
    run alone are no repeats: all records of their benchmark get it as :data:`TOLD_APART`.
    """
    by_sample: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        by_sample[_key(record)].append(record)
    differing: dict[str, set[str]] = defaultdict(set)
    for alike in by_sample.values():
        settings = [record.get(RUN_SETTINGS) or {} for record in alike]
        names = {name for each in settings for name in each}
        differing[alike[0]["benchmark"]] |= {
            # What an older run did not note is no difference.
            name
            for name in names
            if len({each[name] for each in settings if name in each}) > 1
        }
    kept: dict[tuple[Any, ...], Record] = {}
    for record in records:
        settings_of_run = record.get(RUN_SETTINGS) or {}
        apart = {name: settings_of_run.get(name) for name in sorted(differing[record["benchmark"]])}
        told = ", ".join(f"{name} {value or 'not noted'}" for name, value in apart.items())
        key = (*_key(record), told)
        if record["error"] is None or kept.get(key, record)["error"] is not None:
            kept[key] = {**record, TOLD_APART: told}
    return list(kept.values())


def _key(record: Record) -> tuple[Any, ...]:
    return (*(record.get(name) for name in _SAME_MEASUREMENT), json.dumps(record["parameters"], sort_keys=True))
