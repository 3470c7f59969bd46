from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from eval.benchmarks import BENCHMARKS
from eval.comparison import compare, figures_of_run, length_in_place, paper_table, runnable_methods
from eval.config import QUESTION_MODES, read_sweep
from eval.errors import EvalError
from eval.summary import summarise
from eval.tables import CONFIGS, Figure, Paper, config_names, read_paper_file, read_table, table_names
from hf_sparse_attn import METHODS

NAMES = config_names()
MODEL = "example/model-1b"

HEAD = """
paper: {title: A paper, arxiv: "2406.10774", table: Table 1, note: read on page 5}
benchmark: ruler
model: example/model-1b
tasks: [vt, cwe]
"""


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
        "samples": 10,
        "errors": 0,
        "score": 0.75,
        "perplexity": None,
    }
    return defaults | values


def printed(table: Table) -> str:
    console = Console(width=240, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def table_of(folder: Path, text: str) -> Any:
    (folder / "mine.yaml").write_text(HEAD + text, encoding="utf-8")
    return read_paper_file(folder / "mine.yaml")


def test_the_papers_and_the_examples_exist() -> None:
    assert table_names() == ["quest-1", "tokenselect-1", "tokenselect-2"]
    assert {"quest-fig6", "quest-fig7", "squeezed-longbench", "psa-longbench", "smoke", "cpu-sweep"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_files_name_only_what_can_run(name: str) -> None:
    runs = read_sweep(CONFIGS / f"{name}.yaml", {})
    assert set(BENCHMARKS) == {
        "passkey",
        "questpasskey",
        "needle",
        "ruler",
        "longbench",
        "infinitebench",
        "pg19",
        "longanswer",
        "prefixqa",
    }
    assert {run.question for run in runs} <= set(QUESTION_MODES)
    for run in runs:
        benchmark = BENCHMARKS[run.benchmark]
        assert set(run.tasks) <= set(benchmark.tasks)
        assert set(run.options) <= set(benchmark.options)
        runnable, _ = runnable_methods(run.method)
        assert runnable, "a run without a method that exists would measure nothing"


@pytest.mark.parametrize("name", NAMES)
def test_shipped_papers_say_where_their_figures_are_from(name: str) -> None:
    table = read_paper_file(CONFIGS / f"{name}.yaml")
    assert table.name == name
    assert table.path == CONFIGS / f"{name}.yaml"
    if table.paper is None:
        assert not table.figures
        assert name in ("smoke", "cpu-sweep") or name.startswith("results-")
        return
    assert re.fullmatch(r"\d{4}\.\d{5}", table.paper.arxiv)
    assert table.paper.arxiv in table.paper.note
    assert ("read in" if table.figures else "left out") in table.paper.note


@pytest.mark.parametrize("name", NAMES)
def test_shipped_figures_belong_to_a_run_and_are_unique(name: str) -> None:
    figures = read_paper_file(CONFIGS / f"{name}.yaml").figures
    places = [(f.model, f.benchmark, f.task, f.length, f.method, f.token_budget) for f in figures]
    assert len(set(places)) == len(places)
    models = {run.model for run in read_sweep(CONFIGS / f"{name}.yaml", {})}
    for found in figures:
        assert found.benchmark in BENCHMARKS
        assert found.task is None or found.task in BENCHMARKS[found.benchmark].tasks
        assert found.model in models
        assert found.score is None or 0 <= found.score <= 100


def test_quest_1_has_both_parts_of_the_table() -> None:
    figures = read_table("quest-1").figures
    quest = {(f.length, f.token_budget): f.score for f in figures if f.method == "quest"}
    assert [quest[10000, budget] for budget in (32, 64, 128, 256, 512)] == [65, 99, 99, 99, 100]
    assert [quest[100000, budget] for budget in (256, 512, 1024, 2048, 4096)] == [88, 92, 96, 100, 100]
    assert {f.method for f in figures} == {"quest", "h2o", "tova", "streaming_llm"}
    assert len(figures) == 40


def test_tokenselect_averages_are_the_means_of_the_tasks_as_far_as_the_paper_keeps_to_it() -> None:
    table = read_table("tokenselect-1")
    deviating = []
    for mean in (f for f in table.figures if f.task is None):
        row = (mean.model, mean.method, mean.token_budget)
        tasks = [f.value for f in table.figures if f.task and (f.model, f.method, f.token_budget) == row]
        assert len(tasks) == len(mean.tasks) == 9
        if abs(sum(tasks) / 9 - mean.value) > 0.011:
            deviating.append((mean.model.split("/")[1], mean.method))
    assert deviating == [("Meta-Llama-3-8B-Instruct", "tokenselect")]
    assert table.paper is not None
    assert "43.90" in table.paper.note


def test_difference_is_ours_minus_the_papers_in_points() -> None:
    (comparison,) = compare([figure()], [entry(errors=1)], MODEL)
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
        {"score": None, "errors": 10},
    ],
    ids=str,
)
def test_another_measurement_is_not_compared(other: dict[str, Any]) -> None:
    (comparison,) = compare([figure()], [entry(**other)], MODEL)
    assert comparison.ours is None
    assert comparison.difference is None
    assert comparison.status == "not measured"


