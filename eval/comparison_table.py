"""The comparison of a paper's figures with our results, as a table for the terminal, as JSON, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from eval.comparison import Comparison
from eval.tables import Paper
from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.terminal import literal

_NOTHING = "–"  # noqa: RUF001
_WORDS = ("model in the paper", "benchmark", "task", "length", "method", "budget")
_NUMBERS = ("paper", "ours", "difference", "samples")
_WHY = "why"


def paper_table(comparisons: Sequence[Comparison], paper: Paper | None = None, device: str = "") -> Table:
    """Format comparisons as a table for the terminal, with ``paper`` as title and its note as caption.

    ``device`` is the one that ours ran on, which is named below times.
    """
    table = Table(
        title=literal(_title(paper), "table.title") if paper else None,
        caption=literal("\n".join(_notes(comparisons, paper, device)), "table.caption"),
        caption_justify="left",
    )
    head = _head(comparisons)
    for name in head:
        if name in _NUMBERS:
            table.add_column(name, justify="right")
        else:
            table.add_column(name, overflow="fold", ratio=1 if name == _WHY else None)
    group = None
    for comparison in comparisons:
        figure = comparison.figure
        if group not in (None, (figure.model, figure.length)):
            table.add_section()
        group = (figure.model, figure.length)
        table.add_row(*map(literal, _cells(comparison)[: len(head)]))
    return table


def table_report(
    comparisons: Sequence[Comparison], name: str, paper: Paper, command: str, device: str
) -> dict[str, Any]:
    """Return a table as JSON values: its name and title, the command and device, and head, rows and notes as shown."""
    head = _head(comparisons)
    return {
        "name": name,
        "title": _title(paper),
        "command": command,
        "device": device,
        "head": list(head),
        "rows": [_cells(comparison)[: len(head)] for comparison in comparisons],
        "notes": list(_notes(comparisons, paper, device)),
    }


def report_markdown(
    report: Mapping[str, Any], table: Callable[[Sequence[str], Sequence[Sequence[str]], int], str]
) -> str:
    """Return the report of a table as Markdown; ``table`` formats head and rows, the first columns left-aligned."""
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in report["rows"]]
    lines = [
        f"## {report['title']}\n",
        f"`{report['command']}`, on {report['device']}\n",
        table(report["head"], rows, len(_WORDS)),
        *(f"{note}\n" for note in report["notes"]),
    ]
    return "\n".join(lines)


def _title(paper: Paper) -> str:
    return f"{paper.title} (arXiv {paper.arxiv}), {paper.table}"


def _notes(comparisons: Sequence[Comparison], paper: Paper | None, device: str) -> list[str]:
    own = [paper.missing or "", paper.note] if paper else []
    return [note for note in (*_caption(comparisons, device), *own) if note]


def _head(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    explains = any(comparison.why for comparison in comparisons)
    return (*_WORDS, *_NUMBERS, *((_WHY,) if explains else ()))


def _cells(comparison: Comparison) -> list[str]:
    figure, difference, samples = comparison.figure, comparison.difference, comparison.samples
    places = 3 if figure.shows_seconds else 2
    return [
        figure.model.rpartition("/")[2],
        figure.benchmark,
        figure.task or (figure.tasks[0] if len(figure.tasks) == 1 else "mean"),
        _length(comparison),
        f"{figure.method} {figure.variant}".strip(),
        f"{figure.token_budget:,}" if figure.token_budget else _NOTHING,
        _NOTHING if figure.value is None else f"{figure.value:.{places}f}",
        comparison.status if comparison.ours is None else f"{comparison.ours:.{places}f}",
        _NOTHING if difference is None else f"{difference:+.{places}f}",
        f"{samples - comparison.errors:,}" if samples else _NOTHING,
        comparison.why,
    ]


def _length(comparison: Comparison) -> str:
    figure = comparison.figure
    if figure.length is None:
        return "mean" if len(figure.lengths) > 1 else _NOTHING
    return f"{figure.length:,}"


def _caption(comparisons: Sequence[Comparison], device: str) -> Iterator[str]:
    figures = [comparison.figure for comparison in comparisons]
    if not any(figure.value is not None for figure in figures):
        yield "There are no figures of the paper to compare with; scores in percent."
    if any(figure.score is not None for figure in figures):
        yield "Scores in percent; difference: ours minus the paper's."
    if any(figure.perplexity is not None for figure in figures):
        yield "Perplexity: lower is better."
    if any(figure.seconds is not None for figure in figures):
        yield f"Seconds to the first token, the median of the samples; ours on {device or 'another device'}."
    yield from _differences(comparisons)
    if any(comparison.errors for comparison in comparisons):
        yield "Some samples failed; they are excluded from our figures and from the number of samples."
    if missing := sorted({figure.method for figure in figures} - set(METHODS)):
        yield f"Methods of the paper that are not here yet: {', '.join(missing)}."


def _differences(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line for each way in which ours is not what the paper ran."""
    measured = [comparison for comparison in comparisons if comparison.ours is not None]
    others = sorted({comparison.figure.model for comparison in measured})
    for model in sorted({comparison.model for comparison in comparisons}):
        if different := [other for other in others if other != model]:
            yield f"Another model than the paper's: ours is {model}, the paper's {', '.join(different)}."
    moved: dict[tuple[str, str], None] = {}
    budgets: dict[tuple[str, int, int], None] = {}
    for each in measured:
        figure = each.figure
        printed = (figure.length,) if figure.length is not None else figure.lengths or (None,)
        if figure.value is not None and each.lengths != printed:
            moved[_numbers(each.lengths), _numbers(printed)] = None
        own = each.row[1] if each.row else None
        if figure.token_budget and own and own != figure.token_budget:
            budgets[figure.method, own, figure.token_budget] = None
    for ours, paper in moved:
        yield f"Another length than the paper's: ours is {ours}, the paper's {paper}."
    for method, here, there in budgets:
        yield f"Another budget than the paper's: {method} has {here:,} tokens here, and {there:,} there."


def _numbers(lengths: Sequence[int | None]) -> str:
    if lengths == (None,):
        return "each sample's own"
    return f"{', '.join(f'{length:,}' for length in lengths)} tokens"
