"""What MkDocs does beside its plugins: pages whose source is elsewhere, tables and figures made from the results."""

from __future__ import annotations

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

from eval.markdown import results_tables  # noqa: E402

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
"""Pages of the site by the file that they are written in, for readers of the repository."""
MAKERS: dict[str, Callable[..., str]] = {
    "results": lambda: results_tables(ROOT / "eval/results"),
    "performance": lambda: performance.tables(ROOT),
    "accuracy": lambda method: overview.accuracy_table(ROOT, method),
    "times": lambda method: overview.times_table(ROOT, method),
}
"""What stands for a mark ``<!-- generated: NAME ARGUMENTS -->`` on a page."""

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_MARK = re.compile(r"<!-- generated: ([\w ]+) -->")
_DRAWING = re.compile(r'<img alt="([^"]*)" class="drawing" src="[^"]*?(assets/[^"]+\.svg)" ?/?>')
_LONG_NAME = re.compile(r"(<td[^>]*><code>)([^<]{30,})(</code></td>)")
_log = logging.getLogger("mkdocs.hooks")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show fences of formulas, which GitHub shows too."""
    fence = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages written elsewhere, the figures, and the executed notebooks."""
    added: dict[str, str | bytes] = {}
    repo_url = config.repo_url or ""
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            added[page] = translated((ROOT / source).read_text(encoding="utf-8"), source, page, repo_url)
    added |= {f"assets/{name}": picture for name, picture in performance.figures(ROOT).items()}
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        added |= notebook_files(notebook, repo_url)
    for name, content in added.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put tables in place of their marks."""
    return _MARK.sub(lambda found: generated(found[1], page.file.src_uri), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page itself, where they take its colours, and let long names in tables break."""
    html = _LONG_NAME.sub(lambda found: found[1] + re.sub(r"(_|::)", r"\1<wbr>", found[2]) + found[3], html)
    return _DRAWING.sub(lambda found: drawing(Path(config.docs_dir, found[2]), found[1]), html)


def formula(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **more: Any) -> str:
    """Return a fence's LaTeX as SVG, in the text's colour; the signature is that of SuperFences' formatters.

    It looks the same in every browser, and loads nothing from elsewhere.
    """
    svg = ziamath.Latex(source.strip(), size=20, color="currentColor").svg()
    return f'<div class="{css_class}" role="math" aria-label="{escape(" ".join(source.split()))}">{svg}</div>'


def generated(mark: str, page: str) -> str:
    """Return what stands for a mark.

    Raises
    ------
    PluginError
        The mark names nothing that can be made, or what it is made from is missing or damaged.
    """
    name, *arguments = mark.split()
    if name not in MAKERS:
        raise PluginError(f"{page}: {mark!r} cannot be generated; known: {', '.join(MAKERS)}")
    try:
        return MAKERS[name](*arguments)
    except Exception as error:
        raise PluginError(f"{page}: {mark!r} cannot be generated: {error}") from error


def drawing(path: Path, label: str) -> str:
    """Return an SVG file as an element of the page, with a label for those who do not see it."""
    svg = path.read_text(encoding="utf-8").replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f'<div class="scroll">{svg}</div>'


def translated(text: str, source: str, page: str, repo_url: str) -> str:
    """Turn a file's relative links into links between pages, and those to other files into the repository's address.

    Parameters
    ----------
    text
        The file's Markdown.
    source, page
        The file, from the root of the repository, and the page that it becomes.
    repo_url
        The repository's address.

    Raises
    ------
    PluginError
        A link leads to no file.
    """

    def translate(found: re.Match[str]) -> str:
        target, hash_mark, anchor = found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: {found[2]} leads to no file")
        inside = _page_of(path)
        if inside is None:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"[{found[1]}]({repo_url}/{kind}/main/{path}{hash_mark}{anchor})"
        relative = posixpath.relpath(inside, posixpath.dirname(page) or ".")
        return f"[{found[1]}]({relative}{hash_mark}{anchor})"

    return _LINK.sub(translate, text)


def _page_of(path: str) -> str | None:
    """Return the page that a file of the repository becomes, None where it becomes none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return str(Path(path).with_suffix(".md")) if path.endswith(".ipynb") else PAGES.get(path)


def notebook_files(notebook: Path, repo_url: str) -> dict[str, str | bytes]:
    """Return an executed notebook as a page, without what went to stderr, and its pictures, by their paths on the site.

    A notebook that was not executed is shown without outputs, with a warning, which a strict build does not let pass.
    """
    source, executed = notebook.relative_to(ROOT).as_posix(), EXECUTED / notebook.name
    if not executed.exists():
        _log.warning("%s has not been executed: run `make notebooks`", source)
    cells = nbformat.read(executed if executed.exists() else notebook, as_version=4)
    for cell in cells.cells:
        if "outputs" in cell:  # progress bars and warnings are of no use to a reader
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    text, resources = MarkdownExporter().from_notebook_node(cells)
    page = _page_of(source) or source
    text = translated(text.replace("](output_", f"]({notebook.stem}-output_"), source, page, repo_url)
    pictures = {f"notebooks/{notebook.stem}-{name}": data for name, data in (resources.get("outputs") or {}).items()}
    return {page: text, **pictures}
