"""Sections of records with comparable numbers, and the data of a section's tables and plots."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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

    @cached_property
    def shared(self) -> Section:
        """The records of the samples for which every column has a figure; only their averages are comparable."""
        name = "perplexity" if self.is_perplexity else "score"
        measured: dict[tuple[Any, ...], set[Column]] = defaultdict(set)
        for record in self.records:
            if record["error"] is None and record.get(name) is not None:
                measured[_sample(record)].add((record["method"], record["token_budget"]))
        complete = {sample for sample, columns in measured.items() if len(columns) == len(self.columns)}
        return replace(self, records=[record for record in self.records if _sample(record) in complete])

    def shared_places(self, length: int | None = None) -> list[Place]:
        """Return the tasks and lengths with samples for which every column has a figure."""
        return [place for place in self.shared.places if length in (None, place[1])]

    def lacks_samples(self, length: int | None = None) -> bool:
        """Return whether the averages leave out samples of the shared tasks and lengths."""
        return any(
            self.shared.entries[place, column]["samples"] < self.samples[place]
            for place in self.shared_places(length)
            for column in self.columns
        )

    @cached_property
    def samples(self) -> dict[Place, int]:
        """The largest number of samples that a column has of a task and length, failed ones included."""
        counts: dict[Place, int] = defaultdict(int)
        for (place, _), entry in self.entries.items():
            counts[place] = max(counts[place], entry["samples"])
        return counts

    def averages(self, length: int | None = None) -> dict[Column, float]:
        """Return each column's average over the shared samples, tasks and lengths with equal weights; else empty."""
        places = self.shared_places(length)
        if not places:
            return {}
        mean = geometric_mean if self.is_perplexity else fmean
        return {
            column: mean([figure for place in places if (figure := self.shared.figure(place, column)) is not None])
            for column in self.columns
        }

    def benchmark_averages(self) -> list[tuple[str, int | None, dict[Column, dict[str, Any]]]]:
        """Return the averages that the benchmark names: name, length, and each column's entry of ``group_means``."""
        benchmark = BENCHMARKS.get(self.records[0]["benchmark"])
        found: dict[tuple[str, int | None], dict[Column, dict[str, Any]]] = defaultdict(dict)
        averages = benchmark.averages if benchmark else {}
        for entry in [*group_means(list(self.entries.values()), averages), *category_means(self.records)]:
            column = entry["method"], entry["token_budget"]
            found[entry["group"], entry["length"]][column] = entry
        return [(name, length, means) for (name, length), means in found.items()]

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
