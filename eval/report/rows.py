"""The rows on disk: found, checked, and counted once each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.row_check import FIELDS, read_rows

Row = Mapping[str, Any]

_SAME_MEASUREMENT = (
    *("benchmark", "task", "length", "sample_id", "seed", "method", "token_budget", "question"),
    *("model", "dtype", "device", "protocol_sha256"),
)


@dataclass(frozen=True)
class Run:
    """One folder's rows."""

    name: str
    """The folder, relative to the one that the report is about."""
    files: list[str]
    rows: list[Row]
    config: str | None
    """The text of ``config.json``; None where there is none."""


def load_runs(directory: Path) -> list[Run]:
    """Every run in a folder and the folders below it.

    Raises
    ------
    EvalError
        There is no row, or one is malformed, or a file cannot be read; the message names the file.
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
                rows=[_encodable(row) for path in paths for row in read_rows(path, FIELDS)],
                config=_shown(config) if config.is_file() else None,
            )
        )
    if not any(run.rows for run in runs):
        raise EvalError(
            f"directory={str(directory)!r} has no rows: no rows.jsonl with a row in it or the folders below"
        )
    return runs


def _shown(path: Path) -> str:
    """The text of a file that is shown as it is, whatever it holds."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error}") from error


def _encodable(value: Any) -> Any:
    """The same value with lone surrogates, which no page can hold, as Python writes them."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(entry) for key, entry in value.items()}
    return [_encodable(entry) for entry in value] if isinstance(value, list) else value


def counted_once(rows: Iterable[Row]) -> list[Row]:
    """The rows without repeats of the same sample under the same settings, as where each run has its own dense rows.

    The last one stands, except that a failed one never displaces one that was measured.
    """
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (*(row.get(name) for name in _SAME_MEASUREMENT), json.dumps(row["parameters"], sort_keys=True))
        if row["error"] is None or kept.get(key, row)["error"] is not None:
            kept[key] = row
    return list(kept.values())
