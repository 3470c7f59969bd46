"""The tables of a section, as text for the page."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eval.config import DENSE
from eval.report.plots import length_name
from eval.report.records import Record
from eval.report.sections import Column, Place, Section, label
from eval.terminal import of_samples

_NOTHING = "–"  # noqa: RUF001
_MOST_LOST = 5
_LOST_BY = 0.5
_MOST_CHARACTERS = 400
_CONTEXT_TIMES = ("context_seconds", "first_token_seconds")


@dataclass
class Table:
    """A table of text cells; the first ``text_columns`` columns are words, the others numbers."""

    header: list[str]
    lines: list[list[str]]
    footer: list[list[str]] = field(default_factory=list)
    text_columns: int = 1


def score_table(section: Section) -> Table:
    """Tabulate tasks and lengths against methods and budgets, with averages below."""
    by_length = section.lengths != [None]
    header = ["task", *(["length"] if by_length else []), "samples", "errors", *map(label, section.columns)]
    lines = []
    for place in section.places:
        entries = [entry for column in section.columns if (entry := section.entries.get((place, column)))]
        samples = sorted({entry["samples"] for entry in entries})
        lines.append(
            [
                place[0],
                *([_count(place[1])] if by_length else []),
                _range(samples),
                _count(sum(entry["errors"] for entry in entries)),
                *(_cell(section, place, column) for column in section.columns),
            ]
        )
    return Table(header, lines, [*_benchmark_averages(section, by_length), *_averages(section, by_length)])


def _benchmark_averages(section: Section, by_length: bool) -> list[list[str]]:
    return [
        [
            name,
            *([_count(length)] if by_length else []),
            "",
            "",
            *(_benchmark_average(section, means, column) for column in section.columns),
        ]
        for name, length, means in section.benchmark_averages()
    ]


def _benchmark_average(section: Section, means: Mapping[Column, dict[str, Any]], column: Column) -> str:
    if column not in means:
        return _NOTHING
    most = max(mean["samples"] for mean in means.values())
    return of_samples(_figure(section, 100 * means[column]["score"]), means[column], most)


def _cell(section: Section, place: Place, column: Column) -> str:
    """Format the figure, with its number of samples if some failed or are missing."""
    entry = section.entries.get((place, column))
    figure = None if entry is None else section.figure_of(entry)
    if entry is None or figure is None:
        return _NOTHING
    return of_samples(_figure(section, figure), entry, section.samples[place])


def _averages(section: Section, by_length: bool) -> list[list[str]]:
    lengths = [length for length in section.lengths if length is not None] if len(section.lengths) > 1 else []
    footer = []
    for length in [*lengths, None]:
        averages = section.averages(length)
        shared = len(section.shared_places(length))
        of_all = sum(length in (None, place[1]) for place in section.places)
        name = "average" if shared == of_all else f"average of {shared} of {of_all}"
        if section.lacks_samples(length):
            name += ", over samples that all measured"
        figures = [_figure(section, averages[c]) if averages else _NOTHING for c in section.columns]
        footer.append([name, *([_count(length) if length else ""] if by_length else []), "", "", *figures])
    return footer


def cost_table(section: Section) -> Table:
    """Compare the cost of each method and budget with dense attention's, by length."""
    header = ["method", "length", "samples", "prompt tokens", "realised budget", "KV read (% of dense)"]
    costs = list(section.costs())
    has_contexts = any(entry["context_seconds"] is not None for _, _, entry in costs)
    header += ["context (s)", "question (s)"] if has_contexts else []
    header += ["TTFT (s)", "TPOT (ms)", "TPOT speed-up", "peak memory (GiB)"]
    keeps_selections = any(entry["selection_hit_rate"] is not None for _, _, entry in costs)
    header += ["selections kept (%)"] if keeps_selections else []
    speed_ups = _speed_ups(section)
    lines = []
    for length, column, entry in costs:
        lines.append(
            [
                label(column),
                length_name(length).removesuffix(" tokens"),
                _count(entry["samples"] - entry["errors"]),
                _number(entry["prompt_tokens"], ",.0f"),
                _number(entry["realised_budget"], ",.0f"),
                _number(entry["kv_fraction"], ".1f", 100),
                *([_number(entry[name], ".3f") for name in _CONTEXT_TIMES] if has_contexts else []),
                _number(entry["ttft_seconds"], ".3f"),
                _number(entry["tpot_ms"], ".2f"),
                f"{speed_ups[length, column]:.2f}×" if (length, column) in speed_ups else _NOTHING,  # noqa: RUF001
                _number(entry["peak_memory_bytes"], ",.2f", 2**-30),
                *([_number(entry["selection_hit_rate"], ".1f", 100)] if keeps_selections else []),
            ]
        )
    return Table(header, lines, text_columns=1)


