"""Rows put together: one entry for each benchmark, task, length, method and budget."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from eval.config import DENSE

_KEY = ("benchmark", "task", "length", "method", "token_budget")


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per benchmark, task, length, method and token budget, with what ``aggregate`` says of its rows.

    Ordered by benchmark, task, length, dense before the other methods, method, budget.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in _KEY)].append(row)
    entries = [{**dict(zip(_KEY, key, strict=True)), **aggregate(group)} for key, group in groups.items()]
    return sorted(entries, key=_order)


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate the rows of one method and budget.

    Returns
    -------
    dict
        ``samples`` (all rows) and ``errors`` (those of them that failed); of the others, each None where no row has it:
        means of ``score`` (0 to 1), ``kv_fraction``, ``realised_budget`` (tokens), ``selection_hit_rate`` (0 to 1) and
        ``prompt_tokens``; ``perplexity`` as the geometric mean, every row with the same weight; medians of
        ``ttft_seconds`` and ``tpot_ms``; the largest ``peak_memory_bytes``.
    """
    measured = [row for row in rows if row.get("error") is None]

    def values(name: str) -> list[Any]:
        return [row[name] for row in measured if row.get(name) is not None]

    def mean(name: str) -> float | None:
        return fmean(found) if (found := values(name)) else None

    def middle(name: str) -> float | None:
        return float(median(found)) if (found := values(name)) else None

    return {
        "samples": len(rows),
        "errors": len(rows) - len(measured),
        "score": mean("score"),
        "perplexity": geometric_mean(found) if (found := values("perplexity")) else None,
        "kv_fraction": mean("kv_fraction"),
        "realised_budget": mean("realised_budget"),
        "selection_hit_rate": mean("selection_hit_rate"),
        "ttft_seconds": middle("ttft_seconds"),
        "tpot_ms": middle("tpot_ms"),
        "prompt_tokens": mean("prompt_tokens"),
        "peak_memory_bytes": max(values("peak_memory_bytes"), default=None),
    }


def geometric_mean(perplexities: Sequence[float]) -> float:
    """``exp`` of the mean logarithm: the perplexity that belongs to the mean likelihood."""
    return math.exp(fmean(math.log(value) for value in perplexities))


def column_order(method: str, token_budget: int | None) -> tuple[bool, str, int]:
    """Sort key of a method and its budget: dense first, then by name, then by budget."""
    return method != DENSE, method, token_budget or 0


def _order(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    column = column_order(entry["method"], entry["token_budget"])
    return entry["benchmark"], entry["task"], entry["length"] or 0, *column
