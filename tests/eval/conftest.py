"""Fixtures of the harness's tests: a tiny model on disk, data and protocols."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.eval.own_protocols import pin_own_protocols, write_own_protocols
from tests.tiny import save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with 1,024 positions, and a byte-level tokenizer with a chat template."""
    return str(save_model(tmp_path_factory.mktemp("model"), chat=True))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book and essays with invented text."""
    folder = tmp_path_factory.mktemp("data")
    sentences = [f"On day {i} the boat number {i * 7 % 31} came home with {i * 3 % 17} fish." for i in range(300)]
    (folder / "book.txt").write_text(" ".join(sentences), encoding="utf-8")
    (folder / "PaulGrahamEssays.json").write_text('{"text": "' + " ".join(sentences[::-1]) + '"}', encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def own_protocols(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Protocol files with the official structure and our own wording."""
    return write_own_protocols(tmp_path_factory.mktemp("protocols"))


@pytest.fixture
def protocols(own_protocols: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same files, pinned so that the loader accepts them."""
    pin_own_protocols(monkeypatch)
    return own_protocols


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """Freeze existing objects: garbage is collected before each timed run and need not scan them again."""
    gc.freeze()
    yield
    gc.unfreeze()
