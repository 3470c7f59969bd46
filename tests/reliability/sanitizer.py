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
from dataclasses import asdict, dataclass
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
    """Return the files of the ops' tests that launch kernels, below ``tests/ops``."""
    return sorted(path.relative_to(OPS).as_posix() for path in OPS.glob("*/test_*.py"))


def outcome(tool: str, file: str, log: str) -> Outcome | None:
    """Read what a tool and pytest wrote; None if one of them was ended before its summary, or nothing ran."""
    reports, tests = _REPORTS.findall(log), _TESTS.findall(log)
    if not reports or not tests or not any(tests[-1][:2]):
        return None
    failed, passed, seconds = tests[-1]
    return Outcome(tool, file, int(passed or 0), int(failed or 0), int("".join(reports[-1])), float(seconds))


def check(tools: Sequence[str], files: Sequence[str], logs: Path, jobs: int, seconds: float) -> list[Outcome]:
    """Run tools over files, several at once, and return the outcomes of those that came to an end.

    A file whose log has its summaries already is not run again.

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
        A file that takes longer is ended.

    Raises
    ------
    FileNotFoundError
        ``compute-sanitizer`` is not installed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        runs = [
            pool.submit(_checked, tool, file, log_of(tool, file, logs), seconds) for tool in tools for file in files
        ]
        return [found for run in runs if (found := run.result()) is not None]


def log_of(tool: str, file: str, logs: Path) -> Path:
    """Return the log of a tool's run over a file."""
    return logs / f"{tool}-{file.replace('/', '-').removesuffix('.py')}.log"


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return outcomes as JSON has them."""
    return [asdict(each) for each in outcomes]


def _checked(tool: str, file: str, log: Path, seconds: float) -> Outcome | None:
    done = outcome(tool, file, log.read_text(encoding="utf-8")) if log.exists() else None
    if done is not None:
        return done
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise FileNotFoundError("compute-sanitizer is not on PATH and not in /usr/local/cuda/bin; it comes with CUDA")
    command = [program, "--tool", tool, "--target-processes", "application-only", sys.executable, "-m", "pytest"]
    command += [f"tests/ops/{file}", "-m", SELECTED, "-q", "-p", "no:cacheprovider"]
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
