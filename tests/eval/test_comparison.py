"""The comparison of a paper's figures with ours: what is compared, what is said of the rest, and how it is shown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from eval.comparison import Comparison, Measured, compare, refusals_of, rows_of_ours
from eval.comparison_table import paper_table, table_report
from eval.config import RunConfig
from eval.markdown import results_tables
from eval.summary import summarise
from eval.table_command import REPORT
from eval.table_runs import Refusal
from eval.tables import Figure, Paper, read_table

MODEL = "example/model-1b"
RUN = RunConfig("ruler", MODEL, tasks=("vt", "cwe"), lengths=(2000,), method=("full", "quest"))


def figure(**values: Any) -> Figure:
    defaults: dict[str, Any] = {
        "benchmark": "passkey",
        "method": "quest",
        "model": MODEL,
        "length": 2000,
        "score": 60.0,
    }
    return Figure(**defaults | values)


def entry(**values: Any) -> dict[str, Any]:
    defaults = {
        "benchmark": "passkey",
        "task": "passkey",
        "length": 2000,
        "method": "quest",
        "token_budget": None,
        "variant": "",
        "samples": 10,
        "errors": 0,
        "score": 0.75,
        "perplexity": None,
        "ttft_seconds": 1.5,
    }
    return defaults | values


def compared(figures: list[Figure], entries: list[dict[str, Any]], model: str = MODEL, **run: Any) -> list[Comparison]:
    return compare(figures, Measured(model, entries, **run))


def printed(table: Table) -> str:
    console = Console(width=240, file=io.StringIO(), record=True)
    console.print(table)
    return " ".join(console.export_text().split())


def line_of(table: Table, word: str) -> str:
    console = Console(width=240, file=io.StringIO(), record=True)
    console.print(table)
    return next(line for line in console.export_text().splitlines() if word in line)


def test_difference_is_ours_minus_the_papers_in_points() -> None:
    (comparison,) = compared([figure()], [entry(errors=1)])
    assert comparison.ours == 75
    assert comparison.difference == 15
    assert (comparison.samples, comparison.errors, comparison.status) == (10, 1, "")


@pytest.mark.parametrize(
    "other",
    [
        {"benchmark": "needle"},
        {"length": 4000},
        {"length": None},
        {"method": "full"},
        {"token_budget": 256},
        {"variant": "page_size=32"},
        {"score": None, "errors": 10},
    ],
    ids=str,
)
def test_another_measurement_is_not_compared(other: dict[str, Any]) -> None:
    (comparison,) = compared([figure()], [entry(**other)])
    assert comparison.ours is None
    assert comparison.difference is None
    assert comparison.status == "not measured"


def test_compares_what_summarise_gives() -> None:
    record = dict.fromkeys(("kv_fraction", "realised_budget", "ttft_seconds", "tpot_ms", "peak_memory_bytes"))
    record |= {"prompt_tokens": 2000, "error": None, "benchmark": "passkey", "task": "passkey", "length": 2000}
    record |= {"method": "quest", "token_budget": 256}
    entries = summarise([record | {"score": score} for score in (1.0, 0.0, 0.0, 1.0)])
    (comparison,) = compared([figure(token_budget=256)], entries)
    assert (comparison.ours, comparison.difference, comparison.samples) == (50, -10, 4)


def test_mean_needs_all_of_the_papers_tasks() -> None:
    mean = figure(benchmark="ruler", tasks=("vt", "cwe"))
    entries = [entry(benchmark="ruler", task=task, score=score) for task, score in (("vt", 0.5), ("cwe", 0.9))]
    other = entry(benchmark="ruler", task="fwe", score=0.0)
    assert compared([mean], [*entries, other])[0].ours == pytest.approx(70)
    assert compared([mean], [entries[0], other])[0].ours is None
    assert compared([mean], [entries[0], entries[1] | {"score": None}])[0].ours is None


def test_mean_over_lengths_needs_each_task_at_each_length() -> None:
    mean = figure(benchmark="ruler", tasks=("vt", "cwe"), length=None, lengths=(4000, 8000))
    grid = [(task, length) for task in ("vt", "cwe") for length in (4000, 8000)]
    scores = (0.1, 0.2, 0.3, 0.4)
    entries = [
        entry(benchmark="ruler", task=task, length=length, score=score)
        for (task, length), score in zip(grid, scores, strict=True)
    ]
    (comparison,) = compared([mean], entries, own_lengths=(4000, 8000), lengths={4000: 4000, 8000: 8000})
    assert comparison.ours == pytest.approx(25)
    (partial,) = compared([mean], entries[:3], own_lengths=(4000, 8000), lengths={4000: 4000, 8000: 8000})
    assert partial.ours is None


def test_mean_of_perplexities_is_geometric() -> None:
    mean = figure(benchmark="pg19", score=None, perplexity=7.0)
    entries = [entry(benchmark="pg19", task=task, score=None, perplexity=p) for task, p in (("a", 4.0), ("b", 9.0))]
    (comparison,) = compared([mean], entries)
    assert comparison.ours == pytest.approx(6)
    assert comparison.difference == pytest.approx(-1)
    assert "lower is better" in printed(paper_table([comparison]))


def test_times_are_compared_in_seconds_and_name_our_device() -> None:
    (comparison,) = compared([figure(score=None, seconds=1.2345)], [entry()])
    assert comparison.ours == 1.5
    table = paper_table([comparison], device="a GPU of ours")
    assert re.search(r"1\.23[45]\W+1\.500\W+\+0\.26[56]", line_of(table, "quest"))
    assert "ours on a GPU of ours" in printed(table)


def test_our_other_rows_of_a_table_of_times_are_times() -> None:
    entries = [entry(benchmark="ruler", length=2000), entry(benchmark="ruler", length=32000, ttft_seconds=2.25)]
    measured = Measured(MODEL, entries, own_lengths=(2000, 32000))
    found = compare([figure(benchmark="ruler", score=None, seconds=1.0)], measured)
    (ours,) = rows_of_ours(RUN, measured, found)
    assert (ours.figure.length, ours.ours) == (32000, 2.25)
    assert "2.250" in line_of(paper_table([*found, ours]), "32,000")


def test_missing_methods_are_shown_without_our_figure() -> None:
    figures = [figure(), figure(method="retrieval_attention", score=3.0)]
    comparisons = compared(figures, [entry(), entry(method="full")])
    assert [comparison.ours for comparison in comparisons] == [75, None]
    table = paper_table(comparisons, Paper("A [bold] title", "2406.10774", "Table 1", "read on [page] 5"))
    row = line_of(table, "retrieval_attention")
    assert "3.00" in row
    assert "not here yet" in row
    text = printed(table)
    assert "not here yet: retrieval_attention" in text
    assert "+15.00" in text
    assert "A [bold] title (arXiv 2406.10774), Table 1" in text
    assert "read on [page] 5" in text
    assert "Another model" not in text


def test_another_model_is_compared_with_all_figures_and_named() -> None:
    figures = [figure(), figure(model="example/model-2b", score=90.0)]
    other = compared(figures, [entry()], "smollm2")
    assert [comparison.difference for comparison in other] == [15, -15]
    text = printed(paper_table(other))
    assert "ours is smollm2, the paper's example/model-1b, example/model-2b" in text


def test_a_model_of_the_paper_is_compared_with_its_own_figures_only() -> None:
    figures = [figure(), figure(model="example/model-2b", score=90.0)]
    assert [comparison.ours for comparison in compared(figures, [entry()])] == [75, None]


def test_another_length_is_compared_and_named() -> None:
    (comparison,) = compared([figure(length=10_000)], [entry()], lengths={10_000: 2000})
    assert comparison.difference == 15
    assert "ours is 2,000 tokens, the paper's 10,000" in printed(paper_table([comparison]))
    (comparison,) = compared([figure(length=None)], [entry()], own_lengths=(2000,))
    assert comparison.difference == 15
    assert "ours is 2,000 tokens, the paper's each sample's own" in printed(paper_table([comparison]))


def test_another_budget_is_compared_and_named() -> None:
    rows = {("quest", 4096, ""): ("quest", 256, "")}
    (comparison,) = compared([figure(token_budget=4096)], [entry(token_budget=256)], rows=rows)
    assert comparison.difference == 15
    assert "quest has 256 tokens here, and 4,096 there" in printed(paper_table([comparison]))


def test_failed_samples_are_counted_apart_with_the_first_reason() -> None:
    refusals = [Refusal("quest", "OutOfMemoryError: 3 [GiB]", None, "", "passkey", 2000)]
    table = paper_table(compared([figure()], [entry(samples=10, errors=4)], refusals=refusals))
    assert "Some samples failed" in printed(table)
    assert re.search(r"\+15\.00\W+6\W+OutOfMemoryError: 3 \[GiB\]", line_of(table, "quest"))


def test_a_row_that_cannot_run_says_why_and_the_others_are_compared() -> None:
    refusals = [Refusal("snapkv", "snapkv needs queries", 512), Refusal("quest", "budget too small", 16)]
    figures = [figure(), figure(method="snapkv", token_budget=512), figure(method="snapkv", token_budget=1024)]
    found = compared(figures, [entry()], refusals=refusals)
    assert [(each.status, each.why) for each in found] == [
        ("", ""),
        ("cannot run", "snapkv needs queries"),
        ("not measured", ""),
    ]
    assert "snapkv needs queries" in line_of(paper_table(found), "512")


def test_rows_of_ours_are_shown_with_their_means_beside_the_figures() -> None:
    entries = [
        entry(benchmark="ruler", task=task, method=method, token_budget=budget, score=score)
        for task, score in (("vt", 0.5), ("cwe", 0.9))
        for method, budget in (("full", None), ("quest", 256))
    ]
    measured = Measured(MODEL, entries, own_lengths=(2000,))
    found = compare([figure(benchmark="ruler", method="full", tasks=("vt", "cwe"))], measured)
    ours = rows_of_ours(RUN, measured, found)
    assert [(each.figure.method, each.figure.task, each.ours) for each in ours] == [
        ("quest", "vt", 50.0),
        ("quest", "cwe", 90.0),
        ("quest", None, 70.0),
    ]
    assert all(each.difference is None for each in ours)
    table = paper_table(ours)
    assert re.search(r"256\W+70\.00", line_of(table, "mean"))
    assert "no figures of the paper" in printed(table)


def test_our_mean_is_shown_where_the_paper_has_every_task_but_none() -> None:
    entries = [entry(benchmark="ruler", task=task, score=score) for task, score in (("vt", 0.5), ("cwe", 0.9))]
    measured = Measured(MODEL, entries, own_lengths=(2000,))
    each_task = [figure(benchmark="ruler", task=task) for task in ("vt", "cwe")]
    (mean,) = rows_of_ours(RUN, measured, compare(each_task, measured))
    assert (mean.figure.task, mean.ours, mean.difference) == (None, 70.0, None)
    wider = figure(benchmark="ruler", tasks=("vt", "cwe", "fwe"))  # a mean that is not measured here
    assert rows_of_ours(RUN, measured, compare([*each_task, wider], measured)) == []


def test_rows_of_ours_that_cannot_run_say_why_once() -> None:
    refusals = [
        Refusal("h2o", "h2o must see the prefill", 256),
        Refusal("quest", "of a sample", 256, "", "vt", 2000),
        Refusal("tova", "already compared"),
    ]
    entries = [entry(benchmark="ruler", task="vt", token_budget=256, score=None, errors=10)]
    measured = Measured(MODEL, entries, own_lengths=(2000,), refusals=refusals)
    found = compare([figure(benchmark="ruler", method="tova")], measured)
    assert [each.why for each in found] == ["already compared"]
    ours = rows_of_ours(RUN, measured, found)
    assert [(each.figure.method, each.figure.token_budget, each.why) for each in ours] == [
        ("quest", 256, "of a sample"),
        ("h2o", 256, "h2o must see the prefill"),
    ]
    assert {each.status for each in ours} == {"cannot run"}


def test_refusals_have_the_first_error_of_each_row_task_and_length() -> None:
    def record(sample: str, error: str | None, task: str = "vt") -> dict[str, Any]:
        row = {"method": "quest", "token_budget": 256, "variant": "", "task": task, "length": 2000}
        return {**row, "sample_id": sample, "error": error}

    first = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"
    records = [record("a", None), record("b", first), record("c", "second"), record("d", "other task", task="cwe")]
    assert refusals_of(records) == [
        Refusal("quest", "OutOfMemoryError: CUDA out of memory", 256, "", "vt", 2000),
        Refusal("quest", "other task", 256, "", "cwe", 2000),
    ]


def test_table_without_figures_says_why() -> None:
    text = printed(paper_table([], read_table("squeezed-3").paper))
    assert "no copy of the table could be read" in text
    assert "no figures of the paper" in text


def test_the_report_of_a_table_becomes_markdown(tmp_path: Path) -> None:
    refusals = [Refusal("tova", "a | b", 512)]
    found = compared([figure(), figure(method="tova", token_budget=512)], [entry()], refusals=refusals)
    paper = Paper("A title", "2406.10774", "Table 1", "read on page 5")
    report = table_report(found, "quest-1", paper, "python -m eval table quest-1 --limit 2", "a GPU of ours")
    folder = tmp_path / "tables" / "quest-1-smollm2"
    folder.mkdir(parents=True)
    (folder / REPORT).write_text(json.dumps(report), encoding="utf-8")
    page = results_tables(tmp_path)
    assert "## A title (arXiv 2406.10774), Table 1" in page
    assert "`python -m eval table quest-1 --limit 2`, on a GPU of ours" in page
    assert "| 60.00 | 75.00 | +15.00 | 10 |  |" in page
    assert r"| 60.00 | cannot run | – | – | a \| b |" in page  # noqa: RUF001
    assert "read on page 5" in page
