"""The comparison of a paper's figures with our results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from eval.config import RunConfig
from eval.summary import geometric_mean
from eval.table_runs import Refusal, Row, TableRun
from eval.tables import Figure
from hf_sparse_attn import METHODS


@dataclass(frozen=True)
class Comparison:
    """A paper's figure, and the measurement to compare with it."""

    figure: Figure
    """Without a value, it is a row of ours that the paper has no figure for."""
    model: str
    """The model that was run here."""
    ours: float | None
    """Measured value in the figure's unit; None if not measured."""
    samples: int = 0
    errors: int = 0
    """Number of failed samples, which are not in ``ours``."""
    lengths: tuple[int | None, ...] = ()
    """The lengths that were run here, in tokens."""
    row: Row | None = None
    """The row that was run here; None for the figure's own."""
    why: str = ""
    """Why there is no measurement, or why samples failed; empty if it is not known."""

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, in the figure's unit; None if there is only one of them."""
        value = self.figure.value
        return None if self.ours is None or value is None else self.ours - value

    @property
    def status(self) -> str:
        """Text shown instead of a missing figure of ours; empty if it exists."""
        if self.ours is not None:
            return ""
        if self.figure.method not in METHODS:
            return "not here yet"
        return "cannot run" if self.why else "not measured"


@dataclass(frozen=True)
class Measured:
    """The measurement that belongs to a table's run."""

    model: str
    entries: Sequence[Mapping[str, Any]]
    """The entries of ``eval.summary.summarise`` for records of ``model``."""
    rows: Mapping[Row, Row] = field(default_factory=dict)
    """The rows that ran for those of the paper; a row that is not among them stands for itself."""
    lengths: Mapping[int, int] = field(default_factory=dict)
    """The lengths that ran for those of the paper."""
    own_lengths: tuple[int, ...] = ()
    """All lengths that ran; empty if each sample had its own."""
    refusals: Sequence[Refusal] = ()

    @classmethod
    def of(cls, run: TableRun, entries: Sequence[Mapping[str, Any]], refusals: Sequence[Refusal]) -> Measured:
        """Return what was run for a table's run."""
        return cls(run.config.model, entries, run.rows, run.lengths, run.config.lengths, refusals)

    def row_of(self, figure: Figure) -> Row:
        """Return the row that ran for a figure's."""
        row = figure.method, figure.token_budget, figure.variant
        return self.rows.get(row, row)

    def lengths_of(self, figure: Figure) -> tuple[int | None, ...]:
        """Return the lengths that ran for a figure's, several for a mean."""
        if figure.length is not None:
            return (self.lengths.get(figure.length, figure.length),)
        if figure.lengths and self.lengths:
            return tuple(self.lengths.get(length, length) for length in figure.lengths)
        return self.own_lengths or (None,)

    def why(self, row: Row, task: str | None, lengths: Sequence[int | None]) -> str:
        """Return the reason why a row lacks samples; empty if there is none."""
        for refusal in self.refusals:
            if any(refusal.concerns(row, task, length) for length in lengths):
                return refusal.reason
        return ""


def figures_of_run(figures: Iterable[Figure], run: RunConfig) -> list[Figure]:
    """Return the figures of the model and benchmark of one of the file's runs, given without overrides."""
    return [figure for figure in figures if (figure.model, figure.benchmark) == (run.model, run.benchmark)]


def compare(figures: Iterable[Figure], measured: Measured) -> list[Comparison]:
    """Compare our results with a paper's figures: one comparison for each figure, in order, measured or not.

    If the paper has figures of the model that was run, only those are compared. Otherwise it is compared with all
    figures, which ``eval.comparison_table.paper_table`` points out.
    """
    figures = list(figures)
    in_paper = any(figure.model == measured.model for figure in figures)
    return [
        _compare_one(figure, measured, is_compared=figure.model == measured.model or not in_paper) for figure in figures
    ]


