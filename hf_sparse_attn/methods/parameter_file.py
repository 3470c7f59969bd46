"""Files that a method's parameter names."""

from __future__ import annotations

import os
from pathlib import Path


def path_text(name: str, path: object) -> str:
    """Return a path as text; raise ``TypeError`` for anything but a str or ``os.PathLike`` of one."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"{name} must be the path of a file or None, got {path!r}")
    return text


def modified(name: str, path: str) -> int:
    """Return the time of a file's last modification in nanoseconds; errors as of :func:`text_of`."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise _unreadable(name, path, error) from error


def text_of(name: str, path: str) -> str:
    """Return the text of the file that the parameter ``name`` gives as ``path``.

    Raises
    ------
    OSError
        The file cannot be read. The error has the kind of the system's, and names the parameter.
    UnicodeDecodeError
        The file is no text in UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(name, path, error) from error


def _unreadable(name: str, path: str, error: OSError) -> OSError:
    return type(error)(f"{name}={path!r} cannot be read: {error.strerror}")
