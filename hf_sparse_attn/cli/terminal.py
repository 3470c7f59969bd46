"""Helpers of the command lines: ``name=value`` settings, one-line errors, tables, and escaping of untrusted text."""

from __future__ import annotations

import ast
import io
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_OBEYED = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: controls, lone surrogates, line and paragraph separators
_TURNS_TEXT = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def fail(message: str) -> NoReturn:
    """Print a one-line error to stderr and exit with code 2."""
    typer.echo(f"error: {one_line(message)}", err=True)
    raise typer.Exit(2)


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Report exceptions of these kinds in one line; they come from bad input."""
    try:
        yield
    except kinds as error:
        fail(str(error))


def parse_settings(option: str, settings: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value`` settings; a value is a Python literal, or else a plain word such as ``mean``.

    A name may have a method as prefix: ``quest.page_size``.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not all(part.isidentifier() for part in name.split(".")):
            fail(f"{option} {setting!r} is not of the form name=value, such as page_size=16")
        if name in parsed:
            fail(f"{name} is given twice")
        try:
            parsed[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            parsed[name] = value  # whoever checks the setting refuses a word where none is allowed
    return parsed


def split(text: str | None) -> tuple[str, ...]:
    """Parse a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def words(option: str, text: str | None) -> tuple[str, ...]:
    """Parse the comma-separated list of an option; None gives none, a list without entries ends the command."""
    parts = split(text)
    if text is not None and not parts:
        fail(f"{option} {text!r} has no entry; leave it out for its default")
    return parts


def integers(option: str, text: str | None) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers; anything else ends the command with an error."""
    try:
        return tuple(int(part) for part in words(option, text))
    except ValueError:
        fail(f"{option} {text!r} is not a comma-separated list of whole numbers")


def ranges(option: str, text: str | None, last: int) -> tuple[int, ...] | None:
    """Parse numbers from 1 to ``last``, as in ``2,5-7``; None stays None, other text ends the command with an error."""
    if text is None:
        return None
    numbers: list[int] = []
    for part in split(text):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.strip().isdecimal() for end in ends) or int(ends[0]) > int(ends[-1]):
            fail(f"{option} {text!r} is not a list of whole numbers and of ranges, such as 2,5-7")
        if int(ends[0]) < 1 or int(ends[-1]) > last:
            fail(f"{option} {text!r} is not allowed: numbers from 1 to {last}")
        numbers += range(int(ends[0]), int(ends[-1]) + 1)
    if not numbers:
        fail(f"{option} {text!r} names no number")
    return tuple(numbers)


def visible(text: str) -> str:
    """Return text that is safe to print, with control characters as Python escapes.

    Newlines and tabs stay. An answer then cannot move the cursor, colour later text, or change the reading direction.
    """
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in "\n\t" and (unicodedata.category(char) in _OBEYED or char in _TURNS_TEXT)
        else char
        for char in text
    )


def one_line(text: str) -> str:
    """Return ``visible`` text with each run of whitespace collapsed to one space."""
    return visible(" ".join(text.split()))


def literal(text: str, style: str = "") -> Text:
    """Return text for a table or a progress bar without interpreting markup, emoji codes or control characters."""
    return Text(visible(text), style=style)


def print_table(table: Table, width: int = 120) -> None:
    """Print at the terminal's width, or at ``width`` characters if the output is a file.

    Cells are never read as markup. Characters that the output's encoding lacks are printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console()
    fixed = None if console.is_terminal or "COLUMNS" in os.environ else width
    Console(width=fixed, markup=False, emoji=False).print(table)
