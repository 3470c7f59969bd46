"""The pages about tools and versions agree with the code and the tests."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_sparse_attn.patch.support import MAX_HEAD_DIM
from hf_sparse_attn.rope import SUPPORTED_ROPE_TYPES
from tests.tiny import save_model

ROOT = Path(__file__).parents[2]
TOOLS = (ROOT / "docs/transformers.md").read_text()
COMPATIBILITY = (ROOT / "docs/compatibility.md").read_text()
MODEL_NAME = "Qwen/Qwen2.5-7B-Instruct"


def rows(page):
    """Return the cells of a page's tables by row."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_tool_names_an_existing_test():
    named = [row[3].strip("`") for row in rows(TOOLS) if len(row) == 4 and row[3] != "test"]
    assert len(named) > 20
    for name in named:
        file, function = name.split("::")
        assert re.search(rf"^def {function}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE), name


def test_the_code_of_the_page_runs(tmp_path):
    folder, namespace = save_model(tmp_path, chat=True), {}
    blocks = re.findall(r"^```python\n(.*?)^```", TOOLS, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block.replace(MODEL_NAME, str(folder)), namespace)
    assert namespace["output"].shape[1] > namespace["tokens"].shape[1]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_versions(package):
    name = {"torch": "PyTorch", "transformers": "Transformers"}[package]
    (row,) = [row for row in rows(COMPATIBILITY) if row[0] == name]
    project = (ROOT / "pyproject.toml").read_text()
    (lowest,) = re.findall(rf'^    "{package}>=([\d.]+)', project, re.MULTILINE)
    assert row[1] == lowest
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in "#"]
    pins = [pin for pin in pins if pin.name == package]
    assert any(f"{version.version} on a CPU" in row[2] for pin in pins for version in pin.specifier)


def test_what_is_supported():
    cells = {row[0]: row[1] for row in rows(COMPATIBILITY)}
    assert "[model types](#model-types)" in cells["architectures"]
    assert f"head dimensions up to {MAX_HEAD_DIM}" in cells["heads"]
    scaled = sorted(set(SUPPORTED_ROPE_TYPES) - {"default"})
    assert cells["`default`"] == cells[", ".join(f"`{name}`" for name in scaled)] == "yes"
