"""The English words of ``wonderwords``, which RULER draws from."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from random import Random


@cache
def words(part_of_speech: str) -> tuple[str, ...]:
    """Return all words of a part of speech (``"noun"``, ``"adjective"``, ``"verb"``), sorted."""
    text = files("wonderwords.assets").joinpath(f"{part_of_speech}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({line.strip() for line in text.splitlines()} - {""}))


@cache
def all_words() -> tuple[str, ...]:
    """Return nouns, adjectives and verbs, each once, sorted."""
    return tuple(sorted({word for part in ("noun", "adjective", "verb") for word in words(part)}))


def adjective_noun(rng: Random) -> str:
    """Return a random pair such as ``quick-river``."""
    return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
