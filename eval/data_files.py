"""The data files that samples are built from. Each is noted where it is found; a run records name, size and hash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import cache, lru_cache, wraps
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from eval.errors import EvalError
from eval.validation import first_problem
from hf_sparse_attn.cli.files import file_sha256

_SHOWN = 3
"""Differences that an error names; it counts the others."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DataFile:
    """A file, or a data set of the hub.

    Parameters
    ----------
    file : str
        Its name in the data folder, in the cache or on the hub.
    bytes, sha256 : int, str
        Size and hash of a file; None for a data set.
    commit : str
        A data set's commit, which fixes its contents; None for a file.
    """

    file: Annotated[str, Strict()]
    bytes: Annotated[int, Strict(), Field(ge=0)] | None = None
    sha256: Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    commit: Annotated[str, Strict()] | None = None

    def __str__(self) -> str:
        """Return what fixes the contents, for messages."""
        return f"commit {self.commit}" if self.sha256 is None else f"sha256 {self.sha256}"


TaskFiles = Mapping[str, Sequence[DataFile]]
"""The files of each task, without tasks that have none."""

_ADAPTER = TypeAdapter(dict[str, list[DataFile]])
_noted: ContextVar[dict[DataFile, None] | None] = ContextVar("noted", default=None)  # an ordered set


@contextmanager
def collected() -> Iterator[dict[DataFile, None]]:
    """Collect the files that are noted while the context lasts, each once, in order."""
    found: dict[DataFile, None] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def noted(path: Path, name: str) -> Path:
    """Note a file that samples are built from, and return it.

    Parameters
    ----------
    path : Path
        The file.
    name : str
        Its name in the data folder, in the cache or on the hub: never a path of this machine.

    Raises
    ------
    EvalError
        The file cannot be read.
    """
    if _noted.get() is not None:
        try:
            _add([DataFile(name, path.stat().st_size, known_sha256(path))])
        except OSError as error:
            raise EvalError(f"{path} cannot be read: {error}") from error
    return path


def note_dataset(name: str, commit: str | None) -> None:
    """Note a data set of the hub, which is kept in a format of the library's own and has no files to hash."""
    _add([DataFile(name, commit=commit)])


def first_file(folder: Path | None, names: Iterable[str]) -> Path | None:
    """Return the first of several files that a folder has, and note it; None if it has none of them."""
    if folder is None:
        return None
    for name in names:
        if (path := folder / name).is_file():
            return noted(path, name)
    return None


def remembered(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function with a small cache, which notes the files of a first call in later ones too."""

    @lru_cache(maxsize=4)
    def first(*args: _P.args, **kwargs: _P.kwargs) -> tuple[_T, tuple[DataFile, ...]]:
        with collected() as found:
            result = function(*args, **kwargs)
        return result, tuple(found)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        result, found = first(*args, **kwargs)  # type: ignore[arg-type]  # they are hashable
        _add(found)
        return result

    return call


def known_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if its size or its time has changed.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    state = path.stat()
    return _sha256(path.absolute(), state.st_size, state.st_mtime_ns)


@cache
def _sha256(path: Path, size: int, changed: int) -> str:
    return file_sha256(path)


def _add(files: Iterable[DataFile]) -> None:
    if (found := _noted.get()) is not None:
        found.update(dict.fromkeys(files))


def as_json(files: TaskFiles) -> dict[str, list[dict[str, Any]]]:
    """Return the files as JSON values."""
    return {
        task: [{name: value for name, value in asdict(each).items() if value is not None} for each in own]
        for task, own in files.items()
    }


def from_json(value: Any) -> TaskFiles:
    """Return the files that JSON values describe.

    Raises
    ------
    EvalError
        They describe none.
    """
    if not isinstance(value, dict):
        raise EvalError(f"data={value!r:.80} is not allowed: a mapping of tasks to their files")
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise EvalError(f"data.{first_problem(error)}") from error


def differences(former: TaskFiles, present: TaskFiles) -> str:
    """Say in which files the data differs, or return an empty text; a file may have moved to another folder."""
    found = [
        difference
        for task in dict.fromkeys((*former, *present))
        for difference in _differences(task, former.get(task, ()), present.get(task, ()))
    ]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join([*found[:_SHOWN], *more])


def _differences(task: str, former: Sequence[DataFile], present: Sequence[DataFile]) -> list[str]:
    if _contents(former) == _contents(present):
        return []
    gone = {each.file: each for each in former if each not in present}
    new = {each.file: each for each in present if each not in former}
    return [
        f"{task}: {name} had {gone[name]} and has {new[name]}"
        if name in gone and name in new
        else f"{task}: {name} ({gone[name]}) is missing"
        if name in gone
        else f"{task}: {name} ({new[name]}) was not there"
        for name in dict.fromkeys((*gone, *new))
    ]


def _contents(files: Sequence[DataFile]) -> list[tuple[str, str]]:
    return sorted((PurePosixPath(each.file).name, str(each)) for each in files)
