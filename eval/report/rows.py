"""The rows on disk: found, checked, and counted once each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eval.errors import EvalError

Row = Mapping[str, Any]

_TEXT = (str,)
_WHOLE = (int,)
_NUMBER = (int, float)
_NONE = (type(None),)

_REQUIRED: dict[str, tuple[type, ...]] = {
    "benchmark": _TEXT,
    "task": _TEXT,
    "sample_id": _TEXT,
    "length": _WHOLE + _NONE,
    "depth": _NUMBER + _NONE,
    "method": _TEXT,
    "token_budget": _WHOLE + _NONE,
    "parameters": (dict,),
    "question": _TEXT,
    "score": _NUMBER + _NONE,
    "error": _TEXT + _NONE,
    "model": _TEXT,
    "dtype": _TEXT,
    "device": _TEXT,
    "seed": _WHOLE,
}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "prediction": _TEXT + _NONE,
    "versions": (dict, type(None)),
    "protocol": _TEXT + _NONE,
    "protocol_sha256": _TEXT + _NONE,
    "nll_by_position": (list, type(None)),
    "peak_memory_measures": _TEXT + _NONE,
    **dict.fromkeys(("prompt_tokens", "question_tokens", "new_tokens"), _WHOLE + _NONE),
    **dict.fromkeys(("kv_bytes", "metadata_bytes", "dense_bytes", "peak_memory_bytes"), _NUMBER + _NONE),
    **dict.fromkeys(("kv_fraction", "realised_budget", "selection_hit_rate", "perplexity"), _NUMBER + _NONE),
    **dict.fromkeys(("prefill_seconds", "ttft_seconds", "tpot_ms"), _NUMBER + _NONE),
}
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
        There is no row, or one is malformed; the message has file and line.
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
                rows=[row for path in paths for row in read_rows(path)],
                config=config.read_text(encoding="utf-8") if config.is_file() else None,
            )
        )
    if not any(run.rows for run in runs):
        raise EvalError(
            f"directory={str(directory)!r} has no rows: no rows.jsonl with a row in it or the folders below"
        )
    return runs


def read_rows(path: Path) -> list[Row]:
    """The rows of one file, checked.

    Raises
    ------
    EvalError
        A row is malformed; the message has file and line.
    """
    rows = []
    # Not splitlines: a prediction may hold characters, such as U+2028, that it takes for the end of a line. What comes
    # after the last newline is a row that a killed run did not finish.
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
            check_row(row)
        except ValueError as error:
            raise EvalError(f"{path}:{number}: {error}") from error
        rows.append(row)
    return rows


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that a row may have")


def check_row(row: Any) -> None:
    """Raise ``ValueError`` where a row lacks a field or has one that cannot be."""
    if not isinstance(row, dict):
        raise ValueError(f"a row is a JSON object, not {type(row).__name__}")
    if missing := _REQUIRED.keys() - row.keys():
        raise ValueError(f"the row has no {', '.join(sorted(missing))}")
    for name, kinds in (_REQUIRED | _OPTIONAL).items():
        value = row.get(name)
        if name in row and (not isinstance(value, kinds) or isinstance(value, bool)):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"{name}={value!r} is not allowed: {allowed}")
    for name in ("score", "depth"):
        if row[name] is not None and not 0 <= row[name] <= 1:
            raise ValueError(f"{name}={row[name]!r} is not allowed: 0 to 1")
    if row.get("perplexity") is not None and row["perplexity"] <= 0:
        raise ValueError(f"perplexity={row['perplexity']!r} is not allowed: above 0")
    for pair in row.get("nll_by_position") or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, _NUMBER) for value in pair)):
            raise ValueError(f"nll_by_position has {pair!r}: pairs of token position and mean nll are allowed")


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