def test_compares_what_summarise_gives() -> None:
    record = dict.fromkeys(("kv_fraction", "realised_budget", "ttft_seconds", "tpot_ms", "peak_memory_bytes"))
    record |= {"prompt_tokens": 2000, "error": None, "benchmark": "passkey", "task": "passkey", "length": 2000}
    record |= {"method": "quest", "token_budget": 256}
    entries = summarise([record | {"score": score} for score in (1.0, 0.0, 0.0, 1.0)])
    (comparison,) = compare([figure(token_budget=256)], entries, MODEL)
    assert (comparison.ours, comparison.difference, comparison.samples) == (50, -10, 4)


def test_mean_needs_all_of_the_papers_tasks() -> None:
    mean = figure(benchmark="ruler", tasks=("vt", "cwe"))
    entries = [entry(benchmark="ruler", task=task, score=score) for task, score in (("vt", 0.5), ("cwe", 0.9))]
    other = entry(benchmark="ruler", task="fwe", score=0.0)
    assert compare([mean], [*entries, other], MODEL)[0].ours == pytest.approx(70)
    assert compare([mean], [entries[0], other], MODEL)[0].ours is None
    assert compare([mean], [entries[0], entries[1] | {"score": None}], MODEL)[0].ours is None


def test_mean_of_perplexities_is_geometric() -> None:
    mean = figure(benchmark="pg19", score=None, perplexity=7.0)
    entries = [entry(benchmark="pg19", task=task, score=None, perplexity=p) for task, p in (("a", 4.0), ("b", 9.0))]
    (comparison,) = compare([mean], entries, MODEL)
    assert comparison.ours == pytest.approx(6)
    assert comparison.difference == pytest.approx(-1)
    assert "lower is better" in printed(paper_table([comparison]))


def test_missing_methods_are_shown_without_our_figure() -> None:
    figures = [figure(), figure(method="ntk", score=3.0)]
    comparisons = compare(figures, [entry(), entry(method="full")], MODEL)
    assert [comparison.ours for comparison in comparisons] == [75, None]
    text = printed(paper_table(comparisons, Paper("A [bold] title", "2406.10774", "Table 1", "read on [page] 5")))
    row = next(line for line in text.splitlines() if "ntk" in line)
    assert "3.00" in row
    assert "not here yet" in row
    assert "not here yet: ntk" in text
    assert "+15.00" in text
    assert "A [bold] title (arXiv 2406.10774), Table 1" in text
    assert "read on [page] 5" in text
    assert "Another model" not in text


def test_another_model_is_compared_with_all_figures_and_named() -> None:
    figures = [figure(), figure(model="example/model-2b", score=90.0)]
    other = compare(figures, [entry()], "smollm2")
    assert [comparison.difference for comparison in other] == [15, -15]
    text = " ".join(printed(paper_table(other)).split())
    assert "ours is smollm2, the paper's example/model-1b, example/model-2b" in text


def test_a_model_of_the_paper_is_compared_with_its_own_figures_only() -> None:
    figures = [figure(), figure(model="example/model-2b", score=90.0)]
    assert [comparison.ours for comparison in compare(figures, [entry()], MODEL)] == [75, None]


def test_another_length_is_compared_and_named() -> None:
    (printed, _), (run, _) = (
        read_sweep(CONFIGS / "quest-1.yaml", overrides) for overrides in ({}, {"lengths": [2000], "model": "smollm2"})
    )
    lengths = length_in_place(printed, run)
    assert lengths == {10_000: 2000}
    assert length_in_place(printed, printed) == {}
    (comparison,) = compare([figure(length=10_000)], [entry()], MODEL, lengths)
    assert comparison.difference == 15
    assert "ours is 2,000 tokens, the paper's 10,000" in " ".join(printed_text([comparison]).split())


def printed_text(comparisons: Any) -> str:
    return printed(paper_table(comparisons))


def test_failed_samples_are_counted_apart() -> None:
    text = printed(paper_table(compare([figure()], [entry(samples=10, errors=4)], MODEL)))
    assert "Some samples failed" in text
    assert re.search(r"\+15\.00\W+6\W", text)


def test_table_without_figures_says_so() -> None:
    assert "no figures" in printed(paper_table([], read_paper_file(CONFIGS / "quest-fig6.yaml").paper))


def test_figures_are_found_by_run() -> None:
    table = read_table("quest-1")
    first, second = read_sweep(table.path, {})
    assert {f.length for f in figures_of_run(table.figures, first)} == {10000}
    assert {f.length for f in figures_of_run(table.figures, second)} == {100000}
    assert len(figures_of_run(table.figures, first)) == 20


def test_no_figure_is_without_a_run() -> None:
    table = read_table("tokenselect-2")
    runs = read_sweep(table.path, {})
    assert sum(len(figures_of_run(table.figures, run)) for run in runs) == len(table.figures)
    assert all({f.length for f in figures_of_run(table.figures, run)} == set(run.lengths) for run in runs)


