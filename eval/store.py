"""A results folder: its configuration, its rows, what is done already, and the merge of several processes' rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eval.errors import EvalError
from eval.row_check import is_whole, read_rows

RowKey = tuple[str, int | None, str, str, int | None]
"""Task, length, sample id, method, token budget."""

_UNRELATED = ("device", "protocol_dir")  # where a run ran, and where its protocol lay: the protocol's hash is compared


__all__ = ["RowKey", "Store", "encode_row", "read_json", "read_rows", "row_key", "write_json", "write_lines"]


def row_key(row: Mapping[str, Any]) -> RowKey:
    """The key that names a row within its folder."""
    return row["task"], row["length"], row["sample_id"], row["method"], row["token_budget"]


class Store:
    """The results folder of one run.

    Every process of a run appends to a file of its own; the main one merges them into ``rows.jsonl``.

    Parameters
    ----------
    folder : Path
        Made where it is missing.
    rank, world_size : int
        This process's number, and how many there are.
    """

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self.folder = folder
        self.rank = rank
        name = "rows.jsonl" if world_size == 1 else f"rows-{rank:05d}-of-{world_size:05d}.jsonl"
        self.own_rows = folder / name
        self._lock = FileLock(folder / ".lock")

    def check(self, config: Mapping[str, Any]) -> None:
        """See whether a configuration can have the folder, and write nothing.

        Raises
        ------
        EvalError
            The folder belongs to another configuration, or holds other files.
        """
        path = self.folder / "config.json"
        try:
            config = json.loads(json.dumps(config, allow_nan=False))  # as it is read back: lists for tuples
        except (TypeError, ValueError) as error:
            raise EvalError(f"the run's settings cannot be kept as JSON: {error}") from error
        try:
            is_claimed = path.exists()
            others = self.folder.is_dir() and any(entry.name != ".lock" for entry in self.folder.iterdir())
        except OSError as error:
            raise EvalError(f"out={str(self.folder)!r} cannot be read: {error}") from error
        if is_claimed:
            self._check_same(path, config)
        elif others:
            raise EvalError(
                f"out={str(self.folder)!r} holds other files and no config.json; name a new or empty folder"
            )

    def claim(self, config: Mapping[str, Any]) -> None:
        """Take the folder for a configuration: a new one, or one that began with the same.

        Raises
        ------
        EvalError
            As :meth:`check`; or another running process has the folder, or it cannot be written.
        """
        self.check(config)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            if not (self.folder / "config.json").exists():
                write_json(self.folder / "config.json", config)
        except Timeout as error:
            raise EvalError(f"out={str(self.folder)!r} is in use by another run") from error
        except OSError as error:
            self.release()
            raise EvalError(f"out={str(self.folder)!r} cannot be written: {error}") from error

    def release(self) -> None:
        """Let other runs have the folder."""
        self._lock.release()

    def _check_same(self, path: Path, config: Mapping[str, Any]) -> None:
        former = read_json(path, "the configuration of a run")
        differing = [
            f"{name} was {former.get(name)!r} and is {config.get(name)!r}"
            for name in dict.fromkeys((*former, *config))
            if name not in _UNRELATED and former.get(name) != config.get(name)
        ]
        if differing:
            raise EvalError(
                f"out={str(self.folder)!r} belongs to another configuration: {'; '.join(differing)}. "
                "Name another folder, or delete this one"
            )

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far, of all processes, each key once: the newest, since a row with an error is run again."""
        newest: dict[RowKey, dict[str, Any]] = {}
        for path in [self.folder / "rows.jsonl", *sorted(self.folder.glob("rows-*-of-*.jsonl"))]:
            if path.exists():
                newest.update((row_key(row), row) for row in read_rows(path))
        return list(newest.values())

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row, whole, before the next one begins.

        Raises
        ------
        ValueError, TypeError
            The row cannot be JSON.
        EvalError
            It cannot be written: the disk is full, say. The rows so far stay.
        """
        line = encode_row(row) + b"\n"
        try:
            whole = _mend_end(self.own_rows)
            try:
                with self.own_rows.open("ab") as file:
                    file.write(line)
                    file.flush()
            except OSError:
                with suppress(OSError):
                    os.truncate(self.own_rows, whole)
                raise
        except OSError as error:
            raise EvalError(f"{self.own_rows} cannot be written: {error}; the rows so far are kept") from error

    def merge(self, order: Sequence[RowKey]) -> list[dict[str, Any]]:
        """Put all rows into ``rows.jsonl``, in ``order`` (others after them), and remove the processes' own files."""
        rank = {key: number for number, key in enumerate(order)}
        rows = sorted(self.rows(), key=lambda row: rank.get(row_key(row), len(rank)))
        path = self.folder / "rows.jsonl"
        try:
            write_lines(path, map(encode_row, rows))
        except OSError as error:
            raise EvalError(f"{path} cannot be written: {error}; the rows so far are kept") from error
        for part in self.folder.glob("rows-*-of-*.jsonl"):
            part.unlink()
        return rows


def encode_row(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON, without its newline.

    A lone surrogate, which UTF-8 lacks, becomes its JSON escape, so that it is read back as it was.

    Raises
    ------
    ValueError, TypeError
        It holds what JSON lacks, such as NaN.
    """
    return _encode(json.dumps(row, ensure_ascii=False, allow_nan=False))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.
    what : str
        Named in the error: what the file should be.

    Raises
    ------
    EvalError
        The file cannot be read, or holds something else.
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
    """Write JSON for people to read; the file is there whole or not at all."""
    write_lines(path, [_encode(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))])


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines to a file that is there whole or not at all; a former one stays where that fails."""
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
    return text.encode("utf-8", "backslashreplace")  # of JSON: surrogates stand in strings alone


def _mend_end(path: Path) -> int:
    """End a file of rows with a whole line, and return its size: what a killed run left unfinished is cut off."""
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
