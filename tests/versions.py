"""Run the contracts on the versions that are installed, and record them as a row of ``tests/versions.json``.

``make versions`` runs this in ``.venv``, ``make test-lowest`` in an environment with the lowest versions that
``pyproject.toml`` allows. The table in ``docs/compatibility.md`` is made from the rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests/versions.json"
CONTRACTS = (
    "tests/test_contracts.py",
    "tests/test_compiled.py",
    "tests/patch",
    "tests/cache/test_layer.py",
    "tests/cache/test_masks.py",
)
PACKAGES = {"torch": "PyTorch", "transformers": "Transformers", "triton": "Triton"}
ALL = "all"
"""The row's words for a run over all :data:`CONTRACTS`."""


def installed() -> dict[str, str]:
    """Return the versions that are installed, without local suffixes as ``+cpu``, and the device."""
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            versions[package] = "none"
    return {**versions, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}


def run(selection: str) -> dict[str, int]:
    """Run the contracts; return how many tests passed, failed and were skipped.

    Parameters
    ----------
    selection
        pytest's ``-k`` expression, or :data:`ALL`.

    Raises
    ------
    RuntimeError
        No test ran, or pytest was stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        chosen = [] if selection == ALL else ["-k", selection]
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *chosen, *CONTRACTS]
        code = subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode
        if code not in (0, 1):  # all passed, some failed
            raise RuntimeError(f"pytest ended with exit code {code}: no row is written")
        return counts(report.read_text(encoding="utf-8"))


def counts(report: str) -> dict[str, int]:
    """Return the numbers of passed, failed and skipped tests of a JUnit report."""
    (suite,) = ElementTree.fromstring(report).iter("testsuite")
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"])
    return {"passed": int(suite.attrib["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}


def with_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows with one more, in the place of an earlier one of the same versions and device; lowest first."""
    same = ("python", *PACKAGES, "device")
    others = [other for other in rows if any(other[name] != row[name] for name in same)]
    by = ("transformers", "torch", "python")
    return sorted((*others, row), key=lambda each: [_numbers(each[name]) for name in by])


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".") if part.isdigit()]


def table(path: Path = RESULTS) -> str:
    """Return the rows of a results file as a Markdown table."""
    head = ["Python", *PACKAGES.values(), "device", "tests", "passed", "failed", "date"]
    lines = [head, ["---"] * 6 + ["---:"] * 2 + ["---"]]
    for row in json.loads(path.read_text(encoding="utf-8")):
        tests = row["tests"] if row["tests"] == ALL else f'`-k "{row["tests"]}"`'
        versions = (row[name] for name in ("python", *PACKAGES, "device"))
        lines.append([*versions, tests, str(row["passed"]), str(row["failed"]), row["date"]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> int:
    """Run the contracts and write the row; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-k", dest="selection", default=ALL, help="pytest's expression, for a part of the tests")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results file (default: tests/versions.json)")
    options = parser.parse_args()
    rows = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    row = {**installed(), "tests": options.selection, **run(options.selection), "date": date}
    options.out.write_text(json.dumps(with_row(rows, row), indent=2) + "\n", encoding="utf-8")
    print(f"{options.out}: {row}")
    return int(row["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
