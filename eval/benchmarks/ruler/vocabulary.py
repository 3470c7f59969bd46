"""The English words of ``wonderwords``, which RULER draws from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from random import Random

from eval.data_files import noted, remembered


@remembered
def words(part_of_speech: str) -> tuple[str, ...]:
    """Return all words of a part of speech (``"noun"``, ``"adjective"``, ``"verb"``), sorted."""
    name = f"{part_of_speech}list.txt"
    path = noted(Path(str(files("wonderwords.assets").joinpath(name))), f"wonderwords/{name}")
    return tuple(sorted({line.strip() for line in path.read_text(encoding="utf-8").splitlines()} - {""}))


@remembered
def all_words() -> tuple[str, ...]:
    """Return nouns, adjectives and verbs, each once, sorted."""
    return tuple(sorted({word for part in ("noun", "adjective", "verb") for word in words(part)}))


def adjective_noun(rng: Random) -> str:
    """Return a random pair such as ``quick-river``."""
    return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
