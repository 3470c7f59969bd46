"""The README's table agrees with the results."""

from pathlib import Path

import pytest
from op_bench import headline, overview
from op_bench.results import ResultsError, read

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_agrees_with_the_results():
    shown = headline.MARKS.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert headline.headline(ROOT) in shown[0], "run: python kernels/benchmarks/run.py --overview"
    assert shown[0].count("\n|") == 2 + 8


def test_quests_step_is_compared_with_dense_attention_of_the_same_run():
    report = read(ROOT / overview.TIMES)
    (entry,) = (
        entry
        for entry in report["entries"]
        if (entry["op"], entry["variant"], entry["shape"]["name"])
        == ("cluster_step", "clusters", "q32-kv8-d128-b1-128K")
    )
    ratio = entry["against"]["layers"]["best_us"] / entry["times"]["layers"]["median"]
    assert headline.headline(ROOT).splitlines()[2].endswith(f" | {ratio:.1f}x |")


def test_only_the_table_is_rewritten(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- measured: by hand -->\nold\n<!-- measured: end -->\nafter\n")
    headline.update_readme(path, ROOT)
    table = headline.headline(ROOT)
    assert path.read_text() == f"before\n<!-- measured: by hand -->\n\n{table}\n<!-- measured: end -->\nafter\n"


def test_a_file_without_marks_is_not_changed(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("nothing is measured")
    with pytest.raises(ResultsError, match="lacks the table's marks"):
        headline.update_readme(path, ROOT)
    assert path.read_text() == "nothing is measured"


def test_missing_measurements_are_named(monkeypatch):
    monkeypatch.setattr(headline, "CONTEXT", 7)
    with pytest.raises(ResultsError, match="the results lack a measurement of the README's table"):
        headline.headline(ROOT)
