"""The English words that RULER draws from: those of ``wonderwords``."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from random import Random


@cache
def words(part_of_speech: str) -> tuple[str, ...]:
    """All words of a part of speech (``"noun"``, ``"adjective"``, ``"verb"``), sorted."""
    text = files("wonderwords.assets").joinpath(f"{part_of_speech}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({line.strip() for line in text.splitlines()} - {""}))


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, each once, sorted."""
    return tuple(sorted({word for part in ("noun", "adjective", "verb") for word in words(part)}))


def adjective_noun(rng: Random) -> str:
    """A random pair such as ``quick-river``."""
    return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
