"""Needle in a haystack: one sentence in essays or books, over length and depth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.haystack import check_depths, rotated, text_haystack
from eval.errors import EvalError
from eval.prompts import encode_prompt
from hf_sparse_attn.cli.passkey import encode_endlessly

MAX_NEW_TOKENS = 24
PLACES = ("Lisbon", "Nairobi", "Osaka", "Quito", "Tallinn", "Valencia", "Hobart", "Bergen", "Cusco", "Galway")
OBJECTS = ("lantern", "compass", "umbrella", "thermos", "notebook", "whistle", "blanket", "camera", "ladder", "violin")
COLOURS = ("copper", "purple", "silver", "yellow", "crimson", "turquoise", "golden", "white", "scarlet", "violet")
FOODS = ("figs", "walnuts", "olives", "dates", "pretzels", "almonds", "raisins", "lemons", "apricots", "chestnuts")
_INTRODUCTION = "Read the text below. One sentence in it tells what to carry on a walk; you will be asked for it.\n\n"
_NEEDLE = "The best thing to carry on a walk through {place} is a {colour} {object} filled with {food}."
_QUESTION = "\n\nWhat is the best thing to carry on a walk through {place}? Answer with what the text says.\n"
_ANSWER_PREFIX = "The best thing to carry on a walk through {place} is"


class Needle(Benchmark):
    """One out-of-place sentence in natural text; the score is the share of the answer's words in the prediction."""

    name: ClassVar[str] = "needle"
    summary: ClassVar[str] = "one sentence in essays or books, length x depth"
    tasks: ClassVar[tuple[str, ...]] = ("essay", "book")
    default_tasks: ClassVar[tuple[str, ...]] = ("essay",)
    default_lengths: ClassVar[tuple[int, ...]] = (1000, 2000, 4000)
    options: ClassVar[dict[str, Any]] = {"depths": (0.0, 0.25, 0.5, 0.75, 1.0)}

    def items(self, setup: Setup) -> list[Item]:
        """Return an item for each task, length and depth; a length covers prompt and answer, in tokens."""
        depths = check_depths(setup.option("depths", self.options["depths"]))
        items = []
        for task in setup.tasks:
            sentences = text_haystack(task, setup)
            for length in setup.lengths:
                setup.check_length(length)
                for depth in depths[: setup.limit]:
                    make = partial(_build, setup, sentences, length, depth, f"{setup.seed}-{task}-{length}-{depth:g}")
                    items.append(Item(task, f"{depth:g}", make, length, depth))
                items[-1].build()  # raises now if the length is too small
        return items


def _build(setup: Setup, sentences: Sequence[str], length: int, depth: float, seed: str) -> Sample:
    draw = random.Random(seed)
    words = {
        "place": draw.choice(PLACES),
        "object": draw.choice(OBJECTS),
        "colour": draw.choice(COLOURS),
        "food": draw.choice(FOODS),
    }
    needle, question = _NEEDLE.format(**words), _QUESTION.format(**words)
    prefix = _ANSWER_PREFIX.format(**words)

    def encode(hay: Sequence[str]) -> tuple[list[int], list[int]]:
        place = round(depth * len(hay))
        text = _INTRODUCTION + " ".join((*hay[:place], needle, *hay[place:])) + question
        return encode_prompt(setup.tokenizer, text, len(question), chat=setup.chat, answer_prefix=prefix)

    hay: list[str] = []
    room = length - MAX_NEW_TOKENS
    used = sum(map(len, encode(hay)))
    if used > room:
        raise EvalError(f"length={length} is not allowed: at least {used + MAX_NEW_TOKENS}, for prompt and answer")
    ordered = rotated(sentences, seed)
    for sentence, ids in zip(itertools.cycle(ordered), encode_endlessly(setup.tokenizer, ordered), strict=False):
        used += len(ids)
        if used > room:
            break
        hay.append(sentence)
    while sum(map(len, (encoded := encode(hay)))) > room:  # joined sentences may encode to more tokens
        hay.pop()
    return Sample(
        *encoded,
        references=f"a {words['colour']} {words['object']} filled with {words['food']}",
        max_new_tokens=MAX_NEW_TOKENS,
    )
