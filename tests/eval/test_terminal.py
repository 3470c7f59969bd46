"""Text from data files and models on the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eval.comparison_table import paper_table
from eval.speed_table import speed_table
from eval.tables import Paper
from eval.terminal import on_record, progress, summary_table


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_folders_devices_and_papers_are_shown_unchanged() -> None:
    summary = {
        "table": [],
        "averages": [],
        "harness_seconds": 1,
        "model_seconds": 0,
        "device": "CPU [/a]",
        "dtype": "float32",
    }
    text = printed(summary_table(summary, "out[/b]\x1b[31m"))
    assert "CPU [/a]" in text
    assert r"out[/b]\x1b[31m" in text
    assert "[/c] :smile:" in printed(paper_table([], Paper("[/c] :smile:", "2406.10774", "Table 1", "a note")))
    speed = {
        "settings": {"model": "a[/d]", "dtype": "float32", "repeats": 1, "new_tokens": 2},
        "machine": {"device": "[/e]"},
        "ttft_covers": "all",
        "memory_measures": "RSS",
        "results": [],
    }
    assert "a[/d] (float32, [/e])" in printed(speed_table(speed))


def test_every_figure_of_a_summary_is_under_its_name() -> None:
    method = {"method": "quest", "token_budget": 64, "variant": "page_size=8", "samples": 3, "errors": 1}
    figures = {"score": 0.5, "kv_fraction": 0.25, "perplexity": None, "ttft_seconds": 2.125, "tpot_ms": 7.5}
    times = {"context_seconds": 2.0, "first_token_seconds": 0.125}
    entries = [{"task": "qa", "length": 4096} | method | figures | times]
    totals = {"harness_seconds": 1, "model_seconds": 2, "device": "CPU", "dtype": "float32"}
    entries[0]["scores"] = {"levenshtein": 0.5, "difflib": 0.25}
    averages = [{"group": "QA", "length": 4096, "score": 0.5, "samples": 3, "errors": 1} | method]
    table = summary_table({"table": entries, **totals, "averages": averages}, "out")
    cells = {str(column.header): str(next(iter(column.cells))) for column in table.columns}
    place = {"task": "qa", "length": "4,096", "method": "quest page_size=8", "budget": "64", "samples": "3 (1 errors)"}
    shown = {"score": "50.0%", "KV read": "25.0%", "TTFT, s": "2.12", "TPOT, ms": "7.5"}
    assert "qa, quest 64 page_size=8: levenshtein 50.0%, difflib 25.0% (the table has the first)" in printed(table)
    assert [str(next(reversed(list(column.cells)))) for column in table.columns][:6] == [
        "QA",
        *list(place.values())[1:],
        "50.0%",
    ]
    assert cells == place | shown | {"context, s": "2.00", "question, s": "0.125"}


def test_a_records_error_is_one_harmless_line(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"task": "filler", "sample_id": "a\x1b[2J", "method": "quest", "error": "ValueError: one\n\x1b[31mtwo"}
    on_record(lambda *_: None)(1, 2, record)
    assert capsys.readouterr().err == "filler a\\x1b[2J quest: ValueError: one \\x1b[31mtwo\n"


def test_a_progress_bars_label_is_harmless(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("passkey -> out\x1b[2J[/x]", is_shown=True) as update:
        update(2, 2)
    assert capsys.readouterr().err.startswith(r"passkey -> out\x1b[2J[/x]: 2 of 2 in 0.")
    monkeypatch.setattr("eval.terminal.moves_cursor", lambda _: True)
    with progress("passkey -> out\x1b[2J[/x]", is_shown=True) as update:
        update(1, 2)
    assert r"out\x1b[2J[/x]" in capsys.readouterr().err


def test_in_a_pipe_the_time_left_is_said_once_and_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 4.0, 12.0, 15.0, 20.0])
    monkeypatch.setattr("eval.terminal.time.perf_counter", lambda: next(clock))
    with progress("passkey", is_shown=True) as update:
        for done in (6, 7, 8, 9, 10):  # six rows were there already
            update(done, 10)
    assert capsys.readouterr().err.splitlines() == [
        "passkey: 8 of 10, about 10 s left",
        "passkey: 10 of 10 in 20.0 s",
    ]


def test_a_process_that_does_not_talk_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("passkey", is_shown=False) as update:
        update(2, 2)
    assert capsys.readouterr().err == ""
