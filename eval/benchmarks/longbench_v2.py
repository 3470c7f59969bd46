"""LongBench v2 (https://arxiv.org/abs/2412.15204): 503 questions with four choices on contexts up to 2M words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.longbench import check_cut
from eval.errors import EvalError
from eval.examples import load_examples, unique_ids
from eval.prompts import encode_prompt, encode_within
from eval.protocols import load_protocol

HUB_ID = "THUDM/LongBench-v2"
REVISION = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"
CATEGORIES = ("difficulty", "length", "domain")
# The template's fields, in the order in which the official code fills them.
_FIELDS = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}


class LongBenchV2(Benchmark):
    """LongBench v2 without a chain of thought; prompts that are too long are cut in the middle."""

    name: ClassVar[str] = "longbench_v2"
    summary: ClassVar[str] = "LongBench v2: 503 hard questions with four choices, 8k to 2M words"
    tasks: ClassVar[tuple[str, ...]] = ("choice",)
    protocol: ClassVar[str | None] = "longbench_v2"
    options: ClassVar[dict[str, Any]] = {"cut": None, "longest": None}

    def items(self, setup: Setup) -> list[Item]:
        """Return an item for each length and question; a length covers prompt and answer after the cut."""
        values = load_protocol("longbench_v2", setup.protocol_dir).values["prompts"]
        new_tokens = values["max_new_tokens"]
        check_cut(setup.option("cut", None))
        longest = setup.option("longest", None)
        if longest not in (None, "short", "medium", "long"):
            raise EvalError(f"longest={longest!r} is not allowed: short, medium, long or None")
        for requested in setup.lengths:
            setup.check_length(requested)
        lengths: Sequence[int | None] = setup.lengths or (None,)
        for length in lengths:
            if (length or setup.max_positions) < new_tokens + 2:
                raise EvalError(f"length={length or setup.max_positions} leaves no room beside {new_tokens} new tokens")
        examples = self._examples(setup)
        kept = {"short": ("short",), "medium": ("short", "medium")}.get(longest)
        pairs = [
            (sample_id, example)
            for sample_id, example in zip(unique_ids(examples, "_id"), examples, strict=True)
            if kept is None or example["length"] in kept
        ]
        return [
            Item(
                "choice",
                sample_id,
                partial(_build, setup, values["0shot"], new_tokens, length, example),
                length,
                categories={name: example[name] for name in CATEGORIES},
            )
            for length in lengths
            for sample_id, example in pairs[: setup.limit]
        ]

    def _examples(self, setup: Setup) -> list[dict[str, Any]]:
        examples, origin = load_examples(
            "data.json",
            hub_id=HUB_ID,
            hub_filename="data.json",
            data_dir=setup.data_dir,
            benchmark="longbench_v2",
            required=(*_FIELDS.values(), "answer", *CATEGORIES),
            revision=REVISION,
        )
        for number, example in enumerate(examples):
            for name in (*_FIELDS.values(), *CATEGORIES):
                if not isinstance(example[name], str):
                    raise EvalError(f"{origin}: {name} of example {number} is not a text but {example[name]!r:.80}")
            if example["answer"] not in ("A", "B", "C", "D"):
                raise EvalError(f"{origin}: answer={example['answer']!r:.80} of example {number} is not A, B, C or D")
        return examples


def _build(setup: Setup, template: str, new_tokens: int, length: int | None, example: dict[str, Any]) -> Sample:
    text, tail = template, template.partition("$DOC$")[2]
    for mark, name in _FIELDS.items():
        text, tail = (part.replace(mark, example[name].strip()) for part in (text, tail))
    split = partial(encode_prompt, setup.tokenizer, question_chars=len(tail), chat=setup.chat)
    most = (length or setup.max_positions) - new_tokens
    prompt = encode_within(setup.tokenizer, text, split, most, setup.option("cut", None), decode_once=True)
    return Sample(
        material_ids=prompt.material_ids,
        question_ids=prompt.question_ids,
        references=example["answer"],
        max_new_tokens=new_tokens,
        truncated=prompt.truncated,
    )
