"""An estimate of a run's time, from a short probe of its model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.benchmarks import Item, Sample
from eval.engine import Variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORTH_PROBING_TOKENS = 1_000_000
"""Tokens of a run, prompts and answers of all variants, below which nothing is estimated."""
_PREFILL_TOKENS = 256
_STEPS = 4

Work = tuple[int, int]
"""Tokens that are fed in long passes, and tokens that are fed one by one."""


def work_of(sample: Sample, variants: Sequence[Variant], feeds_question: bool) -> Work:
    """Return the most tokens that a sample's variants take.

    Variants with a dense prefill share one. Answers are counted in full, since their lengths are not known.
    """
    own = sum(not variant.prefills_densely for variant in variants)
    prefills = own + any(variant.prefills_densely for variant in variants)
    question, forced = len(sample.question_ids), len(sample.forced_ids)
    fed = forced if sample.forced_chunk == 1 else 0
    steps = sample.max_new_tokens + fed + (question if feeds_question else 0)
    at_once = forced - fed + (0 if feeds_question else question)
    return prefills * len(sample.material_ids) + len(variants) * at_once, len(variants) * steps


class Examples:
    """One sample of each task and length, which stands for the others; built when it is first asked for."""

    def __init__(self) -> None:
        self._built: dict[tuple[str, int | None], Sample | None] = {}

    def like(self, item: Item) -> Sample | None:
        """Return a sample of the item's task and length; None if it cannot be built."""
        key = item.task, item.length
        if key not in self._built:
            try:
                self._built[key] = item.build()
            except Exception:  # stored in the sample's records when it is its turn
                self._built[key] = None
        return self._built[key]


def total_work(
    wanted: Sequence[tuple[Item, Sequence[Variant]]], feeds_question: bool, examples: Examples | None = None
) -> Work:
    """Return the tokens of a run, from one sample of each task and length."""
    examples = Examples() if examples is None else examples
    groups: dict[tuple[str, int | None, int], list[tuple[Item, Sequence[Variant]]]] = defaultdict(list)
    for item, variants in wanted:
        if variants:
            groups[item.task, item.length, len(variants)].append((item, variants))
    at_once = steps = 0
    for members in groups.values():
        item, variants = members[0]
        sample = examples.like(item)
        if sample is None:
            continue
        of_one = work_of(sample, variants, feeds_question)
        at_once, steps = at_once + len(members) * of_one[0], steps + len(members) * of_one[1]
    return at_once, steps


def expected_seconds(model: PreTrainedModel, work: Work) -> float | None:
    """Estimate the seconds of a run on a model; None for a run of few tokens.

    The model's own speed on 256 tokens at once, and on single tokens after them, stands for all lengths and methods.
    Attention to long contexts takes longer, and answers may end early.
    """
    if sum(work) < WORTH_PROBING_TOKENS:
        return None
    from transformers import DynamicCache

    from hf_sparse_attn.cli.greedy import forward

    def run() -> tuple[float, float]:
        cache = DynamicCache(config=model.config)
        started = time.perf_counter()
        forward(model, cache, [0] * _PREFILL_TOKENS).argmax().item()  # waits for the device
        between = time.perf_counter()
        for _ in range(_STEPS):
            forward(model, cache, [0]).argmax().item()
        return between - started, time.perf_counter() - between

    run()  # the first pass is slower
    at_once, steps = run()
    return work[0] * at_once / _PREFILL_TOKENS + work[1] * steps / _STEPS
