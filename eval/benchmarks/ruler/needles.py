"""RULER's needle tasks: sentences with magic values, hidden in repeated lines, essays, or similar sentences."""

from __future__ import annotations

import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from eval import sources
from eval.benchmarks.ruler.prompt import Draft, Order, Prompt
from eval.benchmarks.ruler.vocabulary import adjective_noun
from eval.data_files import remembered

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_ESSAY_DEPTHS = tuple(round(100 * i / 39) / 100 for i in range(40))
# RULER splits with nltk's punkt, which needs a download. Needles only need positions between sentences: here a sentence
# ends at a full stop, question or exclamation mark, with an optional closing quote and no lower-case letter next.
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]\u201d\u2019]))\s+(?![a-z])""")


@dataclass(frozen=True)
class _Needle:
    key: str
    value: str
    depth: float
    """Share of the haystack before the needle."""

    def sentence(self, kind: str) -> str:
        return _NEEDLE.format(kind=kind, key=self.key, value=self.value)


def draft(order: Order) -> Draft:
    """Draft a prompt with ``num_needle_k`` keys of ``num_needle_v`` values, asking for ``num_needle_q`` of the keys.

    The haystack's unit is a word of the essays, or a line. Everything independent of the size is drawn here, without
    reading a file, so needles have the same depths at every size.
    """
    rng, kind = order.rng, order.args["type_needle_v"]
    asked_count, value_count = order.args["num_needle_q"], order.args["num_needle_v"]
    key_count = max(order.args["num_needle_k"], asked_count)
    keys = _distinct(_DRAWERS[order.args["type_needle_k"]], key_count, rng)
    values = _distinct(_DRAWERS[kind], key_count * value_count, rng)
    haystack = order.args["type_haystack"]
    depths = _depths(haystack, len(values), rng)
    needles = [
        _Needle(keys[i // value_count], value, depth)
        for i, (value, depth) in enumerate(zip(values, depths, strict=True))
    ]
    asked = rng.sample(keys, asked_count)
    answers = [needle for key in asked for needle in needles if needle.key == key]
    line_seed = rng.getrandbits(64)

    template, asked_kind = order.template, kind
    if len(answers) == 1:
        template, asked_kind = template.singular(), kind[:-1]
    query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]

    def render(size: int) -> Prompt:
        if haystack == "essay":
            pieces, separator = _essays(order.data_dir).first_words(size), " "
        elif haystack == "noise":
            pieces, separator = [NOISE] * size, "\n"
        else:
            pieces, separator = _other_needles(order, keys, size, Random(line_seed)), "\n"
        places = [(int(len(pieces) * needle.depth), needle.sentence(kind)) for needle in needles]
        for place, sentence in sorted(places, reverse=True):  # from the end, so that earlier places do not move
            pieces.insert(place, sentence)
        return template.fill(separator.join(pieces), type_needle_v=asked_kind, query=query)

    return Draft(
        render,
        smallest=len(needles),
        step=400 if haystack == "essay" else 20,
        references=[needle.value for needle in answers],
        depth=answers[0].depth if len(answers) == 1 else None,
    )


def _depths(haystack: str, count: int, rng: Random) -> list[float]:
    if haystack == "essay":
        return rng.sample(_ESSAY_DEPTHS, count)
    return [rng.random() for _ in range(count)]


def _other_needles(order: Order, keys: Collection[str], count: int, rng: Random) -> list[str]:
    """Return lines of the same form with other keys; a larger ``count`` only appends lines."""
    kind = order.args["type_needle_v"]
    draw_key, draw_value = _DRAWERS[order.args["type_needle_k"]], _DRAWERS[kind]
    lines: list[str] = []
    while len(lines) < count:
        other = _Needle(draw_key(rng), draw_value(rng), 0.0)
        if other.key not in keys:
            lines.append(other.sentence(kind))
    return lines


def _number(rng: Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _uuid(rng: Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_DRAWERS: dict[str, Callable[[Random], str]] = {"numbers": _number, "words": adjective_noun, "uuids": _uuid}


def _distinct(draw: Callable[[Random], str], count: int, rng: Random) -> list[str]:
    drawn: dict[str, None] = {}  # an ordered set
    while len(drawn) < count:
        drawn[draw(rng)] = None
    return list(drawn)


class _Essays:
    """The sentences of the essays, repeated from the start after the end."""

    def __init__(self, text: str) -> None:
        self.sentences = _SENTENCE_END.split(" ".join(text.split()))
        self.word_ends = list(accumulate(sentence.count(" ") + 1 for sentence in self.sentences))

    def first_words(self, count: int) -> list[str]:
        """Return sentences with ``count`` words in total, the last one cut short."""
        rounds, count = divmod(count, self.word_ends[-1])
        whole = bisect_right(self.word_ends, count)
        sentences = self.sentences * rounds + self.sentences[:whole]
        rest = count - (self.word_ends[whole - 1] if whole else 0)
        if rest:
            sentences.append(" ".join(self.sentences[whole].split(" ")[:rest]))
        return sentences


@remembered
def _essays(data_dir: Path | None) -> _Essays:
    return _Essays(sources.essays(data_dir))
