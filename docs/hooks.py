"""What MkDocs does beside its plugins: pages whose source is elsewhere, tables and figures made from the results."""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels/benchmarks")]

from op_bench import overview, performance  # noqa: E402

from eval.markdown import results_tables  # noqa: E402

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "eval/README.md": "evaluation/index.md",
    "kernels/README.md": "kernels.md",
    **{f"eval/docs/{path.name}": f"evaluation/{path.name}" for path in (ROOT / "eval/docs").glob("*.md")},
}
"""Pages of the site by the file that they are written in, for readers of the repository."""
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "build/notebooks"

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_MARK = re.compile(r"<!-- generated: ([\w ]+) -->")
_DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)\{ \.drawing \}$", re.MULTILINE)
_log = logging.getLogger("mkdocs.hooks")

Maker = Callable[..., str]
MAKERS: dict[str, Maker] = {
    "results": lambda: results_tables(ROOT / "eval/results"),
    "performance": lambda: performance.tables(ROOT),
    "accuracy": lambda method: overview.accuracy_table(ROOT, method),
    "times": lambda method: overview.times_table(ROOT, method),
}
"""What stands for a mark ``<!-- generated: NAME ARGUMENTS -->`` on a page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages written elsewhere, the figures, and the executed notebooks."""
    for source, page in PAGES.items():
        if page not in files.src_uris and (ROOT / source).exists():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=translated(text, source, page, config.repo_url)))
    for name, picture in performance.figures(ROOT).items():
        files.append(File.generated(config, f"assets/{name}", content=picture))
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        for name, content in notebook_files(notebook).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put tables in place of their marks, and drawings into the page, where they take its colours."""
    folder = Path(config.docs_dir, page.file.src_uri).parent
    markdown = _DRAWING.sub(lambda found: drawing(folder / found[2], found[1]), markdown)
    return _MARK.sub(lambda found: generated(found[1], page.file.src_uri), markdown)


def generated(mark: str, page: str) -> str:
    """Return what stands for a mark.

    Raises
    ------
    PluginError
        The mark names nothing that can be made, or what it is made from is missing.
    """
    name, *arguments = mark.split()
    try:
        return MAKERS[name](*arguments)
    except Exception as error:
        raise PluginError(f"{page}: cannot make {mark!r}: {error!r}") from error


def drawing(path: Path, label: str) -> str:
    """Return an SVG file as an element of the page, with a label for those who do not see it."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines[0] = lines[0].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return "\n".join(lines)


def translated(text: str, source: str, page: str, repo_url: str | None) -> str:
    """Turn a file's relative links into links between pages; to other files of the repository where it has an address.

    Parameters
    ----------
    text
        The file's Markdown.
    source, page
        The file, from the root of the repository, and the page that it becomes.
    repo_url
        The repository's address; without one, links to files that are no pages are left out, and their text stays.
    """
    here = posixpath.dirname(source)

    def translate(found: re.Match[str]) -> str:
        target, hash_mark, anchor = found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(here, target))
        inside = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside:
            return f"[{found[1]}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{hash_mark}{anchor})"
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: {found[2]} leads nowhere")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{found[1]}]({repo_url}/{kind}/main/{path})" if repo_url else found[1]

    return _LINK.sub(translate, text)


def notebook_files(notebook: Path) -> dict[str, str | bytes]:
    """Return an executed notebook as Markdown, with its pictures, by file name.

    A notebook that was not executed is shown without outputs, with a warning, which a strict build does not let pass.
    """
    from nbconvert import MarkdownExporter

    executed = EXECUTED / notebook.name
    if not executed.exists():
        _log.warning("%s has not been executed: run `make notebooks`", notebook.relative_to(ROOT))
    exporter: Any = MarkdownExporter()
    text, resources = exporter.from_filename(str(executed if executed.exists() else notebook))
    files: dict[str, str | bytes] = {f"{notebook.stem}.md": text}
    for name, content in (resources.get("outputs") or {}).items():
        files[f"{notebook.stem}-{name}"] = content
        files[f"{notebook.stem}.md"] = text = text.replace(f"]({name})", f"]({notebook.stem}-{name})")
    return files
