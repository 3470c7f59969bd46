"""Run the faults of a method, and count their outcomes."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from hf_sparse_attn import prepare_context, unpatch_model
from tests.models import random_ids, shared_model
from tests.reliability.injection import lines_of, sample
from tests.reliability.operations import (
    CALLS,
    FED,
    PROMPT,
    fail_by_a_kill,
    fail_in_generate,
    fail_in_operation,
    fail_on_a_full_disk,
    generate,
    generate_lines,
    operation_lines,
)
from tests.reliability.passes import PASSES, STORAGES, Bench, expected_of, fail_in_pass, pass_lines, runs

PARTIAL_BYTES = 20_000
"""Bytes of a file that are written before the disk is full, or the process killed."""


class Case(NamedTuple):
    """A fault to inject: its kind, where, and the function that does so and returns the outcome."""

    kind: str
    storage: str
    place: str
    run: Callable[[], str]


def pass_cases(method: str, storage: str, lines: int, seed: int) -> Iterator[Case]:
    """Yield passes that fail, half of them because memory has run out."""
    bench = Bench(method, storage)
    for name, situation in PASSES.items():
        expected = expected_of(bench, situation)
        for number, line in enumerate(pass_lines(bench, situation, lines, seed)):
            error, repeats = ("out of memory", "Ctrl-C")[number // 2 % 2], number % 2 == 0

            def run(situation=situation, expected=expected, line=line, error=error, repeats=repeats) -> str:
                return fail_in_pass(bench, situation, expected, line, error, repeats)

            yield Case(f"{error}: {name}", storage, str(line), run)
    unpatch_model(bench.model)


def operation_cases(method: str, storage: str, lines: int, seed: int) -> Iterator[Case]:
    """Yield operations, calls of ``generate()`` and writes of files that fail."""
    bench = Bench(method, storage)
    for name in CALLS:
        if name == "crop" and bench.method.evicts:
            continue
        for line in operation_lines(bench, name, lines, seed):
            yield Case(
                f"out of memory: {name}",
                storage,
                str(line),
                lambda name=name, line=line: fail_in_operation(bench, name, line, "out of memory"),
            )
    answer = generate(bench, bench.new_cache(), bench.ids[:1, :PROMPT])
    places = {"Ctrl-C: generate()": generate_lines(bench, lines, seed)}
    places |= {f"error: {name}": [name] for name in ("streamer", "stopping criterion")}
    for kind, found in places.items():
        for place in found:
            yield Case(kind, storage, str(place), lambda place=place: fail_in_generate(bench, answer, place))
    if not bench.method.evicts:
        cache = bench.filled(FED)
        yield from file_cases("cache", storage, lambda path: cache.save(path, bench.model), lines, seed)
    unpatch_model(bench.model)


def file_cases(what: str, storage: str, save: Callable[[Path], None], lines: int, seed: int) -> Iterator[Case]:
    """Yield writes that fail."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        yield Case(f"full disk: {what}", storage, "write", lambda: fail_on_a_full_disk(save, path, PARTIAL_BYTES))
        yield Case(f"kill: {what}", storage, "write", lambda: fail_by_a_kill(save, path, None, PARTIAL_BYTES))
        for line in sample(lines_of(lambda: save(path)), lines, seed):
            yield Case(f"kill: {what}", storage, str(line), lambda line=line: fail_by_a_kill(save, path, line))


def context_cases(lines: int, seed: int) -> Iterator[Case]:
    """Yield writes of a fixed context that fail."""
    model = shared_model("llama", torch.float64)
    options = {"target_sparsity": 0.5, "clusters": 0.1, "window": 8, "progress": False}
    context = prepare_context(model, random_ids(1, 200), **options)
    yield from file_cases("context", "growing", context.save, lines, seed)


def cases_of(method: str, lines: int, seed: int) -> Iterator[Case]:
    """Yield all faults of a method."""
    for storage in STORAGES:
        if runs(method, storage):
            yield from pass_cases(method, storage, lines, seed)
            yield from operation_cases(method, storage, max(1, lines // 2), seed)
    if method == "squeezed":
        yield from context_cases(lines, seed)


def run_faults(method: str, lines: int, seed: int) -> tuple[list[dict[str, object]], list[dict[str, str]]]:
    """Run all faults of a method; return the number of cases by kind, storage and outcome, and those that did harm."""
    counts: Counter[tuple[str, str, str]] = Counter()
    harm = []
    for case in cases_of(method, lines, seed):
        try:
            outcome = case.run()
        except Exception as error:
            outcome, text = "harm", f"{type(error).__name__}: {error}"
            harm.append(
                {"method": method, "kind": case.kind, "storage": case.storage, "place": case.place, "what": text}
            )
        counts[case.kind, case.storage, outcome] += 1
    return [
        {"method": method, "kind": kind, "storage": storage, "outcome": outcome, "cases": cases}
        for (kind, storage, outcome), cases in sorted(counts.items())
    ], harm
