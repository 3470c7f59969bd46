"""Progress on stderr: bars on a terminal, plain lines elsewhere."""

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
"""Shorter work is not announced."""
COLUMNS: tuple[ProgressColumn, ...] = (
    TextColumn("{task.description}", markup=False),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def moves_cursor(console: Console) -> bool:
    """Return whether bars can be drawn: only on a terminal that can move its cursor, even if colours are forced."""
    return console.file.isatty() and not console.is_dumb_terminal


def about(seconds: float) -> str:
    """Format an estimated duration, rounded to its likely precision."""
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
    """Print one plain line to stderr."""
    sys.stderr.write(one_line(line) + "\n")
    sys.stderr.flush()


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Hide libraries' tqdm bars; some of them have no setting that turns them off."""
    usual = tqdm.__init__
    tqdm.__init__ = partialmethod(usual, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = usual


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner on a terminal and hide libraries' progress bars."""
    console = Console(stderr=True)
    shown: AbstractContextManager[object] = console.status(literal(what)) if moves_cursor(console) else nullcontext()
    with shown, hidden_bars():
        yield


class Stages:
    """Consecutive stages of work: a bar for each on a terminal, elsewhere a line at the end of each."""

    def __init__(self, bars: Progress | None) -> None:
        self._bars = bars

    @contextmanager
    def stage(self, label: str, total: int, unit: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
        """Show one stage; yield callbacks for each finished forward pass and each of the ``total`` units."""
        if self._bars is None:
            started = time.perf_counter()
            yield _nothing, _nothing
            say(f"{label}: {total} {unit}{'s' if total > 1 else ''} in {time.perf_counter() - started:.1f} s")
            return
        bars = self._bars
        task = bars.add_task(literal(label).plain, total=total, passes="")
        passes = 0

        def passed() -> None:
            nonlocal passes
            passes += 1
            bars.update(task, passes=f"{passes} forward passes")

        yield passed, lambda: bars.advance(task)


@contextmanager
def stages() -> Iterator[Stages]:
    """Show stages of work on stderr."""
    console = Console(stderr=True)
    if not moves_cursor(console):
        yield Stages(None)
        return
    with Progress(*COLUMNS, TextColumn("{task.fields[passes]}"), console=console) as bars:
        yield Stages(bars)


def _nothing() -> None: ...
