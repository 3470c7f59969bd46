"""Tables of the papers: their runs and figures, and the comparison with our results."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from eval.config import RunConfig, read_sweep, read_yaml
from eval.errors import EvalError
from eval.summary import geometric_mean
from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.terminal import literal

CONFIGS = Path(__file__).parent / "configs"

_ARXIV = re.compile(r"\d{4}\.\d{5}")
_NOTHING = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Paper:
    """The publication of a table."""

    title: str
    arxiv: str
    """Number on arXiv, such as ``2406.10774``."""
    table: str
    """Table or figure of the paper."""
    note: str
    """Source of the figures, or the reason for their absence, and differences from the paper's setting."""


@dataclass(frozen=True)
class Figure:
    """One figure printed in the paper: either a ``score`` or a ``perplexity``."""

    benchmark: str
    method: str
    """This package's name of the method, which need not be in ``METHODS``; ``full`` for dense attention."""
    model: str
    task: str | None = None
    """None for the mean over ``tasks``."""
    length: int | None = None
    """In tokens; None if each sample has its own."""
    token_budget: int | None = None
    """In tokens; None for dense attention and for methods without one."""
    score: float | None = None
    """In percent."""
    perplexity: float | None = None
    tasks: tuple[str, ...] = ()
    """Tasks averaged by a mean, those of the file's run; empty for all measured tasks."""

    @property
    def value(self) -> float:
        """The score in percent, or the perplexity."""
        value = self.perplexity if self.score is None else self.score
        assert value is not None  # _read_figure rejects figures with neither
        return value


@dataclass(frozen=True)
class PaperTable:
    """A file of ``eval/configs``; its runs are ``eval.config.read_sweep(path, overrides)``."""

    name: str
    paper: Paper | None
    """None for a sweep that no paper has."""
    figures: tuple[Figure, ...]
    path: Path


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


def config_names(folder: Path = CONFIGS) -> list[str]:
    """List the names of the files in ``eval/configs``."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def table_names(folder: Path = CONFIGS) -> list[str]:
    """List the names of the files that have figures of a paper, which ``read_table`` reads."""
    return [name for name in config_names(folder) if read_yaml(folder / f"{name}.yaml").get("figures")]


def read_table(name: str, folder: Path = CONFIGS) -> PaperTable:
    """Read and check the file of a table that has figures of a paper.

    Parameters
    ----------
    name : str
        One of ``table_names(folder)``.

    Raises
    ------
    EvalError
        Unknown table (the message lists the known ones), a file without figures, or a malformed paper, figure or run
        (the message names file and entry).
    """
    if name in config_names(folder):
        table = read_paper_file(folder / f"{name}.yaml")
        if table.figures:
            return table
        raise EvalError(
            f"table {name!r} is not allowed: {table.path.name} has no figures of a paper to compare with. Run it with "
            f"python -m eval run --config eval/configs/{table.path.name}; tables: {', '.join(table_names(folder))}"
        )
    known = table_names(folder)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise EvalError(f"table {name!r} is unknown{hint}; known: {', '.join(known) or f'none in {folder}'}")


def read_paper_file(path: Path) -> PaperTable:
    """Read and check a file of ``eval/configs``, with or without figures.

    Raises
    ------
    EvalError
        A malformed paper, figure or run; the message names file and entry.
    """
    content = read_yaml(path)
    runs = read_sweep(path, {})
    paper = _read_paper(content["paper"], path) if "paper" in content else None
    listed = content.get("figures") or []
    if not isinstance(listed, list):
        raise EvalError(f"{path}: figures must be a list, got {type(listed).__name__}")
    if listed and paper is None:
        raise EvalError(f"{path}: paper is missing; it must name the source of the figures")
    figures = [_read_figure(entry, f"{path}: figure {number}", runs) for number, entry in enumerate(listed, start=1)]
    return PaperTable(name=path.stem, paper=paper, figures=tuple(figures), path=path)


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


def _read_paper(values: Any, path: Path) -> Paper:
    names = [field.name for field in fields(Paper)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise EvalError(f"{path}: paper={values!r} is not allowed: a mapping of {', '.join(names)}")
    for name, value in values.items():
        if not isinstance(value, str) or not value.strip():
            raise EvalError(f"{path}: paper: {name}={value!r} is not allowed: text, in quotes where it is a number")
    if not _ARXIV.fullmatch(values["arxiv"]):
        raise EvalError(f"{path}: paper: arxiv={values['arxiv']!r} is not allowed: four digits, a point, five digits")
    return Paper(**{name: " ".join(value.split()) for name, value in values.items()})


_TEXT_FIELDS = ("benchmark", "method", "model", "task")
_WHOLE_FIELDS = ("length", "token_budget")
_NUMBER_FIELDS = ("score", "perplexity")
_FIELDS = (*_TEXT_FIELDS, *_WHOLE_FIELDS, *_NUMBER_FIELDS)


def _read_figure(entry: Any, place: str, runs: Sequence[RunConfig]) -> Figure:
    if not isinstance(entry, dict):
        raise EvalError(f"{place}: {entry!r} is not a mapping of {', '.join(_FIELDS)}")
    if unknown := [str(name) for name in entry if name not in _FIELDS]:
        raise EvalError(f"{place}: {', '.join(unknown)} is unknown in {entry}; known: {', '.join(_FIELDS)}")
    given = {name: value for name, value in entry.items() if value is not None}
    if missing := [name for name in ("benchmark", "method", "model") if name not in given]:
        raise EvalError(f"{place}: {', '.join(missing)} is missing in {entry}")
    for name, value in given.items():
        if problem := _problem(name, value):
            raise EvalError(f"{place}: {name}={value!r} is not allowed in {entry}: {problem}")
    if len([name for name in _NUMBER_FIELDS if name in given]) != 1:
        raise EvalError(f"{place}: exactly one of score and perplexity is needed in {entry}")
    of_run = [run.tasks for run in runs if (run.benchmark, run.model) == (given["benchmark"], given["model"])]
    if not of_run:
        raise EvalError(f"{place}: no run of the file has benchmark and model of {entry}")
    return Figure(**given, tasks=() if "task" in given else of_run[0])


def _problem(name: str, value: Any) -> str | None:
    """Return the rule that a figure's field breaks; None if it breaks none."""
    if name in _TEXT_FIELDS:
        return None if isinstance(value, str) and value else "text"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "a number"
    if name in _WHOLE_FIELDS:
        return None if isinstance(value, int) and value >= 1 else "a whole number, at least 1"
    if name == "score":
        return None if 0 <= value <= 100 else "0 to 100 percent"
    return None if 1 <= value < float("inf") else "at least 1"
