"""Progress on stderr: a bar on a terminal, plain lines elsewhere; and how long work is going to take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partialmethod

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tqdm import tqdm

from hf_sparse_attn.cli.terminal import literal, one_line

WORTH_SAYING_SECONDS = 10.0
"""Work that takes less is not announced."""
COLUMNS: tuple[ProgressColumn, ...] = (
    TextColumn("{task.description}", markup=False),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def moves_cursor(console: Console) -> bool:
    """Whether a bar may be drawn: on a terminal that moves its cursor, whatever the environment forces colours on."""
    return console.file.isatty() and not console.is_dumb_terminal


def about(seconds: float) -> str:
    """Say a time in words, rounded to what an estimate is good for."""
    minutes = seconds / 60
    if seconds < 9.5:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90:
        return f"about {10 * max(1, round(seconds / 10))} s"
    if minutes < 9.5:
        return f"about {round(minutes)} min"
    if minutes < 90:
        return f"about {10 * round(minutes / 10)} min"
    return f"about {round(minutes / 60)} h" if minutes >= 570 else f"about {minutes / 60:.1f} h"


def say(line: str) -> None:
    """Print one plain line on stderr."""
    sys.stderr.write(one_line(line) + "\n")
    sys.stderr.flush()


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Hide the bars that libraries draw with tqdm, some of which no setting switches off."""
    usual = tqdm.__init__
    tqdm.__init__ = partialmethod(usual, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = usual


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that something uncounted is going on, where there is a terminal; bars of libraries stay hidden."""
    console = Console(stderr=True)
    shown: AbstractContextManager[object] = console.status(literal(what)) if moves_cursor(console) else nullcontext()
    with shown, hidden_bars():
        yield


class Stages:
    """Several stretches of work, one after the other: a bar each on a terminal, elsewhere a line when one is done."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars

    @contextmanager
    def stage(self, label: str, total: int, unit: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
        """Show one stretch; yields what to call after each forward pass, and after each of ``total`` units."""
        if self._bars is None:
            started = time.perf_counter()
            yield _nothing, _nothing
            say(f"{label}: {total} {unit}{'s' if total > 1 else ''} in {time.perf_counter() - started:.1f} s")
            return
        bars = self._bars
        task = bars.add_task(literal(label).plain, total=total, passes=0)
        passes = 0

        def passed() -> None:
            nonlocal passes
            passes += 1
            bars.update(task, passes=passes)

        yield passed, lambda: bars.advance(task)


@contextmanager
def stages() -> Iterator[Stages]:
    """Show stretches of work on stderr."""
    console = Console(stderr=True)
    if not moves_cursor(console):
        yield Stages(None)
        return
    with Progress(*COLUMNS, TextColumn("{task.fields[passes]} forward passes"), console=console) as bars:
        yield Stages(bars)


def _nothing() -> None: ...
