"""Hooks of the site: pages from elsewhere, tables, drawings, formulas, notebooks and docstrings."""

import importlib.util
import json
import logging
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import griffe
import nbformat.v4 as notebooks
import pytest
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[2]
REPO = "https://example.org/project"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load("hooks")


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("docs/passkey.md", "passkey.md"),
        ("../docs/results.md", "../results.md"),
        ("../kernels/README.md#layout", "../kernels.md#layout"),
        ("../README.md", f"{REPO}/blob/main/README.md"),
        ("configs", f"{REPO}/tree/main/eval/configs"),
        ("configs/smoke.yaml", f"{REPO}/blob/main/eval/configs/smoke.yaml"),
        ("#speed", "#speed"),
        ("https://arxiv.org/abs/2406.10774", "https://arxiv.org/abs/2406.10774"),
    ],
)
def test_links_of_a_file_lead_to_pages_or_to_the_repository(link: str, becomes: str) -> None:
    text = hooks.translated(f"See [this]({link}).", "eval/README.md", "evaluation/index.md", REPO)
    assert text == f"See [this]({becomes})."


def test_a_broken_link_is_an_error_that_names_source_and_target() -> None:
    with pytest.raises(PluginError, match=r"CONTRIBUTING\.md: the link target no/file\.md does not exist"):
        hooks.translated("[this](no/file.md)", "CONTRIBUTING.md", "contributing.md", REPO)


def test_every_mark_of_a_page_can_be_generated() -> None:
    marks = {
        mark
        for page in (ROOT / "docs").rglob("*.md")
        for mark in re.findall(r"<!-- generated: (.+) -->", page.read_text(encoding="utf-8"))
    }
    assert {mark.split()[0] for mark in marks} == set(hooks.MAKERS)
    for mark in marks:
        text = hooks.generated(mark, "page.md")
        assert "| --- |" in text or "| ---: |" in text or text.startswith("No measurements of `")
        assert str(ROOT) not in text


def test_tables_replace_their_marks() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="methods/quest.md"))
    text = hooks.on_page_markdown("Before.\n\n<!-- generated: accuracy Quest -->\n\nAfter.", page, None, None)
    assert text.startswith("Before.\n\n| token_budget | KV read, % | score, % |")
    assert text.endswith("After.")


def test_measurements_of_lossless_decoding_are_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    nothing = hooks.generated("lossless", "lossless.md")
    assert nothing == "No measurements of `python -m eval lossless` are in this checkout.\n"
    settings = {"model": "a/b.gguf", "shape": None, "contexts": [4000], "method": ["quest"], "token_budget": [512]}
    settings |= {"draft_tokens": [8], "parameters": {}, "new_tokens": 64, "prompts": 1, "repeats": 3}
    settings |= {"data_dir": "books", "dtype": "bfloat16"}
    side = {"name": "quest, 512, draft 8", "compiled": True, "draft_tokens": 8, "error": None, "speed_up": 1.25}
    times = {"median": 4.0, "q1": 3.9, "q3": 4.2}
    side |= {"ms_per_token": times, "round_ms": times, "acceptance_rate": 0.5, "tokens_per_pass": 5.0}
    side |= {"draft_step_ms": {"median": 1.5}, "verification_ms": {"median": 8.0}, "break_even_tokens": 3.2}
    side |= {"kv_fraction": 0.125, "tokens": [{"compared": 64, "in_common": 40, "is_tie": True}]}
    results = [{"context": 4000, "error": None, "sides": [side]}, {"context": 8000, "error": "out of memory"}]
    results[1]["sides"] = []
    machine = {"device": "A GPU", "versions": {"torch": "2.11"}, "date": "2026-11-23T00:00:00"}
    (tmp_path / "eval/results/lossless").mkdir(parents=True)
    (tmp_path / "eval/results/lossless/b-gpu.json").write_text(
        json.dumps({"machine": machine, "settings": settings, "prompts": "books", "results": results})
    )
    text = hooks.generated("lossless", "lossless.md")
    assert "### b-gpu, bfloat16, A GPU" in text
    assert (
        "| 4,000 | quest, 512, draft 8, compiled | 4.00 (3.90 to 4.20) | 1.25 | 50.0 | 5.00 | 1.50 | 8.00 | 3.20 "
        "| 12.5 | 40 of 64 (1 tie) |"
    ) in text
    assert "| 8,000 | out of memory | - |" in text


