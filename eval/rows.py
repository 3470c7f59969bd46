"""Rows of the benchmarks that have their own data: the official JSON-lines files, local or from the hub."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.sources import is_offline

HUB_TIMEOUT = 5.0
"""Seconds that the hub has to say what it has; there is no second try."""

# JSON types of the fields that the benchmarks share; fields that are not here may be anything.
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "context": (str,),
    "input": (str,),
    "answers": (list, str),
    "answer": (list, str, int, float),
    "options": (list,),
}


class RowsNotFoundError(EvalError):
    """Rows are neither in the data folder nor to be had from the hub."""


def read_jsonl(path: Path, required: Sequence[str]) -> list[dict[str, Any]]:
    """Read a JSON-lines file, one object per line; empty lines are skipped.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.
    required : sequence of str
        Fields that each row must have.

    Raises
    ------
    EvalError
        The file cannot be read or has no rows, or a line is not a JSON object, or lacks a field, or has one of a wrong
        type. The message names file and line.
    """
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_checked(_parsed(line, f"{path}:{number}"), f"{path}:{number}", required))
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise EvalError(f"{path} has no rows")
    return rows


def load_rows(
    task_file: str,
    *,
    hub_id: str,
    hub_filename: str,
    data_dir: Path | None,
    benchmark: str,
    required: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], str]:
    """Rows of a task: from the data folder if it has the file, else from the hub or the hub's cache.

    Parameters
    ----------
    task_file : str
        The official file name, such as ``trec.jsonl``.
    hub_id : str
        Dataset repository on the hub.
    hub_filename : str
        The file there: the task's, or a ``.zip`` that has it as ``data/<task_file>``.
    data_dir : Path, optional
        Looked through first: itself, its subfolder ``<benchmark>``, its subfolder ``data``.
    benchmark : str
        Name of that subfolder.
    required : sequence of str
        Fields that each row must have.

    Returns
    -------
    rows : list of dict
    origin : str
        The file, or the hub's repository with its commit.

    Raises
    ------
    RowsNotFoundError
        There is no such file, and the hub does not give it.
    EvalError
        ``data_dir`` is not a folder, or a row is malformed.
    """
    places = []
    if data_dir is not None:
        if not data_dir.is_dir():
            raise EvalError(f"--data-dir {data_dir} is not a folder")
        places = [data_dir / task_file, data_dir / benchmark / task_file, data_dir / "data" / task_file]
        for place in places:
            if place.is_file():
                return read_jsonl(place, required), str(place)
    try:
        download = _download(hub_id, hub_filename)
    except Exception as error:  # the hub's client lets errors of its HTTP library through, which differ by version
        looked = ", ".join([*map(str, places), f"{hub_filename} of the hub's dataset {hub_id}"])
        raise RowsNotFoundError(
            f"{benchmark}: no rows of {task_file}: looked for {looked} ({_first_line(error)}). Put the official "
            f"{task_file} into a folder and name it with --data-dir, or fetch it where the hub is in reach: "
            f"hf download --repo-type dataset {hub_id} {hub_filename}"
        ) from error
    # Files in the hub's cache lie in a folder that is named after the repository's commit.
    origin = f"hub dataset {hub_id} at {download.parent.name}, {hub_filename}"
    if download.suffix != ".zip":
        return _read_with_datasets(download, origin, required), origin
    with tempfile.TemporaryDirectory() as scratch:
        return _read_with_datasets(_unzipped(download, f"data/{task_file}", Path(scratch)), origin, required), origin


def load_hub_dataset(hub_id: str, split: str, instead: str) -> Any:
    """Load a dataset from the hub, or from its cache where ``HF_HUB_OFFLINE=1``.

    Parameters
    ----------
    hub_id : str
        Dataset repository on the hub.
    split : str
        Such as ``"test"``.
    instead : str
        Advice for the error: a way to do without it.

    Raises
    ------
    RowsNotFoundError
        The hub is out of reach, or does not have it.
    """
    import datasets
    from huggingface_hub import HfApi

    try:
        if not is_offline():
            HfApi().dataset_info(hub_id, timeout=HUB_TIMEOUT)  # one question first: the next line would go on trying
        return datasets.load_dataset(hub_id, split=split)
    except Exception as error:  # the clients let errors of their HTTP library through, which differ by version
        raise RowsNotFoundError(
            f"dataset {hub_id!r} cannot be loaded from the hub ({_first_line(error)}). {instead} A copy in the hub's "
            "cache is used with HF_HUB_OFFLINE=1"
        ) from error


def unique_ids(rows: Sequence[dict[str, Any]], field: str) -> list[str]:
    """One name per row: its ``field``, or its index where rows lack the field or share a value."""
    names = [str(row.get(field)) if row.get(field) not in (None, "") else None for row in rows]
    counts = Counter(names)
    unique = all(name is not None and counts[name] == 1 for name in names)
    return [str(name) if unique else str(index) for index, name in enumerate(names)]


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise EvalError(f"{place} is not JSON: {error}") from error


def _checked(row: Any, place: str, required: Sequence[str]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise EvalError(f"{place} is not a JSON object but {type(row).__name__}")
    missing = [name for name in required if name not in row]
    if missing:
        raise EvalError(f"{place} lacks {', '.join(missing)} (it has: {', '.join(row) or 'nothing'})")
    for name in required:
        allowed = _FIELD_TYPES.get(name, (object,))
        if not isinstance(row[name], allowed):
            names = " or ".join(kind.__name__ for kind in allowed)
            raise EvalError(f"{place}: {name} is of type {type(row[name]).__name__}, not {names}")
    return row


def _download(hub_id: str, filename: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # One question first: where nothing is cached, the download itself would go on trying for half a minute.
        get_hf_file_metadata(hf_hub_url(hub_id, filename, repo_type="dataset"), timeout=HUB_TIMEOUT)
    except Exception as unreachable:
        try:
            return Path(hf_hub_download(hub_id, filename, repo_type="dataset", local_files_only=True))
        except LocalEntryNotFoundError:
            raise unreachable from None
    return Path(hf_hub_download(hub_id, filename, repo_type="dataset", etag_timeout=HUB_TIMEOUT))


def _unzipped(archive: Path, member: str, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            return Path(opened.extract(member, folder))
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise EvalError(f"{archive} does not give {member}: {_first_line(error)}") from error


def _read_with_datasets(path: Path, origin: str, required: Sequence[str]) -> list[dict[str, Any]]:
    import datasets

    try:
        # Files, as dataset scripts no longer run; streamed, as these rows are read once and need no second copy.
        stream = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        rows = list(stream)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise EvalError(f"{origin}: {path.name} cannot be read: {_first_line(error)}") from error
    if not rows:
        raise EvalError(f"{origin}: {path.name} has no rows")
    return [_checked(row, f"{origin}: {path.name}:{number}", required) for number, row in enumerate(rows, start=1)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
