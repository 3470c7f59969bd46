"""The pages' code runs, and their line lengths and navigation are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from hf_sparse_attn import METHODS, SparseCache, patch_model
from hf_sparse_attn.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MODEL_NAME = "Qwen/Qwen2.5-7B-Instruct"
PAGES = ("index", "getting-started", "compiled-decoding", *(f"methods/{name}" for name in METHODS))


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"SparseCache": SparseCache, "patch_model": patch_model}
    code = blocks(page, "python")
    assert code
    if MODEL_NAME not in code[0]:  # a page that continues "getting started"
        code = [blocks("index", "python")[0], *code]
    for block in code:
        exec(block.replace(MODEL_NAME, str(folder)).replace("max_new_tokens=200", "max_new_tokens=2"), names)


def test_every_method_has_a_page_in_the_navigation_and_in_the_table() -> None:
    navigation, table = (ROOT / "mkdocs.yml").read_text(), (DOCS / "methods/index.md").read_text()
    for name, method in METHODS.items():
        page = (DOCS / f"methods/{name}.md").read_text(encoding="utf-8")
        assert f"methods/{name}.md" in navigation
        assert f"]({name}.md)" in table
        assert f"::: hf_sparse_attn.{method.__name__}\n" in page
        assert method.paper.removeprefix("arXiv ") in page or name == "full"


def test_commands_have_the_options_that_are_shown() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    shown = [line.split() for line in blocks("getting-started", "sh")[1].splitlines()]
    assert {words[1] for words in shown} <= set(commands)
    for _, name, *options in shown:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {option for option in options if option.startswith("--")} <= known


def test_nothing_is_loaded_from_elsewhere_by_the_theme() -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    theme = yaml.safe_load(text)["theme"]
    assert theme["font"] is False


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_lines_are_no_longer_than_those_of_the_sources(page: Path) -> None:
    text = re.sub(r"^```text\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "!["))] == []
