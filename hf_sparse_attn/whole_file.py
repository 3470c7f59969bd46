"""Files that are written whole or not at all: under a temporary name, which is renamed at the end."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERMISSIONS = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name to write a file under, which replaces ``path`` once the block ends without an error.

    A file that exists keeps its permissions, and a link leads to the new file as it led to the former one. What is no
    regular file, such as ``/dev/stdout``, is written itself.

    Raises
    ------
    OSError
        The file cannot be written, or may not. A former file stays as it was.
    """
    try:
        former = os.stat(path)
    except FileNotFoundError:
        former = None
    if former is not None and not stat.S_ISREG(former.st_mode):
        yield path
        return
    if former is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    target = Path(os.path.realpath(path))
    # Not made of the file's own name, which may already be as long as names may be.
    temporary = target.parent / f".{secrets.token_hex(8)}.part"
    _create(temporary, path, private=former is not None)
    mode = os.stat(temporary).st_mode if former is None else former.st_mode
    try:
        yield temporary
        _flush(temporary)
        os.chmod(temporary, mode & PERMISSIONS)  # now, since the writer may have put another file there
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; see :func:`replacing`, also for errors."""
    with replacing(path) as name:
        name.write_bytes(content)


def _create(temporary: Path, path: Path, private: bool) -> None:
    """Create the temporary file of a file, with the permissions that any new one gets, or the user's own alone."""
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def _flush(name: Path) -> None:
    """Wait until a file is on the disk, which may turn out to be full only now."""
    with name.open("rb") as file:
        os.fsync(file.fileno())
