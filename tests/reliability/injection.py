"""Errors raised at chosen lines of the library, as a failed allocation or Ctrl-C would raise them there."""

from __future__ import annotations

import linecache
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hf_sparse_attn_kernels
import torch

import hf_sparse_attn

ROOTS = tuple(str(Path(package.__file__).parent) for package in (hf_sparse_attn, hf_sparse_attn_kernels))
ERRORS: dict[str, Callable[[], BaseException]] = {
    "out of memory": lambda: torch.OutOfMemoryError("out of memory, by the test"),
    "Ctrl-C": KeyboardInterrupt,
}


class Line(NamedTuple):
    """An execution of a line of the library."""

    file: str
    number: int
    hit: int
    """How often the line is executed before the error is raised, this time included."""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} (hit {self.hit})"


@contextmanager
def traced(watch: Callable[[str, int], None]) -> Iterator[None]:
    """Call ``watch`` with file and number before each line of the library."""

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            watch(frame.f_code.co_filename, frame.f_lineno)
        return local

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(ROOTS) else None

    former = sys.gettrace()
    sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(former)


def lines_of(work: Callable[[], Any]) -> Counter[tuple[str, int]]:
    """Return how often each line of the library is executed.

    Lines that begin ``with`` are left out: Python runs them again on the way out, where an error would keep torch's own
    context managers from ending. So are ``def`` and ``class``, which run when a module is imported.
    """
    counts: Counter[tuple[str, int]] = Counter()
    with traced(lambda file, number: counts.update([(file, number)])):
        work()
    skipped = ("with ", "def ", "class ", "@")
    return Counter({at: n for at, n in counts.items() if not linecache.getline(*at).strip().startswith(skipped)})


def sample(counts: Counter[tuple[str, int]], number: int, seed: int) -> list[Line]:
    """Draw executions of different lines, evenly over the lines of all files."""
    generator, lines = random.Random(seed), sorted(counts)
    chosen = lines if number >= len(lines) else sorted(generator.sample(lines, number))
    return [Line(*at, generator.randint(1, counts[at])) for at in chosen]


@contextmanager
def calling_at(line: Line, act: Callable[[], None]) -> Iterator[None]:
    """Call a function before an execution of a line."""
    left = line.hit

    def watch(file: str, number: int) -> None:
        nonlocal left
        if (file, number) == line[:2]:
            left -= 1
            if left == 0:
                act()

    with traced(watch):
        yield


@contextmanager
def failing_at(line: Line, error: BaseException) -> Iterator[None]:
    """Raise an error before an execution of a line."""

    def fail() -> None:
        raise error

    # An error on the way out of torch's context managers must not leave their modes to the next case.
    with torch.set_grad_enabled(torch.is_grad_enabled()), calling_at(line, fail):
        yield
