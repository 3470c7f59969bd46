"""The comparison of a paper's figures with our results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from eval.config import RunConfig
from eval.summary import geometric_mean
from eval.tables import Figure, Paper
from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.terminal import literal

_NOTHING = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Comparison:
    """A paper's figure, and the measurement to compare with it."""

    figure: Figure
    model: str
    """The model that was run here."""
    ours: float | None
    """Measured value in the figure's unit; None if not measured."""
    samples: int = 0
    errors: int = 0
    """Number of failed samples, which are not in ``ours``."""
    length: int | None = None
    """The length that was run here, in tokens."""

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in points of percent or of perplexity; None if not measured."""
        return None if self.ours is None else self.ours - self.figure.value

    @property
    def status(self) -> str:
        """Text shown instead of a missing figure of ours; empty if it exists."""
        if self.ours is not None:
            return ""
        return "not measured" if self.figure.method in METHODS else "not here yet"


def figures_of_run(figures: Iterable[Figure], run: RunConfig) -> list[Figure]:
    """Return the figures of the model and benchmark of one of the file's runs, given without overrides."""
    return [figure for figure in figures if (figure.model, figure.benchmark) == (run.model, run.benchmark)]


def runnable_methods(config_methods: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a file's methods into implemented and missing ones, each in the file's order."""
    runnable = [method for method in config_methods if method in METHODS]
    return runnable, [method for method in config_methods if method not in METHODS]


def length_in_place(printed: RunConfig, run: RunConfig) -> dict[int, int]:
    """Return the length that was run in place of the paper's, if there is one of each and they differ."""
    if len(printed.lengths) == len(run.lengths) == 1 and printed.lengths != run.lengths:
        return {printed.lengths[0]: run.lengths[0]}
    return {}


def compare(
    figures: Iterable[Figure],
    summary_entries: Sequence[Mapping[str, Any]],
    model: str,
    lengths: Mapping[int, int] | None = None,
) -> list[Comparison]:
    """Compare our results with a paper's figures: one comparison for each figure, in order, measured or not.

    Parameters
    ----------
    figures : iterable of Figure
    summary_entries : sequence of dict
        The entries of ``eval.summary.summarise`` for records of ``model``.
    model : str
        The model that was run. If the paper has figures of it, only those are compared. Otherwise it is compared with
        all figures, which ``paper_table`` points out.
    lengths : mapping, optional
        Lengths that were run in place of the paper's, which ``paper_table`` points out too.
    """
    figures = list(figures)
    in_paper = any(figure.model == model for figure in figures)
    return [
        _compare_one(figure, summary_entries if figure.model == model or not in_paper else (), model, lengths or {})
        for figure in figures
    ]


def paper_table(comparisons: Sequence[Comparison], paper: Paper | None = None) -> Table:
    """Format comparisons as a table for the terminal, with ``paper`` as title and its note as caption."""
    title = f"{paper.title} (arXiv {paper.arxiv}), {paper.table}" if paper else None
    note = f"\n{paper.note}" if paper else ""
    caption = f"{_caption(comparisons)}{note}"
    table = Table(
        title=title and literal(title, "table.title"),
        caption=literal(caption, "table.caption"),
        caption_justify="left",
    )
    for header in ("model in the paper", "benchmark", "task", "length", "method", "budget"):
        table.add_column(header, overflow="fold")
    for header in ("paper", "ours", "difference", "samples"):
        table.add_column(header, justify="right")
    group = None
    for comparison in comparisons:
        figure = comparison.figure
        if group not in (None, (figure.model, figure.length)):
            table.add_section()
        group = (figure.model, figure.length)
        difference, samples = comparison.difference, comparison.samples
        table.add_row(
            literal(figure.model.rpartition("/")[2]),
            literal(figure.benchmark),
            literal(figure.task or "mean"),
            f"{figure.length:,}" if figure.length else _NOTHING,
            literal(figure.method),
            f"{figure.token_budget:,}" if figure.token_budget else _NOTHING,
            f"{figure.value:.2f}",
            comparison.status if comparison.ours is None else f"{comparison.ours:.2f}",
            _NOTHING if difference is None else f"{difference:+.2f}",
            f"{samples - comparison.errors:,}" if samples else _NOTHING,
        )
    return table


def _caption(comparisons: Sequence[Comparison]) -> str:
    figures = [comparison.figure for comparison in comparisons]
    if not figures:
        return "There are no figures of a paper to compare with."
    lines = []
    if any(figure.score is not None for figure in figures):
        lines.append("Scores in percent; difference: ours minus the paper's.")
    if any(figure.perplexity is not None for figure in figures):
        lines.append("Perplexity: lower is better.")
    others = sorted({comparison.figure.model for comparison in comparisons if comparison.ours is not None})
    for model in sorted({comparison.model for comparison in comparisons}):
        if different := [other for other in others if other != model]:
            lines.append(f"Another model than the paper's: ours is {model}, the paper's {', '.join(different)}.")
    moved = {(each.figure.length, each.length) for each in comparisons if each.length != each.figure.length}
    for printed, run in sorted(moved, key=str):
        lines.append(f"Another length than the paper's: ours is {run:,} tokens, the paper's {printed:,}.")
    if any(comparison.errors for comparison in comparisons):
        lines.append("Some samples failed; they are excluded from our figures and from the number of samples.")
    if missing := runnable_methods(sorted({figure.method for figure in figures}))[1]:
        lines.append(f"Methods of the paper that are not here yet: {', '.join(missing)}.")
    return "\n".join(lines)


def _compare_one(
    figure: Figure, entries: Sequence[Mapping[str, Any]], model: str, lengths: Mapping[int, int]
) -> Comparison:
    length = None if figure.length is None else lengths.get(figure.length, figure.length)
    wanted = (figure.benchmark, length, figure.method, figure.token_budget)
    tasks = figure.tasks if figure.task is None else (figure.task,)
    matching = [
        entry
        for entry in entries
        if tuple(entry[name] for name in ("benchmark", "length", "method", "token_budget")) == wanted
        and (not tasks or entry["task"] in tasks)
    ]
    kind = "perplexity" if figure.score is None else "score"
    values = [entry[kind] for entry in matching]
    complete = set(tasks) <= {entry["task"] for entry in matching}
    # A mean over only some of the tasks is not comparable with the paper's.
    if not values or not complete or None in values:
        return Comparison(figure, model, ours=None, length=length)
    return Comparison(
        figure,
        model,
        ours=geometric_mean(values) if kind == "perplexity" else 100 * fmean(values),
        samples=sum(entry["samples"] for entry in matching),
        errors=sum(entry["errors"] for entry in matching),
        length=length,
    )
