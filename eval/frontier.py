"""Frontiers of a sweep: each variant's divergence from dense attention, and needles found, against KV bytes read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from eval.config import DENSE
from eval.errors import EvalError
from eval.store import read_json, read_records
from eval.summary import column_order

Record = Mapping[str, Any]
Column = tuple[str, "int | None", str]
"""A method, its token budget, and the name of the variant."""

HEAD = ("method", "KV read, %", "KL needles", "KL others", "agreement, %", "found, %", "KV read for needles, %")
_NOTHING = "-"
_SAMPLE = ("benchmark", "task", "length", "sample_id", "seed", "question", "protocol_sha256")
"""Fields in which records of the same sample agree: under another seed, a sample of the same name has another text."""
_FILES = "data_sha256"
"""Added to a record: the digests of the files that its run's task has read; empty where the run did not note them."""


@dataclass(frozen=True)
class Mean:
    """A mean over samples, and its standard error."""

    value: float
    error: float | None
    """None for a single sample, whose spread is unknown."""

    def text(self, digits: int, factor: float = 1.0) -> str:
        """Return both, such as ``0.012 ± 0.003``; the mean alone if it has no error."""
        mean = f"{factor * self.value:.{digits}f}"
        return mean if self.error is None else f"{mean} ± {factor * self.error:.{digits}f}"


@dataclass(frozen=True)
class Point:
    """A variant over samples that it shares with the other variants of its model.

    Of the samples with needles these are the ones that every variant has measured, apart from variants that have
    measured no needle at all, or none of a task; the same holds for the other samples. What is a mean over both is None
    for a variant that has measured only one kind.
    """

    method: str
    token_budget: int | None
    variant: str
    kv_percent: float | None
    """Bytes of keys, values and metadata in all layers, as a share of dense attention's: mean over all samples."""
    kv_percent_needles: float | None
    divergence: Mean | None
    """KL(dense || variant) in nats, over all samples; None for dense attention too."""
    divergence_needles: Mean | None
    divergence_others: Mean | None
    agreement: float | None
    """Over all samples."""
    found: Mean | None
    """Score of the needles, 0 to 1; None if none was scored."""

    @property
    def name(self) -> str:
        """The name in the table: method, budget, and what is not its default."""
        if self.method == DENSE:
            return "dense"
        budget = [] if self.token_budget is None else [f"{self.token_budget:,}"]
        return " ".join([self.method, *budget, *([self.variant] if self.variant else [])])

    @property
    def family(self) -> str:
        """The name without the budget, or without a number that takes its place: points of one line in a figure."""
        if self.token_budget is None:
            return self.method
        return " ".join([self.method, *([self.variant] if self.variant else [])])


@dataclass(frozen=True)
class Frontier:
    """The points of one model."""

    model: str
    device: str
    dtype: str
    needles: int
    """Number of samples with needles, and of others."""
    others: int
    tasks: tuple[str, ...]
    points: tuple[Point, ...]
    left_out: tuple[str, ...]
    """Variants of which no sample was measured."""
    incomplete: tuple[str, ...]
    """Variants that lack a whole task of a kind of which they measured another. They have no point."""
    other_texts: tuple[str, ...]
    """Variants of which a sample has another text than the one that was measured first, as from other data."""

    @property
    def of_one_kind(self) -> tuple[str, ...]:
        """Names of the variants that were measured with needles alone, or with other samples alone; not in a mean."""
        return tuple(point.name for point in self.points if point.kv_percent is None)


def is_needle(record: Record) -> bool:
    """Whether a record's task is to find sentences in a text, so that its score is the share that was found."""
    return record["benchmark"] in ("passkey", "needle") or record["task"].startswith("niah_")


def frontiers(folder: Path) -> list[Frontier]:
    """Return the frontier of each model of a sweep's results folder; empty if nothing there has a divergence.

    Raises
    ------
    EvalError
        A file of records is malformed.
    """
    by_model: dict[str, list[Record]] = defaultdict(list)
    for path in sorted(folder.rglob("rows.jsonl")):
        config = path.with_name("config.json")
        data = read_json(config, "the settings of a run").get("data", {}) if config.exists() else {}
        for record in read_records(path):
            files = [file["sha256"] for file in data.get(record["task"], [])]
            by_model[record["model"]].append({**record, _FILES: files})
    return [found for records in by_model.values() if (found := _frontier(records)) is not None]


