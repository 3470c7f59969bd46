"""Invented data and a protocol with our own wording, for every test of RULER."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks.base import Setup
from tests.eval.ruler_data import make_setup, use_own_protocol, write_files


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("ruler"))


@pytest.fixture(autouse=True)
def protocol(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A protocol with our own wording; tests may change it before they create items."""
    return use_own_protocol(monkeypatch)


@pytest.fixture
def setup(data_dir: Path) -> Setup:
    return make_setup(data_dir)