@pytest.mark.parametrize(("page", "expected"), [("results.md", "assets/a.svg"), ("methods/a.md", "../assets/a.svg")])
def test_figures_of_a_mark_are_found_from_any_page(page: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.MAKERS, "frontier", lambda sweep: f"![{sweep}](assets/a.svg)")
    assert hooks.generated("frontier results-keycodes-bytes", page) == f"![results-keycodes-bytes]({expected})"


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("tables", r"quest\.md: 'tables' cannot be generated; known: results, performance"),
        ("accuracy Nothing", r"quest\.md: 'accuracy Nothing' cannot be generated: 'Nothing'"),
    ],
)
def test_a_mark_that_cannot_be_generated_is_an_error(mark: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        hooks.generated(mark, "methods/quest.md")


def test_drawings_become_part_of_the_page() -> None:
    page = '<p><img alt="A step." class="drawing" src="../assets/decode-step.svg" /></p>'
    html = hooks.on_page_content(page, None, SimpleNamespace(docs_dir=ROOT / "docs"), None)
    assert html.startswith('<p><div class="scroll"><svg role="img" aria-label="A step." xmlns=')
    assert html.count("<svg") == html.count("</svg>") == 1


def test_long_names_in_tables_may_break_after_underscores() -> None:
    long, short = "test_generation.py::test_a_way_to_generate", "test_pipeline"
    page = f"<td><code>{long}</code></td><td><code>{short}</code></td><p><code>{long}</code></p>"
    html = hooks.on_page_content(page, None, SimpleNamespace(docs_dir=ROOT / "docs"), None)
    first, second, third = html.split("</code>")[:3]
    assert first == "<td><code>test_<wbr>generation.py::<wbr>test_<wbr>a_<wbr>way_<wbr>to_<wbr>generate"
    assert "<wbr>" not in second + third


def test_formulas_are_drawn_in_the_text_colour() -> None:
    html = hooks.formula(r"\sum_i \max\left(a_i, b\right) < 1", "math", "math", {}, None)
    assert '<div class="math" role="math" aria-label="\\sum_i \\max\\left(a_i, b\\right) &lt; 1"><svg' in html
    assert "currentColor" in html


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import nbformat

    outputs = [
        notebooks.new_output("stream", name="stdout", text="printed"),
        notebooks.new_output("stream", name="stderr", text="a warning"),
        notebooks.new_output("display_data", {"image/png": PIXEL}),
    ]
    cells = [notebooks.new_markdown_cell("# Title\n\n[Quest](other.ipynb)"), notebooks.new_code_cell("1 + 1")]
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.setattr(hooks, "EXECUTED", tmp_path / "build/notebooks")
    for folder in ("notebooks", "build/notebooks"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("one", "other"):
        nbformat.write(notebooks.new_notebook(cells=cells), tmp_path / f"notebooks/{name}.ipynb")
    cells[1].outputs = outputs
    nbformat.write(notebooks.new_notebook(cells=cells), tmp_path / "build/notebooks/one.ipynb")
    return tmp_path / "notebooks/one.ipynb"


def test_an_executed_notebook_is_a_page_with_its_pictures(notebook: Path) -> None:
    files = hooks.notebook_files(notebook, REPO)
    page = files.pop("notebooks/one.md")
    ((picture, data),) = files.items()
    assert data.startswith(b"\x89PNG")
    assert f"]({picture.removeprefix('notebooks/')})" in page
    assert "[Quest](other.md)" in page
    assert "printed" in page
    assert "a warning" not in page


def test_a_notebook_without_outputs_logs_a_warning(notebook: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        files = hooks.notebook_files(notebook.with_name("other.ipynb"), REPO)
    assert list(files) == ["notebooks/other.md"]
    assert "notebooks/other.ipynb has not been executed: run `make notebooks`" in caplog.text


def test_roles_of_docstrings_become_references() -> None:
    module = griffe.visit(
        "module",
        filepath=Path("module.py"),
        code='''
class Method:
    """See :class:`Method`, :meth:`~hf_sparse_attn.methods.base.SparseMethod.select` and :func:`nothing`."""

    def select(self):
        """As :meth:`other`, or `code`."""

    def other(self): ...
''',
    )
    load("docstring_roles").DocstringRoles().on_package(pkg=module)
    method = module["Method"]
    assert method.docstring.value == (
        'See <autoref identifier="module.Method" optional><code>Method</code></autoref>, '
        '<autoref identifier="hf_sparse_attn.methods.base.SparseMethod.select" optional><code>select</code></autoref> '
        "and `nothing`."
    )
    assert method["select"].docstring.value == (
        'As <autoref identifier="module.Method.other" optional><code>other</code></autoref>, or `code`.'
    )
