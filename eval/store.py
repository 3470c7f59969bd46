"""A results folder: its configuration, its rows, what is done already, and the merge of several processes' rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eval.errors import EvalError

RowKey = tuple[str, int | None, str, str, int | None]
"""Task, length, sample id, method, token budget."""

_UNRELATED = ("device", "protocol_dir")  # where a run ran, and where its protocol lay: the protocol's hash is compared


def row_key(row: Mapping[str, Any]) -> RowKey:
    """What names a row within its folder."""
    return row["task"], row["length"], row["sample_id"], row["method"], row["token_budget"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of rows; a last line that a killed run left unfinished is left out.

    Raises
    ------
    EvalError
        Another line is not a row.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            row_key(row)
        except (ValueError, TypeError, KeyError) as error:
            raise EvalError(f"{path}:{number} is not a row of results: {error!r}") from error
        rows.append(row)
    return rows


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
        if path.exists():
            self._check_same(path, config)
        elif self.folder.is_dir() and any(entry.name != ".lock" for entry in self.folder.iterdir()):
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
            raise EvalError(f"out={str(self.folder)!r} cannot be written: {error}") from error

    def release(self) -> None:
        """Let other runs have the folder."""
        self._lock.release()

    def _check_same(self, path: Path, config: Mapping[str, Any]) -> None:
        try:
            former = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EvalError(f"{path} is not the configuration of a run: {error}") from error
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
        """Write a row, whole, before the next one begins."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        with self.own_rows.open("ab") as file:
            if file.tell() and not _ends_with_newline(self.own_rows):
                _cut_unfinished_line(self.own_rows)
            file.write(line.encode())
            file.flush()

    def merge(self, order: Sequence[RowKey]) -> list[dict[str, Any]]:
        """Put all rows into ``rows.jsonl``, in ``order`` (others after them), and remove the processes' own files."""
        rank = {key: number for number, key in enumerate(order)}
        rows = sorted(self.rows(), key=lambda row: rank.get(row_key(row), len(rank)))
        write_lines(self.folder / "rows.jsonl", (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows))
        for path in self.folder.glob("rows-*-of-*.jsonl"):
            path.unlink()
        return rows


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people to read; the file is there whole or not at all."""
    write_lines(path, [json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines to a file that is there whole or not at all."""
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
    os.replace(scratch, path)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _cut_unfinished_line(path: Path) -> None:
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
