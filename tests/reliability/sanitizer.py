"""The tests of the kernels under NVIDIA's compute-sanitizer, file by file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "tests/ops"
TOOLS = ("memcheck", "racecheck", "synccheck")
SELECTED = "not grid"
"""pytest's ``-m``: the marked cases repeat what others cover."""
WITHOUT_GRAPHS = "not cuda_graph"
"""pytest's ``-k`` for memcheck, which gets an allocation for each tensor: a CUDA graph cannot record one."""

_REPORTS = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error)")
_TESTS = re.compile(r"^(?:=+ )?(?:(\d+) failed, )?(?:(\d+) passed)?.* in ([\d.]+)s", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """A tool's report on a file of tests."""

    tool: str
    file: str
    """Below ``tests/ops``, such as ``codes/test_mass.py``."""
    passed: int
    failed: int
    reports: int
    """Errors of the tool: accesses out of bounds, races, threads that missed a barrier."""
    seconds: float


def op_tests() -> list[str]:
    """Return the files of tests that launch kernels, below ``tests/ops``: those of the ops, and their random shapes."""
    of_ops = (path.relative_to(OPS).as_posix() for path in OPS.glob("*/test_*.py"))
    return [*sorted(of_ops), "test_random_shapes.py"]


def outcome(tool: str, file: str, log: str) -> Outcome | None:
    """Read what a tool and pytest wrote; None if one of them was ended before its summary, or nothing ran."""
    reports, tests = _REPORTS.findall(log), _TESTS.findall(log)
    if not reports or not tests or not any(tests[-1][:2]):
        return None
    failed, passed, seconds = tests[-1]
    return Outcome(tool, file, int(passed or 0), int(failed or 0), int("".join(reports[-1])), float(seconds))


def check(
    tools: Sequence[str], files: Sequence[str], logs: Path, jobs: int, seconds: float, parts: int = 1
) -> list[Outcome]:
    """Run tools over files, several at once, and return the outcomes of those that came to an end.

    A file, or a part of it, whose log has its summaries already is not run again.

    Parameters
    ----------
    tools
        Some of :data:`TOOLS`.
    files
        Some of :func:`op_tests`.
    logs
        The folder of the logs.
    jobs
        Processes at once.
    seconds
        A file, or a part of it, that takes longer is ended.
    parts
        Processes that share the tests of a file.

    Raises
    ------
    FileNotFoundError
        ``compute-sanitizer`` is not installed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        runs = [
            [pool.submit(_checked, tool, file, f"{part}/{parts}", logs, seconds) for part in range(1, parts + 1)]
            for tool in tools
            for file in files
        ]
        return [whole for parts_of_file in runs if (whole := _whole([run.result() for run in parts_of_file]))]


def log_of(tool: str, file: str, logs: Path, part: str = "1/1") -> Path:
    """Return the log of a tool's run over a file, or over a part of it such as ``"2/4"``."""
    end = "" if part == "1/1" else f"-{part.replace('/', '-of-')}"
    return logs / f"{tool}-{file.replace('/', '-').removesuffix('.py')}{end}.log"


def with_run(
    runs: Sequence[dict[str, Any]], machine: dict[str, Any], outcomes: Sequence[Outcome]
) -> list[dict[str, Any]]:
    """Add outcomes to those of earlier runs, as JSON has them.

    Parameters
    ----------
    runs
        Each has ``"machine"``, and ``"outcomes"``: rows with the fields of :class:`Outcome`. Rows of a tool and a file
        that have run again are left out of the result.
    machine
        The machine, its versions and the date.
    outcomes
        What :func:`check` returned.
    """
    again = {(each.tool, each.file) for each in outcomes}
    kept = [
        {**run, "outcomes": [row for row in run["outcomes"] if (row["tool"], row["file"]) not in again]} for run in runs
    ]
    kept.append({"machine": machine, "outcomes": [asdict(each) for each in outcomes]})
    return [run for run in kept if run["outcomes"]]


def _whole(parts: Sequence[Outcome | None]) -> Outcome | None:
    """Return the outcome of a file from those of its parts; None if one of them did not come to an end."""
    ended = [part for part in parts if part is not None]
    if len(ended) < len(parts):
        return None
    counts = {
        name: round(sum(getattr(part, name) for part in ended), 2)
        for name in ("passed", "failed", "reports", "seconds")
    }
    return replace(ended[0], **counts)


def _checked(tool: str, file: str, part: str, logs: Path, seconds: float) -> Outcome | None:
    log = log_of(tool, file, logs, part)
    done = outcome(tool, file, log.read_text(encoding="utf-8")) if log.exists() else None
    if done is not None:
        return done
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise FileNotFoundError("compute-sanitizer is not on PATH and not in /usr/local/cuda/bin; it comes with CUDA")
    command = [program, "--tool", tool, "--target-processes", "application-only", sys.executable, "-m", "pytest"]
    command += [f"tests/ops/{file}", "-m", SELECTED, "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.reliability.part", "--part", part]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if tool == "memcheck":
        command += ["-k", WITHOUT_GRAPHS]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else PyTorch's blocks hide accesses past a tensor's end
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # pytest too, which the tool has started
            process.wait()
            return None
    return outcome(tool, file, log.read_text(encoding="utf-8"))
