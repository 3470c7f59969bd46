"""Passkey retrieval: a five-digit number in a haystack, at several depths."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.haystack import check_depths, rotated, text_haystack
from eval.errors import EvalError
from hf_sparse_attn.cli.passkey import FILLER, Passkey, make_passkey

MAX_NEW_TOKENS = 8


class PasskeyRetrieval(Benchmark):
    """A five-digit key in repeated filler, or in the text of a book; the answer must have the key in it.

    The prompt is plain text that ends where the key must follow, so base and instruction models both complete it; it
    never takes the chat template.
    """

    name: ClassVar[str] = "passkey"
    summary: ClassVar[str] = "a five-digit key in repeated filler, or in a book"
    tasks: ClassVar[tuple[str, ...]] = ("filler", "book")
    default_tasks: ClassVar[tuple[str, ...]] = ("filler",)
    default_lengths: ClassVar[tuple[int, ...]] = (2000,)
    options: ClassVar[dict[str, Any]] = {"depths": (0.1, 0.3, 0.5, 0.7, 0.9), "repeats": 1}

    def items(self, setup: Setup) -> list[Item]:
        """Return ``repeats`` items per depth for each task and length; a length is the material's, in tokens."""
        depths = check_depths(setup.option("depths", self.options["depths"]))
        repeats = setup.option("repeats", self.options["repeats"])
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise EvalError(f"repeats={repeats!r} is not allowed: a whole number, at least 1")
        rounds = list(itertools.islice(((repeat, depth) for repeat in range(repeats) for depth in depths), setup.limit))
        items = []
        for task in setup.tasks:
            sentences = list(FILLER) if task == "filler" else text_haystack(task, setup)
            for length in setup.lengths:
                built = min(length, setup.max_positions)  # a longer one is refused below, without its text
                try:
                    first = _make(setup, task, built, sentences, rounds[0][1], number=0)
                except ValueError as error:
                    raise EvalError(f"length={length} is not allowed: {error}") from error
                setup.check_length(length, length + len(first.question_ids) + MAX_NEW_TOKENS)
                for number, (repeat, depth) in enumerate(rounds):
                    build = partial(_build, setup, task, length, sentences, depth, number)
                    items.append(Item(task, f"{repeat}-{depth:g}", build, length, depth))
        return items


def _make(setup: Setup, task: str, length: int, sentences: list[str], depth: float, number: int) -> Passkey:
    seed = 1000 * setup.seed + number
    haystack = sentences if task == "filler" else rotated(sentences, f"{seed}")
    return make_passkey(setup.tokenizer, length, depth, seed, haystack)


def _build(setup: Setup, task: str, length: int, sentences: list[str], depth: float, number: int) -> Sample:
    passkey = _make(setup, task, length, sentences, depth, number)
    return Sample(
        material_ids=passkey.material_ids,
        question_ids=passkey.question_ids,
        references=passkey.answer,
        max_new_tokens=MAX_NEW_TOKENS,
    )
