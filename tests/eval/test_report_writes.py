"""A report is written file by file, each whole or not at all."""

import errno
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from eval.errors import EvalError
from eval.report import budgets, write_report
from eval.report.plots import Picture
from tests.eval.report_records import longbench_records, write_records


def fail_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full when so many files have been written."""
    calls = iter(range(1000))

    def flush(name: Path) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hf_sparse_attn.whole_file._flush", flush)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("last", [False, True], ids=["picture", "page"])
def test_a_full_disk_leaves_the_former_report(last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path / "run" / "rows.jsonl", longbench_records())
    before = contents(write_report(tmp_path).parent)
    assert len(before) > 1
    write_records(tmp_path / "run" / "rows.jsonl", longbench_records()[:-3])
    fail_at(len(before) - 1 if last else 0, monkeypatch)
    with pytest.raises((EvalError, OSError), match="No space left"):
        write_report(tmp_path)
    after = contents(tmp_path / "report")
    assert after.keys() == before.keys()
    assert after["index.html"] == before["index.html"]
    if not last:
        assert after == before


def test_a_full_disk_leaves_the_former_picture_of_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture("budget", "caption", "alt", Figure())
    monkeypatch.setattr(budgets, "budget_picture", lambda *_: picture)
    path = tmp_path / "budget.png"
    path.write_bytes(b"former")
    fail_at(0, monkeypatch)
    with pytest.raises(EvalError, match=r"budget\.png cannot be written: .*No space left"):
        budgets.write_picture({}, tmp_path)
    assert contents(tmp_path) == {"budget.png": b"former"}
