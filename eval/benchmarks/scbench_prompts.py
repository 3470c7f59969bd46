"""SCBench's prompts: a shared context, and what follows it in each turn or request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from eval.benchmarks.base import Setup
from eval.errors import EvalError
from eval.prompts import encode_prompt, in_chat_template
from eval.protocols import render_prompt

_STATISTIC = re.compile(r"The .+ is")
_LEAST_CONTEXT = 16
"""Tokens of the cut context and first question, below which questions would be about nothing."""
_MARK = "\0mark\0"


class EncodedContext(NamedTuple):
    """A context in tokens, and the tokens between it and each turn's answer."""

    material_ids: list[int]
    question_ids: list[list[int]]
    truncated: bool


@dataclass(frozen=True, eq=False)
class SharedContext:
    """A context with its turns.

    In the mode ``turns`` the tokens before an answer are those of the turns before, each with its right answer. In the
    mode ``requests`` they are the request's alone.
    """

    setup: Setup
    prompts: dict[str, Any]
    name: str
    """The official name of the task."""
    mode: str
    context: str
    turns: tuple[dict[str, Any], ...]
    length: int | None

    def new_tokens(self, place: int) -> int:
        """Return the most new tokens of a turn."""
        limits = self.prompts["max_new_tokens"][self.name]
        found: int = limits[self.turns[place]["task"]] if isinstance(limits, dict) else limits
        return found

    def fields(self, place: int) -> dict[str, Any]:
        """Return what the templates may name of a turn."""
        turn = self.turns[place]
        fields = {"input": turn["input"], "question": turn["input"]}
        fields |= {f"OPTION_{letter}": text for letter, text in zip("ABCD", turn.get("options") or (), strict=False)}
        if self.name == "scbench_mf":
            fields["prefix"] = self._asked_number(place)
        return fields

    def _asked_number(self, place: int) -> str:
        found = _STATISTIC.search(self.turns[place]["input"])
        if found is None:
            raise EvalError(f"input={self.turns[place]['input']!r:.80} of {self.name} does not have 'The ... is'")
        asked: str = self.prompts["asked_number"].format(target=found[0].lower().removesuffix(" is"))
        return asked

    def follow_up(self, place: int) -> str:
        """Return the text from the answer of the turn before to where this turn's answer begins."""
        answer = self.turns[place - 1]["answer"]
        if not self.setup.chat:
            template: str = self.prompts["follow_up"][self.name]
            return template.format(pre_ans=answer, **self.fields(place))
        fields = self.fields(place)
        if self.name == "scbench_mf":
            fields["prefix"] = self._asked_number(-1)  # the official code names the last turn's number in all of these
        asked = self.prompts["in_chat"][self.name].format(**fields)
        before = [{"role": "user", "content": _MARK}]
        dialogue = [*before, {"role": "assistant", "content": str(answer)}, {"role": "user", "content": asked}]
        template_of = self.setup.tokenizer.apply_chat_template
        head, whole = (
            str(template_of(messages, add_generation_prompt=True, tokenize=False)) for messages in (before, dialogue)
        )
        if not whole.startswith(head):
            raise EvalError("the chat template does not continue a dialogue where its answer begins; use --chat off")
        return whole[len(head) :] + (self.prompts["summary_start"] if self.name == "scbench_summary" else "")

    def requests(self) -> tuple[str, list[str]]:
        """Return the text before the requests, and each request's up to where its answer begins."""
        template = self.prompts["requests"][self.name]
        head, *tail = template if isinstance(template, list) else [template]
        prefix = {"prefix": self.turns[0]["input"]} if self.name == "scbench_mf" else {}
        text, _ = render_prompt(head, self.context, **prefix)
        asked = tail[0] if tail else self.prompts["in_chat"][self.name]
        requests = [asked.format(**self.fields(place)) for place in range(len(self.turns))]
        if not self.setup.chat:
            return text, requests
        # Each part goes through the template, as in the official code: some templates strip messages.
        tokenizer = self.setup.tokenizer
        before = in_chat_template(tokenizer, text + _MARK).partition(_MARK)[0]
        return before, [in_chat_template(tokenizer, _MARK + request).partition(_MARK)[2] for request in requests]


@lru_cache(maxsize=2)
def encoded(shared: SharedContext) -> EncodedContext:
    """Encode a context and its turns; the context is cut in the middle so that the last turn and its answer fit.

    Raises
    ------
    EvalError
        The turns leave no room for a context.
    """
    tokenizer, chat = shared.setup.tokenizer, shared.setup.chat
    number = len(shared.turns)
    if shared.mode == "turns":
        text, tail = render_prompt(shared.prompts["first_turn"][shared.name], shared.context, **shared.fields(0))
        material, question = encode_prompt(tokenizer, text, tail, chat=chat)
        later = [
            list(tokenizer(shared.follow_up(place), add_special_tokens=False)["input_ids"])
            for place in range(1, number)
        ]
        questions = list(accumulate([question, *later], lambda before, added: before + added))
    else:
        text, requests = shared.requests()
        material = list(tokenizer(text, add_special_tokens=not chat)["input_ids"])
        questions = [list(tokenizer(request, add_special_tokens=False)["input_ids"]) for request in requests]
    longest = max(len(ids) + shared.new_tokens(place) for place, ids in enumerate(questions))
    room = (shared.length or shared.setup.max_positions) - longest
    if room < _LEAST_CONTEXT:
        raise EvalError(
            f"length={shared.length or shared.setup.max_positions} leaves no room for a context beside the "
            f"{longest} tokens of its turns and answers"
        )
    if len(material) <= room:
        return EncodedContext(material, questions, truncated=False)
    # The official code cuts the first prompt, whose end is the first question.
    first = questions[0] if shared.mode == "turns" else []
    half = (room + len(first)) // 2
    end = max(0, half - len(first))
    return EncodedContext(material[: min(half, room)] + material[len(material) - end :], questions, truncated=True)
