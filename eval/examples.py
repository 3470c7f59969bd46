"""Examples of benchmarks that have data: the official JSON-lines files, local or from the hub."""

from __future__ import annotations

import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.data_files import first_file, note_dataset, noted
from eval.errors import EvalError
from eval.sources import is_offline, parse_json, read_json
from hf_sparse_attn.cli.models import first_line

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's answer about a file, without a retry."""

# JSON types of the fields shared by the benchmarks; other fields may have any type.
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "context": (str,),
    "input": (str,),
    "answers": (list, str),
    "answer": (list, str, int, float),
    "questions": (list,),
    "options": (list,),
}


class ExamplesNotFoundError(EvalError):
    """Examples are neither in the data folder nor available from the hub."""


def read_jsonl(
    path: Path, required: Sequence[str], check: Callable[[dict[str, Any], str], None] = lambda example, place: None
) -> list[dict[str, Any]]:
    """Read a JSON-lines file, one object per line; empty lines are skipped.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.
    required : sequence of str
        Fields that each example must have.
    check : callable, optional
        Called with each example and its place, ``file:line``, to raise an ``EvalError`` of its own.

    Raises
    ------
    EvalError
        The file cannot be read or has no examples, or a line is not a JSON object, is nested too deeply, has a lone
        surrogate, lacks a field, or has a field of a wrong type. The message names file and line.
    """
    examples = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path}:{number}"
                    example = _checked(parse_json(line, place), place, required)
                    check(example, place)
                    examples.append(example)
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    if not examples:
        raise EvalError(f"{path} has no examples")
    return examples


def read_list(path: Path, required: Sequence[str]) -> list[dict[str, Any]]:
    """Read a JSON file that holds a list of examples.

    Raises
    ------
    EvalError
        The file is not such a list, or an example is malformed; the message names the file and the example's number.
    """
    examples = read_json(path)
    if not isinstance(examples, list) or not examples:
        raise EvalError(f"{path} does not hold a list of examples")
    return [_checked(example, f"{path}: example {number}", required) for number, example in enumerate(examples)]


