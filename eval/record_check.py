"""Reads records of results: parses them, and checks each field."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eval.errors import EvalError
from eval.validation import first_problem

# The largest numbers are limited so that sums and plots do not overflow.
_Number = Annotated[float, Field(ge=0, le=1e300, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=0, le=10**18)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Real = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]
_Pairs = list[Annotated[list[_Real], Field(min_length=2, max_length=2)]]
"""Token positions, and a mean for each."""


class Record(BaseModel):
    """The fields of a record, with their JSON types. eval/README.md says what they mean.

    Records from before a field was written lack it, so a record is checked with the fields that it has.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    benchmark: str = ""
    task: str = ""
    sample_id: str = ""
    length: _Whole | None = None
    depth: _Share | None = None
    categories: dict[str, str] | None = None
    method: str = ""
    token_budget: _Whole | None = None
    variant: str = ""
    parameters: dict[str, Any] = {}
    question: str = ""
    score: _Share | None = None
    scores: dict[str, _Share] | None = None
    references: Any = None
    truncated: bool | None = None
    prediction: str | None = None
    perplexity: Annotated[float, Field(gt=0, le=1e300, allow_inf_nan=False)] | None = None
    divergence: _Number | None = None
    divergence_max: _Number | None = None
    top_agreement: _Number | None = None
    divergence_by_position: _Pairs | None = None
    nll_by_position: _Pairs | None = None
    prompt_tokens: _Whole | None = None
    question_tokens: _Whole | None = None
    new_tokens: _Whole | None = None
    kv_bytes: _Number | None = None
    metadata_bytes: _Number | None = None
    dense_bytes: _Number | None = None
    kv_fraction: _Number | None = None
    realised_budget: _Number | None = None
    selection_hit_rate: _Number | None = None
    prefill_seconds: _Number | None = None
    context_seconds: _Number | None = None
    first_token_seconds: _Number | None = None
    ttft_seconds: _Number | None = None
    tpot_ms: _Number | None = None
    peak_memory_bytes: _Number | None = None
    peak_memory_measures: str | None = None
    cuda_graph: bool | None = None
    error: str | None = None
    model: str = ""
    dtype: str = ""
    device: str = ""
    versions: dict[str, Any] | None = None
    seed: int = 0
    protocol: str | None = None
    protocol_sha256: str | None = None


FIELDS = (
    *("benchmark", "task", "sample_id", "length", "depth", "method", "token_budget", "parameters", "question"),
    *("score", "error", "model", "dtype", "device", "seed"),
)
"""The fields that every record of a run has, whenever it was written."""
_SINCE: dict[str, dict[str, Any]] = {"keycodes": {"correction": "unbiased"}}
"""By method, hyperparameters that records from before there were such choices lack, and the value that they had."""
NAMING = ("benchmark", "task", "sample_id", "length", "method", "token_budget", "error")
"""The fields that identify a record and say whether it has failed."""


def read_records(path: Path, required: Collection[str] = NAMING) -> list[dict[str, Any]]:
    """Read a file of records, one JSON object per line, and skip empty lines.

    A last line that a killed run left unfinished is skipped too. Records from before a method had a hyperparameter get
    the value that it had; if the method's default is another one now, the name of the variant says so.

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
        records.append(_with_later_parameters(record))
    return records


def _with_later_parameters(record: dict[str, Any]) -> dict[str, Any]:
    parameters = record.get("parameters", {})
    since = {name: value for name, value in _SINCE.get(record["method"], {}).items() if name not in parameters}
    if not parameters or not since:
        return record
    from hf_sparse_attn.methods import METHODS  # here, since reading records must not take as long as importing torch

    defaults = {field.name: field.default for field in fields(METHODS[record["method"]])}
    named = [f"{name}={value}" for name, value in since.items() if value != defaults[name]]
    record = {**record, "parameters": {**parameters, **since}}
    if named:
        former = record.get("variant", "")
        record["variant"] = ", ".join([former, *named] if former else named)
    return record


def is_whole(line: bytes) -> bool:
    """Whether a line without its newline is a complete JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def check_record(record: Any, required: Collection[str] = FIELDS) -> None:
    """Raise ``ValueError`` if a record lacks a field, or has an unknown or an invalid one."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, got {type(record).__name__}")
    if missing := set(required) - record.keys():
        raise ValueError(f"the record has no {', '.join(sorted(missing))}")
    try:
        Record.model_validate(record)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that a record may have")
