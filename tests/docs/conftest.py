"""A small model in place of the one that the pages name."""

import json
from pathlib import Path

import pytest

from tests.tiny import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model long enough for the pages' budgets, and a book longer than them."""
    folder = save_model(tmp_path_factory.mktemp("model"), chat=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (folder / "book.txt").write_text("The river was quiet. " * 60)
    return folder
