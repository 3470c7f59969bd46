"""A model on disk that every test of the harness can run in a moment."""

from __future__ import annotations

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
    """A book and essays, made up."""
    folder = tmp_path_factory.mktemp("data")
    sentences = [f"On day {i} the boat number {i * 7 % 31} came home with {i * 3 % 17} fish." for i in range(300)]
    (folder / "book.txt").write_text(" ".join(sentences), encoding="utf-8")
    (folder / "PaulGrahamEssays.json").write_text('{"text": "' + " ".join(sentences[::-1]) + '"}', encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def own_protocols(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Protocol files of the official ones' structure, in words of our own."""
    return write_own_protocols(tmp_path_factory.mktemp("protocols"))


@pytest.fixture
def protocols(own_protocols: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, which the loader takes for the official ones."""
    pin_own_protocols(monkeypatch)
    return own_protocols
