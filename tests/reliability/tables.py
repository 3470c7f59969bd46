"""Tables of the faults, the long runs and the watched kernels, for the documentation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.reliability.sanitizer import TOOLS, Outcome, op_tests

RESULTS = Path(__file__).with_name("results")
OUTCOMES = {
    "unchanged": "as before the call",
    "rebuilt": "as before, prompt finished anew",
    "complete": "as after the call",
    "resumed": "same answer when resumed",
    "refused": "asks for `reset()`",
    "kept": "former file whole",
    "harm": "harm",
}


def fault_table(results: Path = RESULTS) -> str:
    """Return the number of faults by kind and outcome, over all methods and storages."""
    report = json.loads((results / "faults.json").read_text(encoding="utf-8"))
    counts: Counter[tuple[str, str]] = Counter()
    for row in report["counts"]:
        counts[row["kind"], row["outcome"]] += row["cases"]
    outcomes = [outcome for outcome in OUTCOMES if outcome == "harm" or any(at == outcome for _, at in counts)]
    lines = [_row("fault", *(OUTCOMES[outcome] for outcome in outcomes)), _row("---", *["---:"] * len(outcomes))]
    for kind in sorted({kind for kind, _ in counts}):
        lines.append(_row(kind, *(f"{counts[kind, outcome] or ''}" for outcome in outcomes)))
    totals = [sum(n for (_, at), n in counts.items() if at == outcome) for outcome in outcomes]
    lines.append(_row("**all**", *map(str, totals)))
    methods = sorted({row["method"] for row in report["counts"]})
    names = ", ".join(f"`{name}`" for name in methods)
    return "\n".join(lines) + f"\n\n{len(methods)} methods: {names}. {_machine(report)}"


def soak_table(results: Path = RESULTS) -> str:
    """Return what the long runs decoded, what they checked, and their memory after the warm-up and at the end."""
    heads = ("method", "steps", "operations", "checks", "largest error", "resident MiB", "tensors", "objects", "flat")
    lines, machines = [_row(*heads), _row("---", *["---:"] * (len(heads) - 1))], []
    for path in sorted(results.glob("soak-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        machines.append(f"`{report['method']}`: {_machine(report)}")
        first, last = report["samples"][len(report["samples"]) // 4], report["samples"][-1]
        lines.append(
            _row(
                f"`{report['method']}`",
                f"{report['tokens']:,}",
                f"{sum(report['operations'].values()):,}",
                f"{report['checks']:,}",
                f"{report['largest_error']:.0e}",
                f"{first['rss_bytes'] / 2**20:,.0f} to {last['rss_bytes'] / 2**20:,.0f}",
                f"{first['tensors']:,} to {last['tensors']:,}",
                f"{first['objects']:,} to {last['objects']:,}",
                "yes" if report["flat"] else "**no**",
            )
        )
    if not machines:
        raise ValueError(f"{results} holds no soak-*.json: run python -m tests.reliability soak")
    return "\n".join(lines) + f"\n\n{' '.join(machines)}"


def sanitizer_table(results: Path = RESULTS) -> str:
    """Return the number of tests that passed under each tool, by folder, and what the tools reported."""
    runs = json.loads((results / "sanitizer.json").read_text(encoding="utf-8"))["runs"]
    outcomes = [Outcome(**row) for run in runs for row in run["outcomes"]]
    lines = [_row("folder", *TOOLS), _row("---", *["---:"] * len(TOOLS))]
    folders: dict[str, int] = Counter(file.partition("/")[0] for file in op_tests())
    for folder, number in folders.items():
        cells = []
        for tool in TOOLS:
            ended = [each for each in outcomes if each.tool == tool and each.file.partition("/")[0] == folder]
            cells.append(_under_tool(ended, number))
        lines.append(_row(f"`{folder}`", *cells))
    found = [f"{each.tool} in `{each.file}`: {each.reports}" for each in outcomes if each.reports]
    listed = f"Reports: {'; '.join(found)}." if found else "No reports."
    return "\n".join(lines) + f"\n\n{listed} {_machines([run['machine'] for run in runs])}"


def _under_tool(ended: list[Outcome], files: int) -> str:
    if not ended:
        return "not run"
    parts = [f"{sum(each.passed for each in ended)} passed"]
    if failed := sum(each.failed for each in ended):
        parts.append(f"{failed} failed")
    if reports := sum(each.reports for each in ended):
        parts.append(f"**{reports} reports**")
    if len(ended) < files:
        parts.append(f"{len(ended)} of {files} files")
    return ", ".join(parts)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _machine(report: dict[str, dict[str, Any]]) -> str:
    return _machines([report["machine"]])


def _machines(machines: Sequence[dict[str, Any]]) -> str:
    """Say on which devices, when, and with which versions of libraries results were made."""
    days: dict[str, list[str]] = {}
    for machine in machines:
        days.setdefault(machine["device"], []).append(machine["date"])
    devices = ", and ".join(
        f"{device}, {min(dates)}" + (f" to {max(dates)}" if min(dates) < max(dates) else "")
        for device, dates in days.items()
    )
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
        for machine in machines
    )
    return f"Run on {devices}, with {' or '.join(versions)}."
