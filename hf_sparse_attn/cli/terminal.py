"""What command lines share: settings as ``name=value``, one-line errors, tables."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table


def fail(message: str) -> NoReturn:
    """Print a one-line error to stderr and exit with code 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Report exceptions of these kinds, which bad input raises, in one line."""
    try:
        yield
    except kinds as error:
        fail(str(error))


def parse_settings(option: str, settings: Sequence[str]) -> dict[str, Any]:
    """Read ``name=value`` settings; a value is a Python literal, or else a word such as ``mean``."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            fail(f"{option} {setting!r} is not of the form name=value, such as page_size=16")
        if name in parsed:
            fail(f"{name} is given twice")
        try:
            parsed[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[name] = value
    return parsed


def print_table(table: Table, width: int = 120) -> None:
    """Print at the terminal's width, or at ``width`` characters where the output is a file."""
    console = Console()
    Console(width=None if console.is_terminal or "COLUMNS" in os.environ else width).print(table)
