"""Reads records of results: parses them, and checks each field."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from eval.errors import EvalError

_TEXT = (str,)
_WHOLE = (int,)
_NUMBER = (int, float)
_NONE = (type(None),)

FIELDS: dict[str, tuple[type, ...]] = {
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
"""The fields of every record of a run, with their JSON types."""
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "variant": _TEXT,
    "truncated": (bool, type(None)),
    "scores": (dict, type(None)),
    "prediction": _TEXT + _NONE,
    "versions": (dict, type(None)),
    "protocol": _TEXT + _NONE,
    "protocol_sha256": _TEXT + _NONE,
    **dict.fromkeys(("nll_by_position", "divergence_by_position"), (list, type(None))),
    "peak_memory_measures": _TEXT + _NONE,
    **dict.fromkeys(("prompt_tokens", "question_tokens", "new_tokens"), _WHOLE + _NONE),
    **dict.fromkeys(("kv_bytes", "metadata_bytes", "dense_bytes", "peak_memory_bytes"), _NUMBER + _NONE),
    **dict.fromkeys(("kv_fraction", "realised_budget", "selection_hit_rate", "perplexity"), _NUMBER + _NONE),
    **dict.fromkeys(("divergence", "divergence_max", "top_agreement"), _NUMBER + _NONE),
    **dict.fromkeys(("prefill_seconds", "context_seconds", "first_token_seconds"), _NUMBER + _NONE),
    **dict.fromkeys(("ttft_seconds", "tpot_ms"), _NUMBER + _NONE),
}
NAMING = ("benchmark", "task", "sample_id", "length", "method", "token_budget", "error")
"""The fields that identify a record and say whether it has failed."""


_MOST = {int: 10**18, float: 1e300}
"""Largest numbers allowed, so that sums and plots do not overflow."""


def read_records(path: Path, required: Collection[str] = NAMING) -> list[dict[str, Any]]:
    """Read a file of records, one JSON object per line, and skip empty lines.

    A last line that a killed run left unfinished is skipped too.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.
    required : collection of str
        Fields that each record must have.

    Raises
    ------
    EvalError
        The file cannot be read, or a record is malformed; the message names file and line.
    """
    try:
        # Not splitlines, which also splits at characters such as U+2028 that a prediction may hold.
        *lines, tail = path.read_bytes().split(b"\n")
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    if is_whole(tail):
        lines.append(tail)
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_refuse_constant)
            check_record(record, required)
        except (ValueError, RecursionError) as error:
            raise EvalError(f"{path}:{number}: {error}") from error
        records.append(record)
    return records


def is_whole(line: bytes) -> bool:
    """Whether a line without its newline is a complete JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def check_record(record: Any, required: Collection[str] = tuple(FIELDS)) -> None:
    """Raise ``ValueError`` if a record lacks a field or has an invalid one."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, got {type(record).__name__}")
    if missing := set(required) - record.keys():
        raise ValueError(f"the record has no {', '.join(sorted(missing))}")
    for name, kinds in (FIELDS | _OPTIONAL).items():
        if name in record:
            _check_field(name, record[name], kinds)
    for name in ("score", "depth"):
        if record.get(name) is not None and not 0 <= record[name] <= 1:
            raise ValueError(f"{name}={record[name]!r} is not allowed: 0 to 1")
    for name, value in (record.get("scores") or {}).items():
        if not (_is_number(value) and 0 <= value <= 1):
            raise ValueError(f"scores has {name}={value!r:.80}; allowed: 0 to 1")
    if record.get("perplexity") is not None and record["perplexity"] <= 0:
        raise ValueError(f"perplexity={record['perplexity']!r} is not allowed: above 0")
    for name, what in (("nll_by_position", "nll"), ("divergence_by_position", "divergence")):
        for pair in record.get(name) or []:
            if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair))):
                raise ValueError(f"{name} has {pair!r}; allowed: pairs of token position and mean {what}")


def _check_field(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{name}={value!r:.80} is not allowed: {allowed}")
    if (
        name != "seed"
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and not (_is_number(value) and value >= 0)
    ):
        raise ValueError(f"{name}={value!r:.80} is not allowed: a number from 0 to {_MOST[type(value)]:.0e}")


def _is_number(value: Any) -> bool:
    """Whether a value can be summed and plotted: a number that is neither NaN nor too large."""
    return type(value) in _MOST and abs(value) <= _MOST[type(value)]


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that a record may have")
