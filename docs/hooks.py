"""MkDocs hooks: pages from files elsewhere in the repository, and tables and figures generated from the results."""

from __future__ import annotations

import json
import logging
import posixpath
import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import nbformat
import ziamath
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels/benchmarks")]

from op_bench import overview, performance  # noqa: E402

from eval.claims import claims_rows  # noqa: E402
from eval.frontier_page import frontier_figures  # noqa: E402
from eval.markdown import (  # noqa: E402
    frontier_tables,
    host_tables,
    lossless_tables,
    position_tables,
    results_tables,
    storage_table,
)
from tests import versions  # noqa: E402
from tests.reliability import tables as reliability  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "build/notebooks"
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "eval/README.md": "evaluation/index.md",
    "kernels/README.md": "kernels.md",
    "notebooks/README.md": "notebooks/index.md",
    **{f"eval/docs/{path.name}": f"evaluation/{path.name}" for path in (ROOT / "eval/docs").glob("*.md")},
}
"""Pages of the site, by their source file in the repository."""
MAKERS: dict[str, Callable[..., str]] = {
    "results": lambda: results_tables(ROOT / "eval/results"),
    "performance": lambda: performance.tables(ROOT),
    "claims": lambda: claims_table(),
    "frontier": lambda sweep: frontier_tables(ROOT / "eval/results", sweep),
    "positions": lambda sweep: position_tables(ROOT / "eval/results", sweep),
    "lossless": lambda: lossless_tables(ROOT / "eval/results"),
    "host": lambda: host_tables(ROOT / "eval/results"),
    "storages": lambda: storage_table(ROOT / "eval/results"),
    "versions": lambda: versions.table(),
    "accuracy": lambda method: overview.accuracy_table(ROOT, method),
    "times": lambda method: overview.times_table(ROOT, method),
    "faults": reliability.fault_table,
    "soak": reliability.soak_table,
    "sanitizer": reliability.sanitizer_table,
    "families": lambda kind: family_tables(json.loads((ROOT / "docs/families.json").read_text()))[kind],
    "real-weights": lambda: real_weights_table(json.loads((ROOT / "docs/real_weights.json").read_text())),
}
"""Generators of the tables that replace marks ``<!-- generated: NAME ARGUMENTS -->`` on a page."""

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_MARK = re.compile(r"<!-- generated: ([\w .-]+) -->")
_DRAWING = re.compile(r'<img alt="([^"]*)" class="drawing" src="[^"]*?(assets/[^"]+\.svg)" ?/?>')
_LONG_NAME = re.compile(r"(<td[^>]*><code>)([^<]{30,})(</code></td>)")
_log = logging.getLogger("mkdocs.hooks")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Render ``math`` fences, which GitHub renders too."""
    fence = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from elsewhere in the repository, figures, and executed notebooks."""
    added: dict[str, str | bytes] = {}
    repo_url = config.repo_url or ""
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            added[page] = translated((ROOT / source).read_text(encoding="utf-8"), source, page, repo_url)
    figures = performance.figures(ROOT) | frontier_figures(ROOT / "eval/results")
    added |= {f"assets/{name}": picture for name, picture in figures.items()}
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        added |= notebook_files(notebook, repo_url)
    for name, content in added.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace marks with their tables."""
    return _MARK.sub(lambda found: generated(found[1], page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inline drawings, which then follow the page's colours, and let long names in tables wrap."""
    html = _LONG_NAME.sub(lambda found: found[1] + re.sub(r"(_|::)", r"\1<wbr>", found[2]) + found[3], html)
    return _DRAWING.sub(lambda found: drawing(Path(config.docs_dir, found[2]), found[1]), html)


def formula(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **more: Any) -> str:
    """Return a fence's LaTeX as SVG in the text's colour, with the signature of SuperFences' formatters.

    SVG looks the same in every browser and loads nothing from elsewhere.
    """
    svg = ziamath.Latex(source.strip(), size=20, color="currentColor").svg()
    return f'<div class="{css_class}" role="math" aria-label="{escape(" ".join(source.split()))}">{svg}</div>'


def generated(mark: str, page: str) -> str:
    """Return the table for a mark.

    Raises
    ------
    PluginError
        The mark's name is unknown, or its data is missing or damaged.
    """
    name, *arguments = mark.split()
    if name not in MAKERS:
        raise PluginError(f"{page}: {mark!r} cannot be generated; known: {', '.join(MAKERS)}")
    try:
        made = MAKERS[name](*arguments)
        return made.replace("](assets/", f"]({posixpath.relpath('assets', posixpath.dirname(page) or '.')}/")
    except Exception as error:
        raise PluginError(f"{page}: {mark!r} cannot be generated: {error}") from error


def claims_table() -> str:
    """Return the table of the papers' claims."""
    head = ("paper", "claim", "here", "holds")
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *claims_rows(ROOT)))


