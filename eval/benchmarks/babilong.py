"""BABILong (https://arxiv.org/abs/2406.10149): the facts of bAbI's questions among the sentences of books."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.errors import EvalError
from eval.examples import find_examples, load_hub_dataset
from eval.prompts import encode_prompt
from eval.protocols import load_protocol, render_prompt

HUB_ID = "RMT-team/babilong"
REVISION = "e3a924b6686759422257925a695cbbb4b2684936"
SIZES = {
    **{1000 * thousands: f"{thousands}k" for thousands in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)},
    1_000_000: "1M",
    10_000_000: "10M",
}
"""The names of the lengths in the data."""
_FIRST_TEN = tuple(f"qa{number}" for number in range(1, 11))


class Babilong(Benchmark):
    """Questions about facts that are spread over a long text, with the official instructions and examples."""

    name: ClassVar[str] = "babilong"
    summary: ClassVar[str] = "BABILong: reasoning over facts that are hidden in books, 20 tasks up to 10M tokens"
    tasks: ClassVar[tuple[str, ...]] = tuple(f"qa{number}" for number in range(1, 21))
    default_tasks: ClassVar[tuple[str, ...]] = _FIRST_TEN
    default_lengths: ClassVar[tuple[int, ...]] = (4000,)
    protocol: ClassVar[str | None] = "babilong"
    averages: ClassVar[dict[str, tuple[str, ...]]] = {
        "mean of qa1 to qa5": _FIRST_TEN[:5],
        "mean of qa1 to qa10": _FIRST_TEN,
    }
    options: ClassVar[dict[str, Any]] = {"facts_only": False}

    def items(self, setup: Setup) -> list[Item]:
        """Return the items of each task and length; a length is the official name of the data's size."""
        values = load_protocol("babilong", setup.protocol_dir).values["prompts"]
        facts_only = setup.option("facts_only", False)
        if not isinstance(facts_only, bool):
            raise EvalError(f"facts_only={facts_only!r} is not allowed: True or False")
        for requested in setup.lengths:
            if requested not in SIZES:
                raise EvalError(f"length={requested} is not allowed: babilong has {', '.join(map(str, SIZES))}")
        sizes: Sequence[tuple[int | None, str]] = [(None, "0k")]
        if not facts_only:
            sizes = [(length, SIZES[length]) for length in setup.lengths]
        items = []
        for task in setup.tasks:
            for length, size in sizes:
                if length is not None:
                    setup.check_length(length)
                build = partial(_build, setup, values, task)
                items += [
                    Item(task, str(number), partial(build, example), length)
                    for number, example in enumerate(_examples(setup, task, size)[: setup.limit])
                ]
        return items


def _examples(setup: Setup, task: str, size: str) -> list[dict[str, Any]]:
    required = ("input", "question", "target")
    found = find_examples(f"{task}/{size}.json", setup.data_dir, "babilong", required)
    if found is not None:
        examples, origin = found
    else:
        origin = f"hub dataset {HUB_ID} at {REVISION}, {size}, {task}"
        advice = f"With --data-dir D, samples are read from D/babilong/{task}/{size}.json."
        examples = list(load_hub_dataset(HUB_ID, task, advice, config=size, revision=REVISION))
    for number, example in enumerate(examples):
        for name in required:
            if not isinstance(example.get(name), str):
                raise EvalError(f"{origin}: {name} of example {number} is not a text but {example.get(name)!r:.80}")
    return examples


def _build(setup: Setup, values: dict[str, Any], task: str, example: dict[str, Any]) -> Sample:
    text, question_chars = render_prompt(
        values["template"], example["input"].strip(), question=example["question"], **values["tasks"][task]
    )
    question_chars -= len(text) - len(text.rstrip())
    material_ids, question_ids = encode_prompt(setup.tokenizer, text.strip(), question_chars, chat=setup.chat)
    total = len(material_ids) + len(question_ids) + values["max_new_tokens"]
    if total > setup.max_positions:
        raise EvalError(f"prompt and answer have {total} tokens, more than the model's {setup.max_positions} positions")
    asked = example["question"].lower()
    return Sample(
        material_ids=material_ids,
        question_ids=question_ids,
        references=example["target"],
        max_new_tokens=values["max_new_tokens"],
        # What the question names is never the answer, and is not counted in one.
        all_classes=[label for label in values["labels"][task] if label.lower() not in asked],
    )
