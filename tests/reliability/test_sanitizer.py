"""Kernels under compute-sanitizer: what is read from its logs, and what is run."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.reliability import sanitizer
from tests.reliability.__main__ import app
from tests.reliability.sanitizer import Outcome, check, log_of, op_tests, outcome, with_run
from tests.reliability.tables import sanitizer_table

FILE = "codes/test_mass.py"
CLEAN = (
    "========= COMPUTE-SANITIZER\n....\n4 passed, 5 deselected in 66.52s (0:01:06)\n========= ERROR SUMMARY: 0 errors\n"
)
RACE = (
    "========= COMPUTE-SANITIZER\n"
    "========= Error: Race reported between Write access at a_kernel+0x10 in a.py:135\n"
    "=================== 1 failed, 28 passed in 113.12s (0:01:53) ===================\n"
    "========= RACECHECK SUMMARY: 4 hazards displayed (3 errors, 1 warnings)\n"
)


def test_what_is_read_from_a_log() -> None:
    assert outcome("memcheck", FILE, CLEAN) == Outcome("memcheck", FILE, 4, 0, 0, 66.52)
    assert outcome("racecheck", FILE, RACE) == Outcome("racecheck", FILE, 28, 1, 3, 113.12)


@pytest.mark.parametrize(
    "log", ["", CLEAN.partition("=== ERROR")[0], "========= ERROR SUMMARY: 0 errors\n", "5 deselected in 2.37s\n"]
)
def test_a_run_that_was_ended_or_ran_nothing_has_no_outcome(log: str) -> None:
    assert outcome("memcheck", FILE, log) is None


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for compute-sanitizer: it prints its arguments and the setting of the allocator."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'echo "$@" "no cache: $PYTORCH_NO_CUDA_MEMORY_CACHING" "interpreter: $TRITON_INTERPRET"\n'
        'echo "3 passed in 1.50s"\n'
        'echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_each_tool_runs_each_file_once(tool: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    found = check(("memcheck", "racecheck"), [FILE], logs, jobs=2, seconds=60)
    assert found == [Outcome(name, FILE, 3, 0, 0, 1.5) for name in ("memcheck", "racecheck")]
    memory, races = (log_of(name, FILE, logs).read_text() for name in ("memcheck", "racecheck"))
    assert f"--tool memcheck --target-processes application-only {sys.executable} -m pytest tests/ops/{FILE}" in memory
    assert "-k not cuda_graph no cache: 1 interpreter: \n" in memory
    assert "-p no:cacheprovider -p tests.reliability.part --part 1/1 no cache:  interpreter: \n" in races
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert check(("memcheck", "racecheck"), [FILE], logs, jobs=1, seconds=60) == found


def test_parts_of_a_file_are_one_outcome(tool: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    assert check(("racecheck",), [FILE], logs, jobs=2, seconds=60, parts=3) == [
        Outcome("racecheck", FILE, 9, 0, 0, 4.5)
    ]
    assert [f"--part {part}/3 " in log_of("racecheck", FILE, logs, f"{part}/3").read_text() for part in (1, 2, 3)]
    log_of("racecheck", FILE, logs, "2/3").write_text("")
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert check(("racecheck",), [FILE], logs, jobs=2, seconds=60, parts=3) == []


def test_parts_have_each_test_once(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.parametrize('n', range(7))\ndef test_a(n): pass\ndef test_b(): pass\n"
    (tmp_path / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", str(tmp_path), "-c", "/dev/null", "-p", "tests.reliability.part"]
    command += ["-p", "no:cacheprovider", "-k", "test_a", "-v", "--part"]
    said = [
        subprocess.run([*command, f"{part}/3"], cwd=sanitizer.ROOT, capture_output=True, text=True, check=True).stdout
        for part in (1, 2, 3)
    ]
    ran = [re.findall(r"test_a\[(\d)\] PASSED", each) for each in said]
    assert [len(each) for each in ran] == [3, 2, 2]
    assert sorted(chain.from_iterable(ran)) == list("0123456")
    assert "3 passed, 5 deselected" in said[0]


def test_a_file_that_takes_too_long_is_ended(tool: Path, tmp_path: Path) -> None:
    tool.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child; wait\n")
    assert check(("memcheck",), [FILE], tmp_path / "logs", jobs=1, seconds=1) == []
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail(f"process {child}, which the tool had started, was left running")


def test_without_the_tool_the_error_says_where_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizer.shutil, "which", lambda *args, **options: None)
    with pytest.raises(FileNotFoundError, match="compute-sanitizer is not on PATH"):
        check(("memcheck",), [FILE], tmp_path, jobs=1, seconds=60)


def test_the_command_writes_what_the_table_shows(tool: Path, tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "sanitizer.json"
    logs.mkdir()
    log_of("racecheck", FILE, logs).write_text(RACE)
    arguments = ["sanitizer", "--logs", str(logs), "--out", str(out), "--file", FILE]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert f"racecheck {FILE}: 3 reports, 1 failed tests" in result.output
    assert "3 of 3 came to an end, 1 with reports" in result.output
    of_folder = sum(file.startswith("codes/") for file in op_tests())
    table = sanitizer_table(tmp_path)
    part = f"1 of {of_folder} files"
    assert f"| `codes` | 3 passed, {part} | 28 passed, 1 failed, **3 reports**, {part} | 3 passed, {part} |" in table
    assert "| `quest` | not run | not run | not run |" in table
    assert f"Reports: racecheck in `{FILE}`: 3." in table
    (run,) = json.loads(out.read_text())["runs"]
    assert [row["tool"] for row in run["outcomes"]] == ["memcheck", "racecheck", "synccheck"]


def test_rows_of_what_has_not_run_are_kept(tool: Path, tmp_path: Path) -> None:
    old = {"device": "an older GPU", "date": "2026-01-01", "versions": {"torch": "2"}}
    same_day = {**old, "device": "another GPU"}
    races, memory = (Outcome(name, FILE, 2, 0, 0, 1.0) for name in ("racecheck", "memcheck"))
    runs = with_run([], old, [races, memory])
    runs = with_run(runs, same_day, [replace(memory, tool="synccheck")])
    out = tmp_path / "sanitizer.json"
    out.write_text(json.dumps({"runs": runs}))
    for name in ("memcheck", "racecheck"):
        arguments = ["sanitizer", "--logs", str(tmp_path / name), "--out", str(out), "--file", FILE, "--tool", name]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    after = json.loads(out.read_text())["runs"]
    assert [run["machine"]["device"] for run in after[:1]] == ["another GPU"]
    assert [(row["tool"], row["passed"]) for run in after for row in run["outcomes"]] == [
        ("synccheck", 2),
        ("memcheck", 3),
        ("racecheck", 3),
    ]
    table = sanitizer_table(tmp_path)
    assert "| 3 passed, " in table
    assert "Run on another GPU, 2026-01-01, and " in table


@pytest.mark.parametrize("wrong", [("--tool", "initcheck"), ("--file", "codes/test_nothing.py")])
def test_an_unknown_tool_or_file_is_an_error(wrong: tuple[str, str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sanitizer", "--logs", str(tmp_path), *wrong])
    assert result.exit_code == 2
    assert wrong[1] in result.output


def test_the_files_are_those_of_the_ops() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "tests/ops"], cwd=sanitizer.ROOT, capture_output=True, text=True, check=False
    )
    tracked = {line.removeprefix("tests/ops/") for line in listed.stdout.splitlines()}
    assert FILE in op_tests()
    assert "test_random_shapes.py" in op_tests()
    assert not tracked or {file for file in tracked if file.count("/") == 1 and "/test_" in file} <= set(op_tests())