def family_tables(results: dict[str, dict[str, dict[str, str]]]) -> dict[str, str]:
    """Return the tables of supported and refused model types, from the results of ``python -m tests.families``."""
    supported: dict[tuple[str, ...], list[str]] = {}
    for model_type, found in results["supported"].items():
        answers = (found[name] for name in ("oracle_topk", "quest", "keycodes", "tokenselect", "infinigen"))
        *others, rotating, rehearsing = ("yes" if answer == "equal" else answer for answer in answers)
        supported.setdefault(("yes" if set(others) == {"yes"} else "no", rotating, rehearsing), []).append(model_type)
    refused: dict[tuple[str, ...], list[str]] = {}
    for model_type, found in results["refused"].items():
        refused.setdefault((found["reason"],), []).append(model_type)

    def table(columns: list[str], rows: dict[tuple[str, ...], list[str]]) -> str:
        lines = [["model types", *columns], ["---"] * (1 + len(columns))]
        by_size = sorted(rows.items(), key=lambda row: -len(row[1]))
        lines += [[", ".join(f"`{name}`" for name in names), *cells] for cells, names in by_size]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    multimodal: dict[tuple[str, ...], list[str]] = {}
    for model_type, found in results["multimodal"].items():
        answers = ["yes" if found[name] == "equal" else found[name] for name in ("quest", "keycodes", "tokenselect")]
        compiled = "yes" if found["compiled"] == "equal" else found["compiled"]
        row = (f"`{found['text_decoder']}`", "yes" if set(answers[:2]) == {"yes"} else "no", answers[2], compiled)
        multimodal.setdefault(row, []).append(model_type)
    multimodal_refused: dict[tuple[str, ...], list[str]] = {}
    for model_type, found in results["multimodal_refused"].items():
        reason = re.sub(r"^its text decoder is of type '\S+': ", "of its text decoder: ", found["reason"])
        multimodal_refused.setdefault((reason,), []).append(model_type)
    return {
        "supported": table(["most methods", "TokenSelect, InfLLM, SelfExtend", "InfiniGen"], supported),
        "refused": table(["reason"], refused),
        "multimodal": table(
            ["text decoder", "most methods", "TokenSelect, InfLLM, SelfExtend", "compiled steps"], multimodal
        ),
        "multimodal-refused": table(["reason"], multimodal_refused),
    }


def real_weights_table(results: dict[str, dict[str, Any]]) -> str:
    """Return the table of published weights, from the results of ``python -m tests.real_weights``."""
    checks = ("oracle_topk", "quest", "keycodes", "tokenselect")
    lines = [["weights", "model type", "layers", "with a sliding window", *(f"`{name}`" for name in checks)]]
    lines.append(["---"] * len(lines[0]))
    for title, found in results.items():
        answers = ("refused" if found[name].startswith("refused") else found[name] for name in checks)
        sizes = (str(found["layers"]), str(found["sliding_window_layers"]))
        lines.append([title.removesuffix(".gguf"), f"`{found['model_type']}`", *sizes, *answers])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drawing(path: Path, label: str) -> str:
    """Return an SVG file as an inline element with a label for screen readers."""
    svg = path.read_text(encoding="utf-8").replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f'<div class="scroll">{svg}</div>'


def translated(text: str, source: str, page: str, repo_url: str) -> str:
    """Turn a file's relative links into links to pages of the site, or to the repository for other files.

    Parameters
    ----------
    text
        The file's Markdown.
    source, page
        The file's path in the repository and its page on the site.
    repo_url
        Address of the repository.

    Raises
    ------
    PluginError
        The target of a link does not exist.
    """

    def translate(found: re.Match[str]) -> str:
        target, hash_mark, anchor = found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: the link target {found[2]} does not exist")
        inside = _page_of(path)
        if inside is None:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"[{found[1]}]({repo_url}/{kind}/main/{path}{hash_mark}{anchor})"
        relative = posixpath.relpath(inside, posixpath.dirname(page) or ".")
        return f"[{found[1]}]({relative}{hash_mark}{anchor})"

    return _LINK.sub(translate, text)


def _page_of(path: str) -> str | None:
    """Return the page of a file in the repository, None if it has none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return str(Path(path).with_suffix(".md")) if path.endswith(".ipynb") else PAGES.get(path)


def notebook_files(notebook: Path, repo_url: str) -> dict[str, str | bytes]:
    """Return an executed notebook as a page without its stderr, and its pictures, by their paths on the site.

    A notebook that was not executed is shown without outputs and logs a warning, which fails a strict build.
    """
    source, executed = notebook.relative_to(ROOT).as_posix(), EXECUTED / notebook.name
    if not executed.exists():
        _log.warning("%s has not been executed: run `make notebooks`", source)
    cells = nbformat.read(executed if executed.exists() else notebook, as_version=4)
    for cell in cells.cells:
        if "outputs" in cell:  # progress bars and warnings do not help readers
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    text, resources = MarkdownExporter().from_notebook_node(cells)
    page = _page_of(source) or source
    text = translated(text.replace("](output_", f"]({notebook.stem}-output_"), source, page, repo_url)
    pictures = {f"notebooks/{notebook.stem}-{name}": data for name, data in (resources.get("outputs") or {}).items()}
    return {page: text, **pictures}