def _frontier(records: Sequence[Record]) -> Frontier | None:
    measured: dict[tuple[Any, ...], dict[Column, Record]] = defaultdict(dict)
    columns: dict[Column, None] = {}
    elsewhere: set[Column] = set()
    for record in records:
        column = (record["method"], record["token_budget"], record.get("variant", ""))
        columns.setdefault(column)
        if record["error"] is None and (record["method"] == DENSE or record.get("divergence") is not None):
            found = measured[tuple(record.get(name) for name in _SAMPLE)]
            if column not in found and found and _differ(record, next(iter(found.values()))):
                elsewhere.add(column)
            found.setdefault(column, record)
    tried = [column for column in columns if any(column in found for found in measured.values())]
    by_kind: dict[bool, list[dict[Column, Record]]] = {True: [], False: []}
    for found in measured.values():
        by_kind[is_needle(next(iter(found.values())))].append(found)
    incomplete = _incomplete(by_kind[True]) | _incomplete(by_kind[False])
    needles, others = _shared(by_kind[True], incomplete), _shared(by_kind[False], incomplete)
    samples, has_both = [*needles, *others], bool(needles and others)
    if not samples or not any(column[0] != DENSE for column in tried):
        return None
    for name in ("device", "dtype"):
        if len({record[name] for found in samples for record in found.values()}) > 1:
            raise EvalError(f"records of {records[0]['model']} differ in their {name}: they cannot be compared")
    one = next(iter(samples[0].values()))
    points = []
    for column in tried:
        own_needles, own_others = ([found[column] for found in kind if column in found] for kind in (needles, others))
        if own_needles or own_others:
            points.append(_point(column, own_needles, own_others, has_both))
    return Frontier(
        one["model"],
        one["device"],
        one["dtype"],
        len(needles),
        len(others),
        tuple(dict.fromkeys(_place(next(iter(found.values()))) for found in samples)),
        tuple(sorted(points, key=lambda point: column_order(point.method, point.token_budget, point.variant))),
        tuple(_name(column) for column in columns if column not in tried),
        tuple(_name(column) for column in columns if column in incomplete),
        tuple(_name(column) for column in columns if column in elsewhere - incomplete),
    )


def _differ(record: Record, other: Record) -> bool:
    """Whether two records of samples of the same name show that their texts are not the same."""
    files, other_files = record[_FILES], other[_FILES]
    return record["prompt_tokens"] != other["prompt_tokens"] or bool(files and other_files and files != other_files)


def _name(column: Column) -> str:
    return " ".join(str(part) for part in column if part)


def _incomplete(measured: Sequence[dict[Column, Record]]) -> set[Column]:
    """Return the variants that have measured samples of a kind, but none of one of its tasks."""
    places: dict[Column, set[str]] = defaultdict(set)
    for found in measured:
        for column, record in found.items():
            places[column].add(_place(record))
    every = set().union(*places.values())
    return {column for column, own in places.items() if own != every}


def _shared(measured: Sequence[dict[Column, Record]], incomplete: Set[Column]) -> list[dict[Column, Record]]:
    """Return the samples of a kind that every complete variant has measured which has measured any of them."""
    complete = [{column: found[column] for column in found if column not in incomplete} for found in measured]
    columns = {column for found in complete for column in found}
    return [found for found in complete if len(found) == len(columns)]


def _place(record: Record) -> str:
    length = "" if record["length"] is None else f" at {record['length']:,} tokens"
    return f"{record['benchmark']} {record['task']}{length}"


def _point(column: Column, needles: Sequence[Record], others: Sequence[Record], has_both: bool) -> Point:
    records = [] if has_both and not (needles and others) else [*needles, *others]
    read, of_needles = _mean("kv_fraction", records), _mean("kv_fraction", needles)
    agreement = _mean("top_agreement", records)
    return Point(
        *column,
        kv_percent=None if read is None else 100 * read.value,
        kv_percent_needles=None if of_needles is None else 100 * of_needles.value,
        divergence=_mean("divergence", records),
        divergence_needles=_mean("divergence", needles),
        divergence_others=_mean("divergence", others),
        agreement=None if agreement is None else agreement.value,
        found=_mean("score", needles),
    )


def _mean(name: str, records: Sequence[Record]) -> Mean | None:
    values = [record[name] for record in records if record[name] is not None]
    if not values:
        return None
    return Mean(fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)


def lines(frontier: Frontier) -> list[list[str]]:
    """Return a line of text for each point, under :data:`HEAD`."""

    def divergence(mean: Mean | None) -> str:
        return _NOTHING if mean is None else mean.text(4)

    def percent(value: float | None, factor: float = 1.0) -> str:
        return _NOTHING if value is None else f"{factor * value:.1f}"

    return [
        [
            point.name,
            percent(point.kv_percent),
            divergence(point.divergence_needles),
            divergence(point.divergence_others),
            percent(point.agreement, 100),
            _NOTHING if point.found is None else point.found.text(1, 100),
            percent(point.kv_percent_needles),
        ]
        for point in frontier.points
    ]
