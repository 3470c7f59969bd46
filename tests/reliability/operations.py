"""Cache operations, calls of ``generate()`` and files that fail."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_sparse_attn import SparseCache
from tests.reliability.injection import ERRORS, Line, calling_at, failing_at, lines_of, sample
from tests.reliability.passes import Bench, HarmError, same, steps

FED = (90, 1, 1)
ROWS: dict[str, list[int]] = {
    "reorder_cache": [1, 0],
    "batch_repeat_interleave": [0, 0, 1, 1],
    "batch_select_indices": [1],
}
"""The rows that are left after an operation on rows."""
CALLS: dict[str, Callable[[SparseCache], Any]] = {
    "crop": lambda cache: cache.crop(-2),
    "reset": lambda cache: cache.reset(),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor(ROWS["reorder_cache"])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor(ROWS["batch_select_indices"])),
    "fork": lambda cache: cache.fork(cache.method),
}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
PROMPT, NEW = 90, 6


def operation_lines(bench: Bench, name: str, number: int, seed: int) -> list[Line]:
    cache = bench.filled(FED)
    return sample(lines_of(lambda: CALLS[name](cache)), number, seed)


def fail_in_operation(bench: Bench, name: str, line: Line, error_name: str) -> str:
    """Let an operation fail.

    Returns
    -------
    str
        ``"unchanged"``, ``"complete"``, or ``"refused"``: the cache says that it must be reset, and works after that.

    Raises
    ------
    HarmError
        The cache goes on in another state.
    """
    cache, error = bench.filled(FED), ERRORS[error_name]()
    with failing_at(line, error):
        try:
            CALLS[name](cache)
        except type(error):
            pass
        else:
            raise HarmError("the error was swallowed, or the line was not reached")
    states = [("unchanged", [0, 1], sum(FED))]
    states.append(("complete", ROWS.get(name, [0, 1]), {"crop": sum(FED) - 2, "reset": 0}.get(name, sum(FED))))
    outcome = _continued(bench, cache, states)
    if outcome == "refused":
        cache.reset()
        same(bench.feed(cache, FED[0]), bench.feed(bench.new_cache(), FED[0]), "a prompt after the reset")
        for tokens in FED[1:]:
            bench.feed(cache, tokens)
        same(steps(bench, cache), steps(bench, bench.filled(FED)), "steps after the reset")
    bench.check_stock()
    return outcome


def _continued(bench: Bench, cache: SparseCache, states: list[tuple[str, list[int], int]]) -> str:
    """Feed the next tokens, and return which of the states they follow."""
    problem: Exception = HarmError("it has another length")
    length = cache.get_seq_length()
    for outcome, rows, expected_length in states:
        if length != expected_length:
            continue
        expected = bench.filled(FED)
        expected.crop(length - sum(FED)) if length else expected.reset()
        if rows != [0, 1]:
            expected.batch_select_indices(torch.tensor(rows))
        try:
            actual = steps(bench, cache, torch.tensor(rows))
        except ValueError as error:
            if "call reset()" in str(error):
                return "refused"
            problem = error  # another number of rows
            continue
        try:
            same(actual, steps(bench, expected, torch.tensor(rows)), "the next steps")
        except HarmError as harm:
            cache.crop(-actual.shape[1])
            problem = harm
            continue
        return outcome
    raise HarmError(str(problem)) from problem


class FailingStreamer(BaseStreamer):
    """Raises at a call of ``put``."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def end(self) -> None:
        pass


class FailingCriterion(StoppingCriteria):
    """Raises when it is asked for the n-th time."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate_lines(bench: Bench, number: int, seed: int) -> list[Line]:
    cache = bench.new_cache()
    return sample(lines_of(lambda: generate(bench, cache, bench.ids[:1, :PROMPT])), number, seed)


def generate(bench: Bench, cache: SparseCache, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    output: torch.Tensor = bench.model.generate(
        ids, past_key_values=cache, max_new_tokens=PROMPT + NEW - ids.shape[1], **GREEDY, **options
    )
    return output


def fail_in_generate(bench: Bench, expected: torch.Tensor, place: Line | str, at: int = 2) -> str:
    """Let ``generate()`` fail at a line, or in a ``"streamer"`` or ``"stopping criterion"``, and go on from its cache.

    Returns
    -------
    str
        ``"resumed"``: from the tokens that the cache holds, ``generate()`` came to the same answer.

    Raises
    ------
    HarmError
        It did not.
    """
    cache, ids = bench.new_cache(), bench.ids[:1, :PROMPT]
    try:
        if isinstance(place, Line):
            with failing_at(place, KeyboardInterrupt()):
                generate(bench, cache, ids)
        elif place == "streamer":
            generate(bench, cache, ids, streamer=FailingStreamer(BrokenPipeError("the reader is gone"), at))
        else:
            criteria = StoppingCriteriaList([FailingCriterion(RuntimeError("of the test"), at)])
            generate(bench, cache, ids, stopping_criteria=criteria)
    except (KeyboardInterrupt, BrokenPipeError, RuntimeError):
        pass
    else:
        raise HarmError("the error was swallowed, or the line was not reached")
    known = max(PROMPT, cache.get_seq_length() + 1)
    if not torch.equal(generate(bench, cache, expected[:, :known]), expected):
        raise HarmError("the resumed answer differs")
    bench.check_stock()
    return "resumed"


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as a full disk or quota would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)


def fail_on_a_full_disk(save: Callable[[Path], None], path: Path, most_bytes: int) -> str:
    """Write over a file while the disk is full; return ``"kept"`` if the former file, and no other, is there after."""
    save(path)
    before = path.read_bytes()
    with full_disk(most_bytes):
        try:
            save(path)
        except OSError as error:
            if error.errno not in (errno.EFBIG, errno.ENOSPC, None):
                raise
        else:
            raise HarmError(f"the file was written although it has more than {most_bytes} bytes")
    if path.read_bytes() != before:
        raise HarmError("the former file changed")
    if list(path.parent.iterdir()) != [path]:
        raise HarmError("a part of a file was left")
    return "kept"


def fail_by_a_kill(save: Callable[[Path], None], path: Path, line: Line | None, most_bytes: int = 0) -> str:
    """Kill a process at a line of the library, or when it has written some bytes, while it writes over a file.

    Returns
    -------
    str
        ``"kept"`` or ``"complete"``: the file is the former or the new one, whole. A part of the new one may be left
        beside it, under a name that begins with a dot.

    Raises
    ------
    HarmError
        The file is neither, or another one is left.
    """
    save(path)
    before = path.read_bytes()
    child = os.fork()
    if child == 0:  # nothing here may return to the caller's code
        try:
            if line is None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                save(path)
            else:
                with calling_at(line, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                    save(path)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise HarmError("the process was not killed")
    after = path.read_bytes()
    others = [other for other in path.parent.iterdir() if other != path]
    for other in others:
        other.unlink()
    if len(after) != len(before):
        raise HarmError(f"the file has {len(after)} bytes, and the former one had {len(before)}")
    if any(not other.name.startswith(".") for other in others):
        raise HarmError(f"{others[0].name} was left")
    return "complete" if not others and after != before else "kept"
