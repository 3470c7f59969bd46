"""Finds the records on disk, checks them, and removes repeats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.record_check import FIELDS, read_records

Record = Mapping[str, Any]

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
        config = folder / "config.json"
        runs.append(
            Run(
                name=str(folder.relative_to(directory)),
                files=[path.name for path in paths],
                records=[_encodable(record) for path in paths for record in read_records(path, FIELDS)],
                config=_shown(config) if config.is_file() else None,
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


def _encodable(value: Any) -> Any:
    """Return the value with lone surrogates, which a page cannot hold, replaced by Python's escapes."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(entry) for key, entry in value.items()}
    return [_encodable(entry) for entry in value] if isinstance(value, list) else value


def counted_once(records: Iterable[Record]) -> list[Record]:
    """Remove repeats of the same sample under the same settings, as when each run has its own dense records.

    The last record is kept, but a failed one never replaces a measured one.
    """
    kept: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (*(record.get(name) for name in _SAME_MEASUREMENT), json.dumps(record["parameters"], sort_keys=True))
        if record["error"] is None or kept.get(key, record)["error"] is not None:
            kept[key] = record
    return list(kept.values())