@pytest.mark.parametrize("name", ["tokenselect-1", "tokenselect-2"])
def test_tokenselect_runs_with_the_budget_that_its_figures_have(name: str) -> None:
    table = read_table(name)
    for run in read_sweep(table.path, {}):
        methods = runnable_methods(run.method)[0]
        assert "tokenselect" in methods
        (budget,) = run.token_budget
        assert (budget, METHODS["tokenselect"]().token_budget) == (2688, 2688)
        figures = [f for f in figures_of_run(table.figures, run) if f.method == "tokenselect"]
        assert budget in {f.token_budget for f in figures} <= {budget, 4096 + 128 + 4096}


def test_runnable_methods_keep_the_order() -> None:
    assert runnable_methods(["selfextend", "quest", "ntk", "full"]) == (["quest", "full"], ["selfextend", "ntk"])


def test_unknown_table_lists_the_known() -> None:
    with pytest.raises(EvalError, match=r"'quest-2' is unknown \(did you mean 'quest-1'\?\); known: quest-1, token"):
        read_table("quest-2")


def test_a_file_without_figures_is_no_table_and_says_how_to_run_it() -> None:
    with pytest.raises(EvalError, match=r"'smoke' is not allowed: .* no figures .* --config eval/configs/smoke.yaml"):
        read_table("smoke")


def test_mean_is_over_the_tasks_of_the_figures_run(tmp_path: Path) -> None:
    text = (
        "figures:\n  - {benchmark: ruler, method: quest, model: example/model-1b, task: null, length: 4096, score: 1}"
    )
    (found,) = table_of(tmp_path, text).figures
    assert found.tasks == ("vt", "cwe")


@pytest.mark.parametrize(
    ("entry_text", "problem"),
    [
        ("benchmark: ruler, method: quest, model: example/model-1b", "exactly one of score and perplexity"),
        ("benchmark: ruler, method: quest, model: example/model-1b, score: 1, perplexity: 7", "exactly one of score"),
        ("benchmark: ruler, method: quest, model: example/model-1b, score: 101", "score=101 .*at most 100"),
        ("benchmark: ruler, method: quest, model: example/model-1b, score: .nan", "score=nan is not allowed"),
        ("benchmark: ruler, method: quest, model: example/model-1b, score: '90'", "score='90' .*a number"),
        ("benchmark: ruler, method: quest, model: example/model-1b, perplexity: 0.5", "perplexity=0.5 .*at least 1"),
        (
            "benchmark: ruler, method: quest, model: example/model-1b, length: 4k, score: 1",
            "length='4k' .*a whole number",
        ),
        ("benchmark: ruler, method: quest, model: example/model-1b, length: 0, score: 1", "length=0 .*at least 1"),
        ("benchmark: ruler, method: quest, model: example/model-1b, budget: 2, score: 1", "budget is unknown"),
        ("benchmark: ruler, model: example/model-1b, score: 1", "method is missing"),
        ("benchmark: ruler, method: quest, model: other, score: 1", "no run of the file"),
    ],
)
def test_malformed_figure_is_named(tmp_path: Path, entry_text: str, problem: str) -> None:
    fine = "benchmark: ruler, method: quest, model: example/model-1b, score: 50"
    with pytest.raises(EvalError, match=rf"mine\.yaml: figure 2: .*{problem}"):
        table_of(tmp_path, f"figures:\n  - {{{fine}}}\n  - {{{entry_text}}}\n")


def test_figure_that_is_not_a_mapping(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"mine\.yaml: figure 1: 65 is not a mapping"):
        table_of(tmp_path, "figures: [65]")
    with pytest.raises(EvalError, match=r"mine\.yaml: figures must be a list"):
        table_of(tmp_path, "figures: {score: 65}")


@pytest.mark.parametrize(
    ("paper", "problem"),
    [
        ("{title: A, arxiv: 2406.10774, table: T, note: N}", "arxiv=2406.10774 is not allowed: text"),
        ('{title: A, arxiv: "2406.107", table: T, note: N}', "arxiv='2406.107' is not allowed: .*pattern"),
        ('{title: A, arxiv: "2406.10774", table: T, note: " "}', "note='' is not allowed: text that is not empty"),
        ('{title: A, arxiv: "2406.10774", table: T}', "note is missing; it needs title, arxiv, table, note"),
        ("Quest", "a mapping of title, arxiv, table, note"),
    ],
)
def test_malformed_paper_is_named(tmp_path: Path, paper: str, problem: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"benchmark: passkey\nmodel: smollm2\npaper: {paper}\n", encoding="utf-8")
    with pytest.raises(EvalError, match=rf"mine\.yaml: paper.*{problem}"):
        read_paper_file(tmp_path / "mine.yaml")


def test_figures_need_a_paper(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("benchmark: passkey\nmodel: smollm2\nfigures: [1]\n", encoding="utf-8")
    with pytest.raises(EvalError, match=r"mine\.yaml: paper is missing"):
        read_paper_file(tmp_path / "mine.yaml")
