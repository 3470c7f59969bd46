"""A plugin of pytest: one part of a file's tests, for tools under which a whole file takes too long."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--part``."""
    parser.addoption("--part", default="1/1", help="Run every n-th test only, beginning with the k-th: k/n.")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part, after those of ``-m`` and ``-k`` have been chosen."""
    part, parts = map(int, config.getoption("part").split("/"))
    kept = items[part - 1 :: parts]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
