"""The rows cut into sections whose numbers may stand side by side, and what a section's tables and plots show."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from eval.config import DENSE
from eval.report.rows import Row
from eval.summary import aggregate, column_order, geometric_mean, summarise

Column = tuple[str, "int | None"]
"""A method and its token budget."""
Place = tuple[str, "int | None"]
"""A task and its length."""

_SETTING = ("model", "dtype", "device", "question", "protocol_sha256")


def label(column: Column) -> str:
    """Return a column's name in the page and the plots."""
    method, budget = column
    if method == DENSE:
        return "dense"
    return method if budget is None else f"{method} {budget}"


@dataclass(frozen=True)
class Section:
    """The rows of one benchmark under one setting: model, dtype, device, question mode and protocol."""

    title: str
    slug: str
    rows: Sequence[Row]

    @cached_property
    def entries(self) -> dict[tuple[Place, Column], dict[str, Any]]:
        """The aggregate of each task, length, method and budget, in ``summarise``'s order."""
        return {
            ((entry["task"], entry["length"]), (entry["method"], entry["token_budget"])): entry
            for entry in summarise(self.rows)
        }

    @cached_property
    def columns(self) -> list[Column]:
        """The methods and budgets, dense first."""
        return sorted({column for _, column in self.entries}, key=lambda column: column_order(*column))

    @cached_property
    def places(self) -> list[Place]:
        """The tasks and lengths."""
        return list(dict.fromkeys(place for place, _ in self.entries))

    @cached_property
    def lengths(self) -> list[int | None]:
        """The requested lengths; None where rows have their own."""
        return sorted({length for _, length in self.places}, key=lambda length: length or 0)

    @cached_property
    def is_perplexity(self) -> bool:
        """Whether the figure is a perplexity, lower is better, in place of a score."""
        return any(row.get("perplexity") is not None for row in self.rows)

    @property
    def figure_name(self) -> str:
        """The name of the figure, with its unit."""
        return "perplexity" if self.is_perplexity else "score (%)"

    def figure(self, place: Place, column: Column) -> float | None:
        """The mean score in percent, or the perplexity; None where there is none."""
        return self.figure_of(self.entries.get((place, column), {}))

    def figure_of(self, entry: dict[str, Any]) -> float | None:
        """The figure of an entry of ``aggregate``."""
        if self.is_perplexity:
            return entry.get("perplexity")
        score = entry.get("score")
        return None if score is None else 100 * score

    def shared_places(self, length: int | None = None) -> list[Place]:
        """The tasks and lengths that every column has a figure for; only those can be averaged side by side."""
        return [
            place
            for place in self.places
            if length in (None, place[1]) and all(self.figure(place, column) is not None for column in self.columns)
        ]

    def averages(self, length: int | None = None) -> dict[Column, float]:
        """Each column's average over ``shared_places``, every place with the same weight; empty where none is."""
        places = self.shared_places(length)
        if not places:
            return {}
        mean = geometric_mean if self.is_perplexity else fmean
        return {
            column: mean([figure for place in places if (figure := self.figure(place, column)) is not None])
            for column in self.columns
        }

    def costs(self) -> Iterator[tuple[int | None, Column, dict[str, Any]]]:
        """Length, column, and what all rows of both have in common, over the tasks."""
        groups: dict[tuple[int | None, Column], list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[row["length"], (row["method"], row["token_budget"])].append(row)
        for length in self.lengths:
            for column in self.columns:
                if (length, column) in groups:
                    yield length, column, aggregate(groups[length, column])

    def twins(self) -> Iterator[tuple[Row, Row]]:
        """Each measured row of a sparse method with the dense row of the same sample."""
        measured = [row for row in self.rows if row["error"] is None]
        dense = {_sample(row): row for row in measured if row["method"] == DENSE}
        for row in measured:
            if row["method"] != DENSE and _sample(row) in dense:
                yield row, dense[_sample(row)]


def _sample(row: Row) -> tuple[Any, ...]:
    return row["task"], row["length"], row["sample_id"], row["seed"]


def make_sections(rows: Sequence[Row]) -> list[Section]:
    """One section for each benchmark and setting; the title names what sets it apart from its neighbours."""
    groups: dict[str, dict[tuple[Any, ...], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in _with_parameters_in_method(rows):
        groups[row["benchmark"]][tuple(row.get(name) for name in _SETTING)].append(row)
    sections: list[Section] = []
    for benchmark, by_setting in sorted(groups.items()):
        differing = [i for i in range(len(_SETTING)) if len({setting[i] for setting in by_setting}) > 1]
        for setting, members in sorted(by_setting.items(), key=lambda group: str(group[0])):
            title = ", ".join([benchmark, *(_describe(_SETTING[i], setting[i]) for i in differing)])
            slug = re.sub(r"[^a-z0-9]+", "-", benchmark.lower()).strip("-")
            sections.append(Section(title, f"{len(sections) + 1}-{slug}", members))
    return sections


def _describe(name: str, value: Any) -> str:
    if name == "question":
        return f"question by {value}"
    if name == "protocol_sha256":
        return f"protocol {value[:12]}" if value else "no protocol"
    return str(value)


def _with_parameters_in_method(rows: Sequence[Row]) -> list[Row]:
    """Rows whose method names the parameters that differ, where one method was run with several sets of them."""
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    names = {name for row in rows for name in row["parameters"]} - {"token_budget"}  # the budget has a field of its own
    for row in rows:
        for name in names:
            values[row["method"]][name].add(json.dumps(row["parameters"].get(name)))
    renamed: list[Row] = []
    for row in rows:
        differing = sorted(name for name, found in values[row["method"]].items() if len(found) > 1)
        own = [f"{name}={row['parameters'].get(name)}" for name in differing]
        keeps_name = row["method"] == DENSE or not own
        renamed.append(row if keeps_name else {**row, "method": f"{row['method']} ({', '.join(own)})"})
    return renamed
