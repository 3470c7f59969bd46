"""The pages about tools and versions agree with the code and the tests."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement

from hf_sparse_attn.patch.support import MAX_HEAD_DIM
from hf_sparse_attn.rope import SUPPORTED_ROPE_TYPES
from tests import versions
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
    (row,) = [row for row in rows(COMPATIBILITY) if row[0] == versions.PACKAGES[package]]
    project = (ROOT / "pyproject.toml").read_text()
    (lowest,) = re.findall(rf'^    "{package}>=([\d.]+)', project, re.MULTILINE)
    assert row[1] == lowest
    tested = [row[package] for row in json.loads(versions.RESULTS.read_text()) if not row["failed"]]
    assert f"{lowest}.0" in tested
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in "#"]
    pinned = {version.version for pin in pins if pin.name == package for version in pin.specifier}
    assert pinned & set(tested)


def a_row(**changes):
    same = {"python": "3.11.7", "torch": "2.8.0", "transformers": "5.16.0", "triton": "3.4.0", "device": "CPU"}
    return {**same, "tests": "all", "passed": 9, "failed": 0, "skipped": 2, "date": "2026-11-23", **changes}


def test_a_run_replaces_the_row_of_its_versions():
    newer = a_row(transformers="5.9.1")
    assert versions.with_row([a_row(), newer], a_row(passed=7)) == [newer, a_row(passed=7)]


def test_rows_become_a_table(tmp_path):
    path = tmp_path / "versions.json"
    path.write_text(json.dumps([a_row(), a_row(tests="quest", failed=1)]))
    assert versions.table(path).splitlines()[2:] == [
        "| 3.11.7 | 2.8.0 | 5.16.0 | 3.4.0 | CPU | all | 9 | 0 | 2026-11-23 |",
        '| 3.11.7 | 2.8.0 | 5.16.0 | 3.4.0 | CPU | `-k "quest"` | 9 | 1 | 2026-11-23 |',
    ]


def test_errors_of_a_report_count_as_failed():
    report = '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"></testsuite></testsuites>'
    assert versions.counts(report) == {"passed": 3, "failed": 3, "skipped": 3}


def test_installed_versions_are_those_of_the_packages():
    found = versions.installed()
    assert torch.__version__.startswith(found["torch"])
    assert transformers.__version__ == found["transformers"]


def test_what_is_supported():
    cells = {row[0]: row[1] for row in rows(COMPATIBILITY)}
    assert "[model types](#model-types)" in cells["architectures"]
    assert f"head dimensions up to {MAX_HEAD_DIM}" in cells["heads"]
    scaled = sorted(set(SUPPORTED_ROPE_TYPES) - {"default"})
    assert cells["`default`"] == cells[", ".join(f"`{name}`" for name in scaled)] == "yes"
