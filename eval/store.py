"""A results folder: its configuration, its records, and the merge of the records of several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eval.data_files import TaskFiles, as_json, differences, from_json
from eval.errors import EvalError
from eval.record_check import is_whole, read_records

RecordKey = tuple[str, int | None, str, str, int | None, str]
"""Task, length, sample id, method, token budget, name of the variant."""

_UNRELATED = ("device", "cuda_graph", "protocol_dir")  # may differ in a resumed run; the protocol's hash may not

_SAMPLES_OF = ("benchmark", "model", "lengths", "limit", "options", "seed")
"""Settings of runs whose samples of a task are compared with each other."""

_SINCE = {"measure": ["score"], "variants": [], "chat_template": None, "cuda_graph": False}
"""Settings that configurations from before there were such choices lack, and the value that they had."""

_CONFIGURATION = "the configuration of a run"
_DATA = "data"
"""The key in ``config.json`` of the data files. It is no setting, and runs from before it lack it."""

__all__ = [
    "RecordKey",
    "Store",
    "encode_record",
    "read_json",
    "read_records",
    "record_key",
    "write_json",
    "write_lines",
]


def record_key(record: Mapping[str, Any]) -> RecordKey:
    """Return the key that identifies a record within its folder."""
    named = (record["task"], record["length"], record["sample_id"], record["method"], record["token_budget"])
    return *named, record.get("variant", "")  # records from before sweeps of parameters lack it


class Store:
    """The results folder of one run.

    Every process of a run appends records to its own file; the main one merges the files into ``rows.jsonl``.

    Parameters
    ----------
    folder : Path
        The folder, created if it is missing.
    rank, world_size : int
        This process's number, and the number of processes.
    """

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self.folder = folder
        self.rank = rank
        name = "rows.jsonl" if world_size == 1 else f"rows-{rank:05d}-of-{world_size:05d}.jsonl"
        self.own_file = folder / name
        self._lock = FileLock(folder / ".lock")

    def check(self, config: Mapping[str, Any], files: TaskFiles | None = None) -> None:
        """Check that a configuration can use the folder, without writing.

        Parameters
        ----------
        config : mapping
            The settings.
        files : mapping, optional
            The data files of each task. None if they are not known yet.

        Raises
        ------
        EvalError
            The folder belongs to another configuration or has records of other data, or holds other files.
        """
        path = self.folder / "config.json"
        try:
            config = json.loads(json.dumps(config, allow_nan=False))  # as read back, with lists instead of tuples
        except (TypeError, ValueError) as error:
            raise EvalError(f"the run's settings cannot be stored as JSON: {error}") from error
        try:
            is_claimed = path.exists()
            others = self.folder.is_dir() and any(entry.name != ".lock" for entry in self.folder.iterdir())
        except OSError as error:
            raise EvalError(f"out={str(self.folder)!r} cannot be read: {error}") from error
        if is_claimed:
            self._check_same(path, config, files)
        elif others:
            raise EvalError(
                f"out={str(self.folder)!r} holds other files and no config.json; name a new or empty folder"
            )

    def check_beside(self, folders: Iterable[Path], config: Mapping[str, Any], files: TaskFiles) -> None:
        """Check that a run's samples are those of the runs of its sweep that it is compared with.

        Parameters
        ----------
        folders : iterable of Path
            Results folders of the sweep. This one, those without a run, and those of runs from before data files were
            noted do not count.
        config : mapping
            The settings.
        files : mapping
            The data files of each task.

        Raises
        ------
        EvalError
            A run with the same settings of samples has a task whose data files were others.
        """
        own = json.loads(json.dumps({name: config[name] for name in _SAMPLES_OF}))
        for folder in folders:
            path = folder / "config.json"
            if folder == self.folder or not path.exists():
                continue
            other = read_json(path, _CONFIGURATION)
            if _DATA not in other or any(other.get(name) != own[name] for name in _SAMPLES_OF):
                continue
            former = from_json(other[_DATA])
            both = [task for task in files if task in former]
            if changed := differences({task: former[task] for task in both}, {task: files[task] for task in both}):
                raise EvalError(
                    f"out={str(self.folder)!r} would have other samples than {str(folder)!r} of the same sweep: "
                    f"{changed}. Allowed: the files that its config.json names; or choose another folder for the sweep"
                )

    def claim(self, config: Mapping[str, Any], files: TaskFiles | None = None) -> None:
        """Lock the folder for a configuration: a new folder, or one of the same configuration.

        The data files are written beside the settings, if the folder does not have them yet.

        Raises
        ------
        EvalError
            See :meth:`check`; or another running process has the folder, or it cannot be written.
        """
        self.check(config, files)
        path = self.folder / "config.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            is_new = not path.exists()
            written = config if is_new else read_json(path, _CONFIGURATION)
            if files is not None and _DATA not in written:
                write_json(path, {**written, _DATA: as_json(files)})
            elif is_new:
                write_json(path, written)
        except Timeout as error:
            raise EvalError(f"out={str(self.folder)!r} is in use by another run") from error
        except OSError as error:
            self.release()
            raise EvalError(f"out={str(self.folder)!r} cannot be written: {error}") from error

    def release(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def _check_same(self, path: Path, config: Mapping[str, Any], files: TaskFiles | None) -> None:
        written = read_json(path, _CONFIGURATION)
        if not {"benchmark", _DATA} & written.keys():  # such as a model's
            raise EvalError(
                f"out={str(self.folder)!r} is not a run's: its config.json names no benchmark. Allowed: a new or empty "
                "folder, or one of an earlier run"
            )
        former = {**_SINCE, **written}
        try:
            recorded = from_json(former.pop(_DATA)) if _DATA in former else None
        except EvalError as error:
            raise EvalError(f"{path} is not {_CONFIGURATION}: {error}") from error
        config = {**_SINCE, **config}
        differing = [
            f"{name} was {former.get(name)!r} and is {config.get(name)!r}"
            for name in dict.fromkeys((*former, *config))
            if name not in _UNRELATED and former.get(name) != config.get(name)
        ]
        if differing:
            raise EvalError(
                f"out={str(self.folder)!r} belongs to another configuration: {'; '.join(differing)}. "
                "Choose another folder, or delete this one"
            )
        if recorded is not None and files is not None and (changed := differences(recorded, files)):
            raise EvalError(
                f"out={str(self.folder)!r} has records of other data: {changed}. Allowed: the files that its "
                "config.json names; or choose another folder"
            )

    def records(self) -> list[dict[str, Any]]:
        """Return the newest record of each key, of all processes.

        Records with an error may have been run again, by another process, so one without an error comes before them.
        """
        newest: dict[RecordKey, dict[str, Any]] = {}
        for path in [self.folder / "rows.jsonl", *sorted(self.folder.glob("rows-*-of-*.jsonl"))]:
            for record in read_records(path) if path.exists() else ():
                former = newest.get(key := record_key(record))
                if former is None or record["error"] is None or former["error"] is not None:
                    newest[key] = record
        return list(newest.values())

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a whole record to disk before returning.

        Raises
        ------
        ValueError, TypeError
            The record cannot be JSON.
        EvalError
            The record cannot be written, for example to a full disk. Earlier records are kept.
        """
        line = encode_record(record) + b"\n"
        try:
            whole = _mend_end(self.own_file)
            try:
                with self.own_file.open("ab") as file:
                    file.write(line)
                    file.flush()
            except OSError:
                with suppress(OSError):
                    os.truncate(self.own_file, whole)
                raise
        except OSError as error:
            raise EvalError(f"{self.own_file} cannot be written: {error}; the records so far are kept") from error

    def merge(
        self,
        order: Sequence[RecordKey],
        completed: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] = list,
    ) -> list[dict[str, Any]]:
        """Write all records to ``rows.jsonl``, in ``order`` (others after them), and remove the processes' files.

        ``completed`` may add to the records what older ones do not say.
        """
        rank = {key: number for number, key in enumerate(order)}
        records = sorted(completed(self.records()), key=lambda record: rank.get(record_key(record), len(rank)))
        path = self.folder / "rows.jsonl"
        try:
            write_lines(path, map(encode_record, records))
        except OSError as error:
            raise EvalError(f"{path} cannot be written: {error}; the records so far are kept") from error
        for part in self.folder.glob("rows-*-of-*.jsonl"):
            part.unlink()
        return records


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line of JSON, without the newline.

    A lone surrogate, which UTF-8 lacks, becomes its JSON escape, so it is read back unchanged.

    Raises
    ------
    ValueError, TypeError
        The record holds a value that JSON lacks, such as NaN.
    """
    return _encode(json.dumps(record, ensure_ascii=False, allow_nan=False))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.
    what : str
        What the file should be, for the error message.

    Raises
    ------
    EvalError
        The file cannot be read, or does not hold an object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise EvalError(f"{path} is not {what}: {error}") from error
    if not isinstance(content, dict):
        raise EvalError(f"{path} is not {what}: it holds {type(content).__name__}, not an object")
    return content


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    write_lines(path, [_encode(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))])


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines to a file atomically; on failure, an existing file is kept."""
    scratch = path.with_name(f".{path.name}.new")
    try:
        with scratch.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # a valid escape, since in JSON surrogates occur only in strings


def _mend_end(path: Path) -> int:
    """Cut off a last line that a killed run left unfinished, and return the file's size."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) in (b"", b"\n"):
            return size
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if not is_whole(content[end:]):
        os.truncate(path, end)
        return end
    with path.open("ab") as file:
        file.write(b"\n")
    return len(content) + 1
