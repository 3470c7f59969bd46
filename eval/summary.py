"""Aggregates of records: one entry for each benchmark, task, length and variant of a method."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from eval.config import DENSE
from eval.errors import EvalError

_KEY = ("benchmark", "task", "length", "method", "token_budget", "variant")


def summarise(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an entry per benchmark, task, length, method, token budget and variant, with their ``aggregate``.

    Entries are ordered by benchmark, task, length, method (dense first), budget and variant.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        groups[tuple(record.get(name, "") if name == "variant" else record[name] for name in _KEY)].append(record)
    entries = [{**dict(zip(_KEY, key, strict=True)), **aggregate(group)} for key, group in groups.items()]
    return sorted(entries, key=_order)


def aggregate(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate the records of one method and budget.

    Returns
    -------
    dict
        ``samples`` (all records) and ``errors`` (failed ones). Over the other records, None if none has the field:
        means of ``score`` and of each of ``scores`` (0 to 1), ``divergence`` (nats; ``divergence_by_position`` at each
        position), ``top_agreement`` (0 to 1), ``kv_fraction``, ``realised_budget`` (tokens), ``selection_hit_rate``
        (0 to 1) and ``prompt_tokens``; geometric mean of ``perplexity``, every record with the same weight; medians of
        ``context_seconds``, ``first_token_seconds``, ``ttft_seconds`` and ``tpot_ms``; maximum of ``divergence_max``
        (nats) and ``peak_memory_bytes``.
    """
    measured = [record for record in records if record.get("error") is None]

    def values(name: str) -> list[Any]:
        return [record[name] for record in measured if record.get(name) is not None]

    def mean(name: str) -> float | None:
        return fmean(found) if (found := values(name)) else None

    def middle(name: str) -> float | None:
        return float(median(found)) if (found := values(name)) else None

    return {
        "samples": len(records),
        "errors": len(records) - len(measured),
        "score": mean("score"),
        "scores": _means_by_name(values("scores")),
        "perplexity": geometric_mean(found) if (found := values("perplexity")) else None,
        "divergence": mean("divergence"),
        "divergence_max": max(values("divergence_max"), default=None),
        "divergence_by_position": _mean_by_position(values("divergence_by_position")),
        "top_agreement": mean("top_agreement"),
        "kv_fraction": mean("kv_fraction"),
        "realised_budget": mean("realised_budget"),
        "selection_hit_rate": mean("selection_hit_rate"),
        "context_seconds": middle("context_seconds"),
        "first_token_seconds": middle("first_token_seconds"),
        "ttft_seconds": middle("ttft_seconds"),
        "tpot_ms": middle("tpot_ms"),
        "prompt_tokens": mean("prompt_tokens"),
        "peak_memory_bytes": max(values("peak_memory_bytes"), default=None),
    }


def _means_by_name(found: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return the mean of each named score, which all samples have."""
    if not found:
        return None
    for each in found:
        if each.keys() != found[0].keys():
            raise EvalError(
                f"samples of one task have different scores: {sorted(found[0])} and {sorted(each)}; they come from "
                "different versions of the benchmark and have to be measured anew"
            )
    return {name: fmean(each[name] for each in found) for name in found[0]}


def _mean_by_position(found: Sequence[Sequence[Sequence[float]]]) -> list[list[float]] | None:
    """Return each position with the mean over the records that reach it."""
    by_position: dict[float, list[float]] = defaultdict(list)
    for pairs in found:
        for position, value in pairs:
            by_position[position].append(value)
    return [[position, fmean(by_position[position])] for position in sorted(by_position)] or None


def group_means(entries: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Average the scores of a benchmark's groups of tasks.

    Parameters
    ----------
    entries : sequence of dict
        Entries of ``summarise`` for one benchmark.
    groups : mapping
        What each average is over, by its name: tasks, or the names of other averages.

    Returns
    -------
    list of dict
        For each group, length, method, token budget and variant, in the order of the groups: these, and ``score``, the
        mean in which every member has the same weight, with ``samples`` and ``errors``. A group without a score of each
        of its tasks is left out.
    """
    shared = [name for name in _KEY if name != "task"]
    by_column: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for entry in entries:
        by_column[tuple(entry[name] for name in shared)][entry["task"]] = entry
    means = []
    for group in groups:
        shares = _shares(group, groups)
        for column, by_task in by_column.items():
            found = {task: by_task[task] for task in shares if by_task.get(task, {}).get("score") is not None}
            if len(found) == len(shares):
                counts = {name: sum(entry[name] for entry in found.values()) for name in ("samples", "errors")}
                score = math.fsum(shares[task] * entry["score"] for task, entry in found.items())
                means.append({"group": group, **dict(zip(shared, column, strict=True)), "score": score, **counts})
    return means


def category_scores(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Aggregate the scores of each category of the samples.

    Returns
    -------
    list of dict
        For each kind of category, its values, and each entry of ``summarise`` with such samples: ``category``,
        ``value``, the entry's key, ``score`` (0 to 1), ``samples`` and ``errors``. Without scores there is none.
    """
    return [entry for entry in _by_category(records) if entry["score"] is not None]


def category_means(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average the scores of each category over its tasks, every task with the same weight.

    Returns
    -------
    list of dict
        As of :func:`group_means`, with ``group`` naming the category. The tasks of a group and length are those of
        which any method has a score; a method that lacks the score of one has no mean. ``samples`` and ``errors`` count
        tasks without any score too.
    """
    shared = [name for name in _KEY if name != "task"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    scored: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for entry in _by_category(records):
        group = f"{entry['category']}: {entry['value']}"
        groups[(group, *(entry[name] for name in shared))].append(entry)
        if entry["score"] is not None:
            scored[group, entry["benchmark"], entry["length"]].add(entry["task"])
    means = []
    for key, members in groups.items():
        column = dict(zip(("group", *shared), key, strict=True))
        scores = [entry["score"] for entry in members if entry["score"] is not None]
        if scores and len(scores) == len(scored[column["group"], column["benchmark"], column["length"]]):
            counts = {name: sum(entry[name] for entry in members) for name in ("samples", "errors")}
            means.append({**column, "score": fmean(scores), **counts})
    return means


def _by_category(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of ``category_scores``, and those without a score."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        for category, value in (record.get("categories") or {}).items():
            groups[category, value].append(record)
    kept = (*_KEY, "score", "samples", "errors")
    return [
        {"category": category, "value": value, **{name: entry[name] for name in kept}}
        for (category, value), members in sorted(groups.items(), key=lambda group: _natural(group[0]))
        for entry in summarise(members)
    ]


def _natural(names: tuple[str, str]) -> tuple[Any, ...]:
    """Return a sort key by which numbers within names are in the order of numbers."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", " ".join(names)))


def _shares(name: str, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return each task's share in an average, in which the average's members have the same weight."""
    if name not in groups:
        return {name: 1.0}
    members = [_shares(member, groups) for member in groups[name]]
    return {task: share / len(members) for member in members for task, share in member.items()}


def geometric_mean(perplexities: Sequence[float]) -> float:
    """Return ``exp`` of the mean logarithm, which is the perplexity of the mean log-likelihood."""
    return math.exp(fmean(math.log(value) for value in perplexities))


def column_order(method: str, token_budget: int | None, variant: str = "") -> tuple[bool, str, int, str]:
    """Return the sort key of a method's variant: dense first, then by name, then by budget, then by parameters."""
    return method != DENSE, method, token_budget or 0, variant


def _order(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    column = column_order(entry["method"], entry["token_budget"], entry["variant"])
    return entry["benchmark"], entry["task"], entry["length"] or 0, *column
