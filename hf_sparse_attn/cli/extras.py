"""Report missing optional packages. Imports only the standard library."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager


def install_command(extra: str) -> str:
    """Return the command that installs one of this package's extras."""
    return f"pip install 'hf-sparse-attn[{extra}]'"


@contextmanager
def needs(what: str, packages: Collection[str], command: str) -> Iterator[None]:
    """Exit with code 2 and one line on stderr if the block imports one of these packages and it is missing.

    Parameters
    ----------
    what : str
        Subject of the message, such as "the command line".
    packages : collection of str
        Import names. An error about any other module is a bug and is not caught.
    command : str
        The command that installs them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        sys.stderr.write(f"error: {what} needs {missing}: {command}\n")
        sys.exit(2)
