"""A self-contained HTML page about a comparison."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from hf_sparse_attn.cli.terminal import visible

if TYPE_CHECKING:
    from hf_sparse_attn.cli.report import Comparison, Row

_STYLE = """
body { margin: 2rem auto; max-width: 1160px; padding: 0 1rem; color: #1d1f22; background: #fff;
  font: 16px/1.5 system-ui, "Liberation Sans", Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #d9d9d9; text-align: left; vertical-align: top; }
th { font-weight: 400; } thead th { font-weight: 600; border-bottom-color: #8a8f96; }
tbody + tbody { border-top: 2px solid #8a8f96; }
td { white-space: pre-wrap; }
.found { color: #1a7f37; } .missed { color: #b3261e; }
.note { color: #5a5f66; font-size: .88rem; }
img { max-width: 100%; height: auto; }
"""


def make_page(comparison: Comparison, picture: bytes, caption: str) -> str:
    """Return a page with a comparison's table and a picture; it loads nothing from elsewhere.

    Parameters
    ----------
    comparison : Comparison
        The table. Answers and names are escaped.
    picture : bytes
        A PNG file.
    caption : str
        The picture's caption.
    """
    title = _text(comparison.title)
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in ("", *comparison.columns))
    notes = "".join(f'<p class="note">{_text(line)}</p>\n' for line in comparison.settings)
    image = base64.b64encode(picture).decode("ascii")
    caption = _text(caption)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<div class="scroll"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{_lines(comparison.answers())}
</tbody>
<tbody>
{_lines(comparison.measurements())}
</tbody>
</table></div>
{notes}<h2>Tokens read</h2>
<p>{caption}</p>
<img src="data:image/png;base64,{image}" alt="{caption}">
</body>
</html>
"""


def _lines(rows: Iterable[Row]) -> str:
    return "\n".join(f'<tr><th scope="row">{_text(row.label)}</th>{_cells(row)}</tr>' for row in rows)


def _cells(row: Row) -> str:
    found: Sequence[bool | None] = row.found or [None] * len(row.cells)
    return "".join(f"<td>{_text(cell)}{_judged(judged)}</td>" for cell, judged in zip(row.cells, found, strict=True))


def _judged(found: bool | None) -> str:
    if found is None:
        return ""
    word = "found" if found else "missed"
    return f' <span class="{word}">{word}</span>'


def _text(text: str) -> str:
    return escape(visible(text))
