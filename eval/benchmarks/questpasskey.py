"""Quest's passkey test (https://arxiv.org/abs/2406.10774, table 1), as its released code runs it."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.errors import EvalError
from eval.prompts import encode_apart
from eval.protocols import load_protocol

CHARS_PER_TOKEN = 4
"""Characters of filler for each token of a length."""
SAMPLES = 100
MAX_NEW_TOKENS = 10
_GREATEST_KEY = 50_000
_MOST_LENGTH = 100_000
"""Greatest length of the paper; the released code's filler ends soon after it."""


class QuestPasskey(Benchmark):
    """A key of 1 to 50,000 in repeated filler; the first number of the answer must be the key.

    The prompt's last characters are encoded apart and are the question. The prompt never takes the chat template.
    """

    name: ClassVar[str] = "questpasskey"
    summary: ClassVar[str] = "Quest's passkey test: a number up to 50,000 in repeated filler, depths 1 to 100 %"
    tasks: ClassVar[tuple[str, ...]] = ("filler",)
    default_lengths: ClassVar[tuple[int, ...]] = (2000,)
    protocol: ClassVar[str | None] = "questpasskey"

    def items(self, setup: Setup) -> list[Item]:
        """Return 100 items for each length, at 1 to 100 %; with ``setup.limit`` at every (100 // limit)-th percent.

        A length is in tokens of about four characters each: the filler has four times as many characters.

        Raises
        ------
        EvalError
            The protocol is missing, or a prompt and its answer exceed the model's positions.
        """
        wording = load_protocol("questpasskey", setup.protocol_dir).values["passkey"]
        count = min(SAMPLES, setup.limit or SAMPLES)
        items = []
        for length in setup.lengths:
            if length > _MOST_LENGTH:
                raise EvalError(f"length={length} is not allowed: at most {_MOST_LENGTH}, the paper's longest")
            depths = [SAMPLES // count * (number + 1) for number in range(count)]
            sample = _build(setup, wording, length, depths[-1])
            setup.check_length(length, len(sample.material_ids) + len(sample.question_ids) + MAX_NEW_TOKENS)
            items += [
                Item("filler", str(depth), partial(_build, setup, wording, length, depth), length, depth / 100)
                for depth in depths
            ]
        return items


def _build(setup: Setup, wording: dict[str, Any], length: int, depth: int) -> Sample:
    key = Random(f"questpasskey/{setup.seed}/{length}/{depth}").randint(1, _GREATEST_KEY)
    text = passkey_prompt(wording, CHARS_PER_TOKEN * length, depth, key)
    material_ids, question_ids = encode_apart(setup.tokenizer, text, wording["question_chars"])
    return Sample(material_ids, question_ids, references=str(key), max_new_tokens=MAX_NEW_TOKENS)


def passkey_prompt(wording: dict[str, Any], filler_chars: int, depth: int, key: int) -> str:
    """Return the prompt with a key at a depth in percent of the filler's characters."""
    before = int(filler_chars * depth / 100)
    filler = " ".join([wording["garbage"]] * (filler_chars // len(wording["garbage"]) + 1))
    lines = (
        wording["task_description"],
        filler[:before],
        wording["information_line"].format(pass_key=key),
        filler[: filler_chars - before],
        wording["final_question"],
    )
    return "\n".join(lines)
