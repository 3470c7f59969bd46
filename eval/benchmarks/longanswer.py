"""Long answers: the beginning of a book, and an answer of a given length that is followed, not scored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.pg19 import named_books
from eval.errors import EvalError
from eval.prompts import encode_prompt

_INTRODUCTION = "Read the text below. It is the beginning of a book.\n\n"
_QUESTION = (
    "\n\nTell the story of this text again from its first sentence to its last, in your own words and in all detail. "
    "Then tell how the story may go on, chapter by chapter.\n"
)


class LongAnswer(Benchmark):
    """A retelling of a book's beginning, of exactly ``new_tokens`` tokens; it has no score.

    With ``--measure divergence`` the methods follow dense attention's answer, most of which a method has chosen from by
    the end. Tokens that would end the answer earlier are suppressed.
    """

    name: ClassVar[str] = "longanswer"
    summary: ClassVar[str] = "long retellings of books, for the divergence along them"
    tasks: ClassVar[tuple[str, ...]] = ("retelling",)
    default_lengths: ClassVar[tuple[int, ...]] = (8000,)
    options: ClassVar[dict[str, Any]] = {"new_tokens": 2000}

    def items(self, setup: Setup) -> list[Item]:
        """Return an item for each length and book; a length covers prompt and answer, in tokens."""
        new_tokens = setup.option("new_tokens", self.options["new_tokens"])
        if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 1:
            raise EvalError(f"new_tokens={new_tokens!r} is not allowed: a whole number, at least 1")
        instructions = encode_prompt(setup.tokenizer, _INTRODUCTION + _QUESTION, len(_QUESTION), chat=setup.chat)
        bare = sum(map(len, instructions))
        for length in setup.lengths:
            setup.check_length(length)
            if length <= new_tokens + bare:
                raise EvalError(
                    f"length={length} is not allowed: more than new_tokens={new_tokens} and the {bare} tokens of the "
                    "instructions"
                )
        found = named_books(setup.data_dir, setup.limit)
        return [
            Item("retelling", title, partial(_build, setup, read, title, length, new_tokens), length)
            for length in setup.lengths
            for title, read in found
        ]


def _build(setup: Setup, read: Callable[[], str], title: str, length: int, new_tokens: int) -> Sample:
    room = length - new_tokens
    token_ids = setup.tokenizer(read()[: 16 * room], add_special_tokens=False)["input_ids"]
    if len(token_ids) < room:
        raise EvalError(f"book {title!r} has {len(token_ids)} tokens, fewer than {room}")
    while True:  # cut until the prompt fits: the same text may encode to fewer tokens alone
        text = _INTRODUCTION + setup.tokenizer.decode(token_ids, skip_special_tokens=True) + _QUESTION
        material_ids, question_ids = encode_prompt(setup.tokenizer, text, len(_QUESTION), chat=setup.chat)
        excess = len(material_ids) + len(question_ids) - room
        if excess <= 0:
            break
        if excess >= len(token_ids):
            raise EvalError(f"length={length} leaves no room for a book beside {new_tokens} new tokens")
        token_ids = token_ids[:-excess]
    return Sample(material_ids, question_ids, references=None, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