def _speed_ups(section: Section) -> dict[tuple[int | None, Column], float]:
    """Return dense attention's median TPOT over each column's, by length, over the samples that both measured."""
    pairs: dict[tuple[int | None, Column], list[tuple[Record, Record]]] = defaultdict(list)
    measured = [record for record in section.records if record["error"] is None]
    dense_alone = [(record, record) for record in measured if record["method"] == DENSE]
    for record, dense in [*dense_alone, *section.twins()]:
        if record.get("tpot_ms") and dense.get("tpot_ms"):
            pairs[record["length"], (record["method"], record["token_budget"])].append((record, dense))
    return {
        place: median(dense["tpot_ms"] for _, dense in found) / median(record["tpot_ms"] for record, _ in found)
        for place, found in pairs.items()
    }


def divergence_table(section: Section) -> Table | None:
    """Tabulate each method's divergence from dense attention, by length, beside what it read; None if not measured."""
    costs = [(length, column, entry) for length, column, entry in section.costs() if entry["divergence"] is not None]
    if not costs:
        return None
    lines = [
        [
            label(column),
            length_name(length).removesuffix(" tokens"),
            _count(entry["samples"] - entry["errors"]),
            _number(entry["divergence"], ".4f"),
            _number(entry["divergence_max"], ".3f"),
            _number(entry["top_agreement"], ".1f", 100),
            _number(entry["kv_fraction"], ".1f", 100),
        ]
        for length, column, entry in costs
    ]
    header = [
        "method",
        "length",
        "samples",
        "mean KL (nats)",
        "max KL (nats)",
        "same token (%)",
        "KV read (% of dense)",
    ]
    return Table(header, lines, text_columns=1)


def agreement_table(section: Section) -> Table | None:
    """Count the samples with the same answer as dense attention's; return None without answers."""
    pairs: dict[Column, list[tuple[Record, Record]]] = defaultdict(list)
    for sparse, dense in section.twins():
        if sparse["score"] is not None and dense["score"] is not None:
            pairs[sparse["method"], sparse["token_budget"]].append((sparse, dense))
    if not pairs:
        return None
    lines = []
    for column in section.columns:
        if column in pairs:
            counts: Counter[str] = Counter()
            for sparse, dense in pairs[column]:
                counts["same"] += sparse.get("prediction") == dense.get("prediction")
                counts["worse"] += sparse["score"] < dense["score"]
                counts["better"] += sparse["score"] > dense["score"]
            paired = len(pairs[column])
            same = f"{counts['same']} ({100 * counts['same'] / paired:.0f} %)"
            lines.append([label(column), str(paired), same, str(counts["worse"]), str(counts["better"])])
    return Table(["method", "samples beside dense", "same answer", "scored lower", "scored higher"], lines)


def lost_samples(section: Section) -> list[dict[str, str]]:
    """Return, for each method and budget, the sample with the largest loss against dense attention."""
    lost = [
        (dense["score"] - sparse["score"], sparse, dense)
        for sparse, dense in section.twins()
        if None not in (sparse["score"], dense["score"]) and dense["score"] - sparse["score"] >= _LOST_BY
    ]
    worst: dict[Column, tuple[float, Record, Record]] = {}
    for loss, sparse, dense in sorted(lost, key=lambda item: -item[0]):
        worst.setdefault((sparse["method"], sparse["token_budget"]), (loss, sparse, dense))
    return [
        {
            "sample": _name(sparse),
            "references": shorten(_references(sparse.get("references"))),
            "dense": shorten(dense.get("prediction") or ""),
            "dense_score": f"{100 * dense['score']:.1f}",
            "method": label((sparse["method"], sparse["token_budget"])),
            "prediction": shorten(sparse.get("prediction") or ""),
            "score": f"{100 * sparse['score']:.1f}",
        }
        for _, sparse, dense in list(worst.values())[:_MOST_LOST]
    ]


def failed_samples(section: Section) -> list[list[str]]:
    """Return section, sample, method and error of every failed record."""
    return [
        [section.title, _name(record), label((record["method"], record["token_budget"])), shorten(record["error"])]
        for record in section.records
        if record["error"] is not None
    ]


def _name(record: Record) -> str:
    length = "" if record["length"] is None else f" at {record['length']:,} tokens"
    return f"{record['task']} {record['sample_id']}{length}"


def _references(references: Any) -> str:
    if isinstance(references, list) and all(isinstance(reference, str) for reference in references):
        return " | ".join(references)
    return references if isinstance(references, str) else json.dumps(references, ensure_ascii=False)


def shorten(text: str) -> str:
    """Return the beginning of the text and the number of characters cut off."""
    more = len(text) - _MOST_CHARACTERS
    return text if more <= 0 else f"{text[:_MOST_CHARACTERS]}… ({more:,} characters more)"


def _figure(section: Section, value: float) -> str:
    return f"{value:,.3f}" if section.is_perplexity else f"{value:.1f}"


def _number(value: float | None, form: str, scale: float = 1) -> str:
    return _NOTHING if value is None else format(value * scale, form)


def _count(value: int | None) -> str:
    return _NOTHING if value is None else f"{value:,}"


def _range(values: Sequence[int]) -> str:
    return _count(values[0]) if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
