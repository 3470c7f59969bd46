"""Sections of records with comparable numbers, and the data of a section's tables and plots."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from eval.benchmarks import BENCHMARKS
from eval.config import DENSE
from eval.report.names import with_variant_names
from eval.report.records import TOLD_APART, Record
from eval.summary import aggregate, category_means, column_order, geometric_mean, group_means, summarise

Column = tuple[str, "int | None"]
"""A method and its token budget."""
Place = tuple[str, "int | None"]
"""A task and its length."""

_SETTING = ("model", "dtype", "device", "question", "protocol_sha256", TOLD_APART)


def label(column: Column) -> str:
    """Return a column's name in the page and the plots."""
    method, budget = column
    if method == DENSE:
        return "dense"
    return method if budget is None else f"{method} {budget}"


@dataclass(frozen=True)
class Section:
    """The records of one benchmark under one setting: model, dtype, device, question mode and protocol."""

    title: str
    slug: str
    records: Sequence[Record]

    @cached_property
    def entries(self) -> dict[tuple[Place, Column], dict[str, Any]]:
        """The aggregates by task, length, method and budget, in the order of ``summarise``."""
        return {
            ((entry["task"], entry["length"]), (entry["method"], entry["token_budget"])): entry
            for entry in summarise(self.records)
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
        """The requested lengths; None for samples with their own."""
        return sorted({length for _, length in self.places}, key=lambda length: length or 0)

    @cached_property
    def is_perplexity(self) -> bool:
        """Whether the figure is a perplexity (lower is better) instead of a score."""
        return any(record.get("perplexity") is not None for record in self.records)

    @property
    def figure_name(self) -> str:
        """The name of the figure, with its unit."""
        return "perplexity" if self.is_perplexity else "score (%)"

    def figure(self, place: Place, column: Column) -> float | None:
        """Return the mean score in percent, or the perplexity; None if there is none."""
        return self.figure_of(self.entries.get((place, column), {}))

    def figure_of(self, entry: dict[str, Any]) -> float | None:
        """Return the figure of an entry of ``aggregate``."""
        if self.is_perplexity:
            return entry.get("perplexity")
        score = entry.get("score")
        return None if score is None else 100 * score

    def shared_places(self, length: int | None = None) -> list[Place]:
        """Return the tasks and lengths for which every column has a figure; only their averages are comparable."""
        return [
            place
            for place in self.places
            if length in (None, place[1]) and all(self.figure(place, column) is not None for column in self.columns)
        ]

    def averages(self, length: int | None = None) -> dict[Column, float]:
        """Return each column's average over ``shared_places``, with equal weights; empty without shared places."""
        places = self.shared_places(length)
        if not places:
            return {}
        mean = geometric_mean if self.is_perplexity else fmean
        return {
            column: mean([figure for place in places if (figure := self.figure(place, column)) is not None])
            for column in self.columns
        }

    def benchmark_averages(self) -> list[tuple[str, int | None, dict[Column, float]]]:
        """Return the averages that the benchmark names: name, length, and each column's in percent."""
        benchmark = BENCHMARKS.get(self.records[0]["benchmark"])
        found: dict[tuple[str, int | None], dict[Column, float]] = defaultdict(dict)
        averages = benchmark.averages if benchmark else {}
        for entry in [*group_means(list(self.entries.values()), averages), *category_means(self.records)]:
            column = entry["method"], entry["token_budget"]
            found[entry["group"], entry["length"]][column] = 100 * entry["score"]
        return [(name, length, figures) for (name, length), figures in found.items()]

    def costs(self) -> Iterator[tuple[int | None, Column, dict[str, Any]]]:
        """Yield each length and column with the aggregate of its records over all tasks."""
        groups: dict[tuple[int | None, Column], list[Record]] = defaultdict(list)
        for record in self.records:
            groups[record["length"], (record["method"], record["token_budget"])].append(record)
        for length in self.lengths:
            for column in self.columns:
                if (length, column) in groups:
                    yield length, column, aggregate(groups[length, column])

    def twins(self) -> Iterator[tuple[Record, Record]]:
        """Yield each measured record of a sparse method with the dense record of the same sample."""
        measured = [record for record in self.records if record["error"] is None]
        dense = {_sample(record): record for record in measured if record["method"] == DENSE}
        for record in measured:
            if record["method"] != DENSE and _sample(record) in dense:
                yield record, dense[_sample(record)]


def _sample(record: Record) -> tuple[Any, ...]:
    return record["task"], record["length"], record["sample_id"], record["seed"]


def make_sections(records: Sequence[Record]) -> list[Section]:
    """Return a section for each benchmark and setting; its title names the settings that differ."""
    groups: dict[str, dict[tuple[Any, ...], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        groups[record["benchmark"]][tuple(record.get(name) for name in _SETTING)].append(record)
    sections: list[Section] = []
    for benchmark, by_setting in sorted(groups.items()):
        differing = [i for i in range(len(_SETTING)) if len({setting[i] for setting in by_setting}) > 1]
        for setting, members in sorted(by_setting.items(), key=lambda group: str(group[0])):
            title = ", ".join([benchmark, *(_describe(_SETTING[i], setting[i]) for i in differing)])
            slug = re.sub(r"[^a-z0-9]+", "-", benchmark.lower()).strip("-")
            sections.append(Section(title, f"{len(sections) + 1}-{slug}", with_variant_names(members)))
    return sections


def _describe(name: str, value: Any) -> str:
    if name == "question":
        return f"question by {value}"
    if name == "protocol_sha256":
        return f"protocol {value[:12]}" if value else "no protocol"
    return str(value)