def rows_of_ours(run: RunConfig, measured: Measured, compared: Sequence[Comparison] = ()) -> list[Comparison]:
    """Return the rows of a run that no figure is compared with: measured ones, their means, and those that cannot run.

    Parameters
    ----------
    run : RunConfig
        The run as printed, whose model names the rows.
    measured : Measured
    compared : sequence of Comparison
        Comparisons of the run's figures.
    """
    is_timed = bool(compared) and all(each.figure.shows_seconds for each in compared)
    shown = {place for comparison in compared for place in _places(comparison, measured.entries)}
    figures = []
    for entry in measured.entries:
        place = (entry["task"], entry["length"], *_row_of_entry(entry))
        if place not in shown:
            figures.append(_figure_of(run, entry, is_timed=is_timed))
    tasks = tuple(dict.fromkeys(entry["task"] for entry in measured.entries))
    if len(tasks) > 1:
        own = {(figure.length, figure.method, figure.token_budget, figure.variant) for figure in figures}
        printed = {
            (length, *each.row) for each in compared if each.figure.task is None and each.row for length in each.lengths
        }
        columns = dict.fromkeys((entry["length"], *_row_of_entry(entry)) for entry in measured.entries)
        averaged = [column for column in columns if column in own or column not in printed]
        figures += [
            Figure(
                run.benchmark, method, run.model, None, length, token_budget, variant, is_timed=is_timed, tasks=tasks
            )
            for length, method, token_budget, variant in averaged
            if (None, length, method, token_budget, variant) not in shown
        ]
    ours = Measured(measured.model, measured.entries, own_lengths=measured.own_lengths, refusals=measured.refusals)
    found = [_compare_one(figure, ours, is_compared=True) for figure in figures]
    found = [each for each in found if each.ours is not None or each.why]
    named = {each.row for each in (*compared, *found) if each.row is not None}
    refused = [
        each
        for each in measured.refusals
        if each.task is None and not any(each.concerns(row, None, None) for row in named)
    ]
    return found + [
        Comparison(
            Figure(run.benchmark, each.method, run.model, token_budget=each.token_budget, variant=each.variant or ""),
            measured.model,
            ours=None,
            why=each.reason if each.method in METHODS else "",
        )
        for each in refused
    ]


def refusals_of(records: Iterable[Mapping[str, Any]]) -> list[Refusal]:
    """Return the first error of each row, task and length, by its first sentence: CUDA's fill a page."""
    found: dict[tuple[Any, ...], Refusal] = {}
    for record in records:
        if record["error"] is not None:
            method, token_budget, variant = _row_of_entry(record)
            reason = re.split(r"[.!?]\s|\n", record["error"], maxsplit=1)[0]
            refusal = Refusal(method, reason, token_budget, variant, record["task"], record["length"])
            found.setdefault((refusal.task, refusal.length, method, token_budget, variant), refusal)
    return list(found.values())


def _row_of_entry(entry: Mapping[str, Any]) -> Row:
    return entry["method"], entry["token_budget"], entry["variant"]


def _places(comparison: Comparison, entries: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the tasks and None for their mean, the lengths, and the row, that a comparison shows."""
    if comparison.ours is None or comparison.row is None:
        return []
    figure = comparison.figure
    all_tasks = figure.tasks or tuple(entry["task"] for entry in entries)
    tasks = (None, *all_tasks) if figure.task is None else (figure.task,)
    return [(task, length, *comparison.row) for task in tasks for length in comparison.lengths]


def _figure_of(run: RunConfig, entry: Mapping[str, Any], *, is_timed: bool) -> Figure:
    method, token_budget, variant = _row_of_entry(entry)
    return Figure(
        run.benchmark, method, run.model, entry["task"], entry["length"], token_budget, variant, is_timed=is_timed
    )


def _compare_one(figure: Figure, measured: Measured, *, is_compared: bool) -> Comparison:
    row, lengths = measured.row_of(figure), measured.lengths_of(figure)
    tasks = figure.tasks if figure.task is None else (figure.task,)
    matching = [
        entry
        for entry in (measured.entries if is_compared else ())
        if entry["benchmark"] == figure.benchmark
        and entry["length"] in lengths
        and _row_of_entry(entry) == row
        and (not tasks or entry["task"] in tasks)
    ]
    kind = _kind(figure, matching)
    values = [entry[kind] for entry in matching]
    wanted = {(task, length) for task in tasks or {entry["task"] for entry in matching} for length in lengths}
    complete = wanted <= {(entry["task"], entry["length"]) for entry in matching}
    errors = sum(entry["errors"] for entry in matching)
    is_measured = bool(values) and complete and None not in values  # else the mean is not comparable with the paper's
    lacks = is_compared and figure.method in METHODS and (errors or not is_measured)
    why = measured.why(row, figure.task, lengths) if lacks else ""
    if not is_measured:
        return Comparison(figure, measured.model, ours=None, lengths=lengths, row=row, why=why)
    return Comparison(
        figure,
        measured.model,
        ours=_mean(kind, values),
        samples=sum(entry["samples"] for entry in matching),
        errors=errors,
        lengths=lengths,
        row=row,
        why=why,
    )


def _kind(figure: Figure, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the field of an entry that is in a figure's unit."""
    if figure.shows_seconds:
        return "ttft_seconds"
    if figure.value is None:
        return "score" if all(entry["perplexity"] is None for entry in entries) else "perplexity"
    return "score" if figure.score is not None else "perplexity"


def _mean(kind: str, values: Sequence[float]) -> float:
    if kind == "perplexity":
        return geometric_mean(values)
    return 100 * fmean(values) if kind == "score" else fmean(values)
