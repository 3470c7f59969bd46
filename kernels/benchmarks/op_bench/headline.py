"""The README's table: measurements, each from a results file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from op_bench import overview
from op_bench.performance import read_speed
from op_bench.plot import STEPS
from op_bench.registry import CHUNK_STEP
from op_bench.results import Record, ResultsError, read, shape_of
from op_bench.shapes import length_label
from op_bench.tables import table

STEP_LENGTH = CONTEXT = 131072
CHUNK_KEYS = 1048576
SPEED = Path("eval/results/speed/llama-3.1-8b-graph-nvidia-h200.json")
SPEED_BUDGET = 2048
FOUND_LENGTH = 30000
FOUND = (("quest", 2048), ("tokenselect", 256))
"""Methods and budgets whose accuracy the table shows."""
NEEDLES = Path("eval/results/results-keycodes-bytes")
NEEDLE_MODEL = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
NEEDLE_METHODS = (("quest", 1024), ("keycodes", 1024), ("rabitqcache", None))
"""Methods and budgets whose share of found needles the table shows; None where queries decide how much is read."""
MARKS = re.compile(r"(<!-- measured: [^\n]*-->\n).*?(<!-- measured: end -->\n)", re.DOTALL)


def headline(root: Path) -> str:
    """Return the table as Markdown, from the results under ``root``.

    Raises
    ------
    ResultsError
        A results file cannot be read or lacks a measurement.
    """
    try:
        report = read(root / overview.TIMES)
        rows = [_step(report), _generate(root), _chunk(report), *_accuracy(root), *_needles(root)]
    except (KeyError, StopIteration) as error:
        raise ResultsError(f"the results lack a measurement of the README's table: {error!r}") from error
    return table(("measured", "dense", "sparse", "ratio"), rows, left=1)


def update_readme(path: Path, root: Path) -> None:
    """Replace the table between its marks in a file.

    Raises
    ------
    ResultsError
        As for :func:`headline`, or the file has no marks.
    OSError
        The file cannot be read or written.
    """
    text = path.read_text(encoding="utf-8")
    if not MARKS.search(text):
        raise ResultsError(f"{path} lacks the table's marks '<!-- measured: ... -->' and '<!-- measured: end -->'")
    shown = f"\n{headline(root)}\n"
    path.write_text(MARKS.sub(lambda found: found[1] + shown + found[2], text), encoding="utf-8")


def _step(report: Record) -> list[str]:
    found = {(entry["op"], entry["variant"]): entry for entry in report["entries"] if _is_step(entry)}
    entry = next(found[step] for step in reversed(STEPS) if step in found)  # the later is preferred, as in the figures
    against = entry["against"]["layers"]
    times = [f"{against['best_us']:.0f} µs", f"{entry['times']['layers']['median']:.1f} µs"]
    what = f"decode step of one layer, {length_label(STEP_LENGTH)} tokens cached: Quest"
    return [what, *times, f"{against['ratio']:.1f}x"]


def _is_step(entry: Record) -> bool:
    is_step: bool = STEPS.get((entry["op"], entry["variant"])) == "Quest" and bool(entry["times"])
    shape = shape_of(entry)
    return is_step and (shape.configuration, shape.length) == (overview.CONFIGURATION, STEP_LENGTH)


def _generate(root: Path) -> list[str]:
    speed = read_speed(root / SPEED)
    sides = next(result["sides"] for result in speed["results"] if result["context"] == CONTEXT)
    side = next(side for side in sides if side["name"] == f"quest, {SPEED_BUDGET}, CUDA graph, fused")
    dense = next(other for other in sides if other["name"] == side["ratio"]["tpot_against"])
    times = [f"{found['tpot_ms']['median']:.1f} ms" for found in (dense, side)]
    what = (
        f"one token of `generate()`, Llama 3.1 8B's shape, {length_label(CONTEXT)} tokens cached: Quest, "
        "`DecodeAhead(cuda_graph=True, fuse=True)`"
    )
    return [what, *times, f"{side['ratio']['tpot']:.1f}x"]


def _chunk(report: Record) -> list[str]:
    entry = next(entry for entry in report["entries"] if _is_chunk(entry))
    against = entry["against"]["layers"]
    times = [f"{against['best_us'] / 1e3:.1f} ms", f"{entry['times']['layers']['median'] / 1e3:.2f} ms"]
    shape = shape_of(entry)
    what = f"prefill of {shape.queries} tokens in one layer, {length_label(CHUNK_KEYS)} tokens cached: TokenSelect"
    return [what, *times, f"{against['ratio']:.0f}x"]


def _is_chunk(entry: Record) -> bool:
    is_chunk: bool = (entry["op"], entry["variant"]) == CHUNK_STEP and bool(entry["times"])
    return is_chunk and shape_of(entry).length == CHUNK_KEYS


def _accuracy(root: Path) -> list[list[str]]:
    found: dict[tuple[str, Any], list[Record]] = {}
    for path in sorted((root / "eval/results" / overview.SWEEP).glob("*/summary.json")):
        for entry in overview.read_summary(path)["table"]:
            if entry["length"] == FOUND_LENGTH:
                found.setdefault((entry["method"], entry["token_budget"]), []).append(entry)
    (dense,) = (entries for (method, _), entries in found.items() if method == "full")
    rows = []
    for method, budget in FOUND:
        entries = found[method, budget]
        fraction = sum(entry["kv_fraction"] for entry in entries) / len(entries)
        scores = [100 * sum(entry["score"] for entry in side) / len(side) for side in (dense, entries)]
        what = f"retrieval from {FOUND_LENGTH:,} tokens of books: {overview.NAMES[method]} reading {budget:,} tokens"
        rows.append([what, *(f"{score:.0f} %" for score in scores), f"{100 * fraction:.0f} % of the bytes"])
    return rows


def _needles(root: Path) -> list[list[str]]:
    """Return a row for each method: the mean score of the largest model's samples with needles, and the bytes read."""
    entries = [
        entry
        for path in sorted((root / NEEDLES).glob("*/summary.json"))
        if (summary := overview.read_summary(path))["model"] == NEEDLE_MODEL
        for entry in summary["table"]
        if entry["benchmark"] != "longbench" and not entry["variant"]
    ]
    rows = []
    dense = _mean(entries, "score", "full", None)
    for method, budget in NEEDLE_METHODS:
        score, fraction = (_mean(entries, name, method, budget) for name in ("score", "kv_fraction"))
        what = f"passkeys, needles and one of many keys, 16K to 30K tokens: {overview.NAMES[method]}"
        if budget is not None:
            what += f" reading {budget:,}"
        rows.append([what, f"{100 * dense:.0f} %", f"{100 * score:.0f} %", f"{100 * fraction:.0f} % of the bytes"])
    return rows


def _mean(entries: list[Record], name: str, method: str, budget: int | None) -> float:
    of_task: dict[tuple[Any, ...], Record] = {}  # every run has dense attention, of which one for each task counts
    for entry in entries:
        if entry["method"] == method and entry["token_budget"] in (budget, None):
            of_task.setdefault(tuple(entry[part] for part in ("benchmark", "task", "length")), entry)
    samples: int = sum(entry["samples"] for entry in of_task.values())
    return float(sum(entry[name] * entry["samples"] for entry in of_task.values()) / samples)
