"""Files that a method's parameter names."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple


def path_text(name: str, path: object) -> str:
    """Return a path as text; raise ``TypeError`` for anything but a str or ``os.PathLike`` of one."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"{name} must be the path of a file or None, got {path!r}")
    return text


class FileState(NamedTuple):
    """Tells a file's present content from a former one, and from that of another file of the same name."""

    real_path: str
    inode: int
    size: int
    modified: int
    """Time of the last modification in nanoseconds."""


def state_of(name: str, path: str) -> FileState:
    """Return the state of the file that the parameter ``name`` gives as ``path``.

    Raises
    ------
    OSError
        There is no such file. The error has the kind of the system's, and names the parameter.
    ValueError
        ``path`` has characters that no path may have.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(name, path, error) from error
    except ValueError as error:
        raise ValueError(f"{name}={path!r} must be the path of a file: {error}") from error
    return FileState(os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns)


def text_of(name: str, path: str) -> str:
    """Return the text of the file that the parameter ``name`` gives as ``path``.

    Raises
    ------
    OSError
        The file cannot be read. The error has the kind of the system's, and names the parameter.
    ValueError
        The file is no text in UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(name, path, error) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}={path!r} must be a text file in UTF-8: {error}") from error


def json_of(name: str, path: str) -> Any:
    """Return the value in the JSON file that the parameter ``name`` gives as ``path``.

    Raises
    ------
    OSError
        The file cannot be read, as for :func:`text_of`.
    ValueError
        The file is not JSON, is nested too deeply, or names an entry twice.
    """
    text = text_of(name, path)
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}={path!r} must be a JSON file: {error}") from error


def _without_repeats(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(entries)
    if len(unique) < len(entries):
        repeated = next(key for key, number in Counter(key for key, _ in entries).items() if number > 1)
        raise ValueError(f"{repeated!r} is there twice")
    return unique


def _unreadable(name: str, path: str, error: OSError) -> OSError:
    return type(error)(f"{name}={path!r} cannot be read: {error.strerror}")