def load_examples(
    task_file: str,
    *,
    hub_id: str,
    hub_filename: str,
    data_dir: Path | None,
    benchmark: str,
    required: Sequence[str] = (),
    revision: str | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """Load the examples of a task: from the data folder if it has the file, else from the hub or its cache.

    Parameters
    ----------
    task_file : str
        The official file name, such as ``trec.jsonl``; a ``.json`` file holds a list of examples.
    hub_id : str
        Dataset repository on the hub.
    hub_filename : str
        The file in that repository: the task's, or a ``.zip`` that has it as ``data/<task_file>``.
    data_dir : Path, optional
        Folder searched first, with its subfolders ``<benchmark>`` and ``data``.
    benchmark : str
        Name of the benchmark and of that subfolder.
    required : sequence of str
        Fields that each example must have.
    revision : str, optional
        Commit of the hub's repository. Default: its newest.

    Returns
    -------
    examples : list of dict
    origin : str
        The file, or the hub's repository with its commit.

    Raises
    ------
    ExamplesNotFoundError
        There is no such file, and the hub does not provide it.
    EvalError
        ``data_dir`` is not a folder, an archive is damaged, or an example is malformed.
    """
    found = find_examples(task_file, data_dir, benchmark, required)
    if found is not None:
        return found
    try:
        download = _download(hub_id, hub_filename, revision)
    except Exception as error:  # the hub's client raises errors of its HTTP library, which differ by version
        places = [] if data_dir is None else [str(data_dir / name) for name in _names(task_file, benchmark)]
        looked = ", ".join([*places, f"{hub_filename} of the hub's dataset {hub_id}"])
        raise ExamplesNotFoundError(
            f"{benchmark}: no examples of {task_file}: looked for {looked} ({first_line(error)}). Put the official "
            f"{task_file} into a folder and name it with --data-dir, or fetch it where the hub is reachable: "
            f"hf download --repo-type dataset {_at(revision)}{hub_id} {hub_filename}"
        ) from error
    noted(download, f"{hub_id}/{hub_filename}")
    # The folder of a repository's files in the hub's cache is named after its commit.
    folder = download.parents[len(Path(hub_filename).parts) - 1]
    origin = f"hub dataset {hub_id} at {folder.name}, {hub_filename}"
    if download.suffix != ".zip":
        return _read_with_datasets(download, origin, required), origin
    with tempfile.TemporaryDirectory() as scratch:
        return _read_with_datasets(_unzipped(download, f"data/{task_file}", Path(scratch)), origin, required), origin


def find_examples(
    task_file: str, data_dir: Path | None, benchmark: str, required: Sequence[str]
) -> tuple[list[dict[str, Any]], str] | None:
    """Read a task's examples from the data folder; None if it does not have them.

    Parameters, results and errors are those of ``load_examples``.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise EvalError(f"--data-dir {data_dir} is not a folder")
    found = first_file(data_dir, _names(task_file, benchmark))
    if found is None:
        return None
    read = read_list if found.suffix == ".json" else read_jsonl
    return read(found, required), str(found)


def _names(task_file: str, benchmark: str) -> list[str]:
    return [task_file, f"{benchmark}/{task_file}", f"data/{task_file}"]


def load_hub_dataset(
    hub_id: str, split: str, instead: str, *, config: str | None = None, revision: str | None = None
) -> Any:
    """Load a dataset from the hub, or from its cache if ``HF_HUB_OFFLINE=1``.

    Parameters
    ----------
    hub_id : str
        Dataset repository on the hub.
    split : str
        Name of the split, such as ``"test"``.
    instead : str
        Advice for the error message: an alternative to the hub.
    config : str, optional
        Name of the dataset's configuration.
    revision : str, optional
        Commit of the repository. Default: its newest.

    Raises
    ------
    ExamplesNotFoundError
        The hub is unreachable, or does not have the dataset.
    """
    import datasets
    from huggingface_hub import HfApi

    try:
        if not is_offline():
            # Asks once: the next line would retry for long.
            HfApi().dataset_info(hub_id, revision=revision, timeout=HUB_TIMEOUT)
        dataset = datasets.load_dataset(hub_id, config, split=split, revision=revision)
    except Exception as error:  # the clients raise errors of their HTTP library, which differ by version
        raise ExamplesNotFoundError(
            f"dataset {hub_id!r} cannot be loaded from the hub ({first_line(error)}). {instead} A copy in the hub's "
            "cache is used with HF_HUB_OFFLINE=1"
        ) from error
    note_dataset("/".join((hub_id, *([] if config is None else [config]), split)), revision)
    return dataset


def unique_ids(examples: Sequence[dict[str, Any]], field: str) -> list[str]:
    """Return an id per example: its ``field``, or its index if examples lack the field or share a value."""
    names = [str(example.get(field)) if example.get(field) not in (None, "") else None for example in examples]
    counts = Counter(names)
    unique = all(name is not None and counts[name] == 1 for name in names)
    return [str(name) if unique else str(index) for index, name in enumerate(names)]


def _checked(example: Any, place: str, required: Sequence[str]) -> dict[str, Any]:
    if not isinstance(example, dict):
        raise EvalError(f"{place} is not a JSON object but {type(example).__name__}")
    missing = [name for name in required if name not in example]
    if missing:
        raise EvalError(f"{place} lacks {', '.join(missing)} (it has: {', '.join(example) or 'nothing'})")
    for name in required:
        allowed = _FIELD_TYPES.get(name, (object,))
        if not isinstance(example[name], allowed):
            names = " or ".join(kind.__name__ for kind in allowed)
            raise EvalError(f"{place}: {name} is of type {type(example[name]).__name__}, not {names}")
    return example


def _at(revision: str | None) -> str:
    return "" if revision is None else f"--revision {revision} "


def _download(hub_id: str, filename: str, revision: str | None) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Asks once: without a cached file, the download itself would retry for half a minute.
        url = hf_hub_url(hub_id, filename, repo_type="dataset", revision=revision)
        get_hf_file_metadata(url, timeout=HUB_TIMEOUT)
    except Exception as unreachable:
        try:
            return Path(
                hf_hub_download(hub_id, filename, repo_type="dataset", revision=revision, local_files_only=True)
            )
        except LocalEntryNotFoundError:
            raise unreachable from None
    return Path(hf_hub_download(hub_id, filename, repo_type="dataset", revision=revision, etag_timeout=HUB_TIMEOUT))


def _unzipped(archive: Path, member: str, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            return Path(opened.extract(member, folder))
    except Exception as error:  # a damaged archive raises errors of zipfile and of each compression's library
        raise EvalError(f"{archive} does not give {member}: {first_line(error)}") from error


def _read_with_datasets(path: Path, origin: str, required: Sequence[str]) -> list[dict[str, Any]]:
    import datasets

    try:
        # Files, since dataset scripts no longer run; streamed, since examples are read once and need no second copy.
        stream = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        examples = list(stream)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise EvalError(f"{origin}: {path.name} cannot be read: {first_line(error)}") from error
    if not examples:
        raise EvalError(f"{origin}: {path.name} has no examples")
    return [
        _checked(example, f"{origin}: {path.name}:{number}", required)
        for number, example in enumerate(examples, start=1)
    ]
