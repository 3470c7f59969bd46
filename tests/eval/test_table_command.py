"""``python -m eval table`` on a tiny model: every table, what a run lacks, and rows that cannot run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from eval.cli import app
from eval.config import read_sweep
from eval.engine import make_variants
from eval.store import read_records
from eval.table_command import REPORT, _alike, _united
from eval.table_runs import table_runs
from eval.tables import RENAMED, read_table, table_names
from hf_sparse_attn import METHODS
from tests.tiny import save_model

SMALL: dict[str, tuple[str, ...]] = {
    "quest-1": ("--lengths", "60", "--token-budget", "64"),
    "quest-fig6": ("--lengths", "100", "--token-budget", "48"),
    "quest-fig7": ("--lengths", "500", "--token-budget", "64", "--tasks", "hotpotqa"),
    "squeezed-2": ("--lengths", "500", "--tasks", "lcc"),
    "squeezed-3": ("--lengths", "700", "--tasks", "niah_single_1"),
    "squeezed-4": ("--lengths", "500"),
    "psa-fig5": ("--lengths", "500", "--token-budget", "64", "--tasks", "hotpotqa"),
    "tokenselect-1": ("--lengths", "500", "--token-budget", "64", "--tasks", "kv_retrieval"),
    "tokenselect-2": ("--lengths", "700", "--token-budget", "64", "--tasks", "niah_single_1"),
    "tokenselect-4": ("--lengths", "500", "--token-budget", "64", "--tasks", "kv_retrieval"),
    "tokenselect-5": ("--lengths", "500", "--token-budget", "64", "--tasks", "kv_retrieval"),
    "tokenselect-8": ("--lengths", "300", "--token-budget", "64"),
}
"""For each table, settings that a model of 1,024 positions holds."""


@pytest.fixture(scope="module")
def data(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented data of every benchmark that needs some, beside the book and essays."""
    folder = tmp_path_factory.mktemp("table-data")
    for path in data_dir.iterdir():
        (folder / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    document = " ".join(f"The harbour master of year {year} counted {year % 89} sails." for year in range(1, 40))
    row = {"context": document, "input": "How many sails?", "answers": ["7"], "all_classes": ["number"], "_id": "a"}
    (folder / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    code = {**row, "context": document.replace(" ", "\n"), "input": "", "answers": ["sails = 7"], "all_classes": None}
    (folder / "lcc.jsonl").write_text(json.dumps(code) + "\n", encoding="utf-8")
    questions = [{"question": f"How many sails in year {year}?", "answers": [str(year)]} for year in (3, 9)]
    asked = {"context": document, "questions": questions}
    (folder / "prefixqa.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    return folder


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "240"})


def run_table(name: str, model: str, data: Path, protocols: Path, *arguments: str) -> Result:
    folders = ("--data-dir", str(data), "--protocol-dir", str(protocols))
    return invoke("table", name, "--model", model, "--limit", "1", *folders, *SMALL[name], *arguments)


def words(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize("name", table_names())
def test_every_table_runs_on_another_model(
    name: str, tmp_path: Path, model_dir: str, data: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_table(name, model_dir, data, protocols, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    table = read_table(name)
    assert table.paper is not None
    text = words(result)
    assert f"arXiv {table.paper.arxiv}" in text
    report = json.loads((tmp_path / "out" / REPORT).read_text(encoding="utf-8"))
    assert report["command"].startswith(f"python -m eval table {name} --")
    assert report["command"].endswith(" --data-dir D --protocol-dir P")
    assert {row[4].split()[0] for row in report["rows"] if row[7] != "not measured"} >= {"full"}
    folders = sorted(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    records = [record for folder in folders for record in read_records(folder / "rows.jsonl")]
    assert [record["error"] for record in records if record["error"]] == []
    sparse = {record["method"] for record in records} - {"full"}
    assert sparse, "no method ran"
    for method in sparse:
        assert method in text
    if name == "tokenselect-2":
        assert "not measured" in text  # its figures are means over 13 tasks, of which one ran
        assert "sink_tokens must be between 0 and token_budget - 1 = 63" in text
    elif table.figures:
        assert "Another model than the paper's" in text
        assert "Another length than the paper's" in text
    else:
        assert table.paper.missing is not None
        assert table.paper.missing in text


def test_the_list_says_which_tables_have_no_figures_of_the_paper() -> None:
    bare = sorted(name for name in table_names() if not read_table(name).figures)
    assert bare == ["psa-fig5", "squeezed-3", "squeezed-4"]
    assert f"without the paper's figures: {', '.join(bare)}" in words(invoke("list"))


def test_nothing_is_written_without_a_folder(
    tmp_path: Path, model_dir: str, data: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_table("quest-fig6", model_dir, data, protocols).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_rows_that_a_model_cannot_run_say_why_and_the_others_run(
    tmp_path: Path, model_dir: str, data: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, model: Any) -> None:
        raise ValueError("h2o: this model is refused")

    monkeypatch.setattr(METHODS["h2o"], "check_model", refuse)
    result = run_table("quest-fig6", model_dir, data, protocols, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if "cannot run" in line)
    assert "h2o" in row
    assert "this model is refused" in words(result)
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    records = read_records(folder / "rows.jsonl")
    assert {record["method"] for record in records} == {"full", "quest", "tova"}
    assert all(record["error"] is None for record in records)


def test_rows_whose_samples_fail_say_why_and_the_others_run(
    model_dir: str, data: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("tova forgot too much")

    monkeypatch.setattr(METHODS["tova"], "priority", fail)
    result = run_table("quest-fig6", model_dir, data, protocols)
    assert result.exit_code == 0, result.output
    assert "tova forgot too much" in words(result)
    assert "1 of 4 records are errors" in result.output


def test_a_table_without_any_result_ends_with_an_error(
    model_dir: str, data: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.engine.force_sample", lambda *arguments: math.log(-1))
    result = run_table("quest-fig6", model_dir, data, protocols)
    assert result.exit_code == 1
    assert "ValueError" in words(result)


def test_the_folder_of_another_table_is_refused(model_dir: str, tmp_path: Path) -> None:
    held = json.dumps({"name": "quest-fig6"})
    (tmp_path / REPORT).write_text(held, encoding="utf-8")
    result = invoke("table", "quest-1", *SMALL["quest-1"], "--model", model_dir, "--limit", "1", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "holds the table quest-fig6; name another folder for quest-1" in words(result)
    assert [path.name for path in tmp_path.iterdir()] == [REPORT]
    assert (tmp_path / REPORT).read_text(encoding="utf-8") == held


@pytest.mark.parametrize("name", ["quest-fig7", "squeezed-2", "tokenselect-2", "psa-fig5"])
def test_a_model_without_a_chat_template_is_told_the_option(
    name: str, tmp_path: Path, data: Path, protocols: Path
) -> None:
    base = str(save_model(tmp_path, chat=False))
    # LLaMA-2-7B-32K's rows have no template; those of the two chat models need one.
    result = run_table(name, base, data, protocols)
    assert result.exit_code == 2, result.output
    assert "error: chat='on', but the tokenizer of" in words(result)
    assert "has no chat template; give --chat-template" in words(result)
    assert "records" not in result.output, "the table's other runs must wait until all are known to be valid"
    if name == "quest-fig7":
        given = run_table(name, base, data, protocols, "--chat-template", "ruler:other")
        assert given.exit_code == 0, given.output


@pytest.mark.parametrize("name", sorted(set(table_names()) - {"squeezed-2", "squeezed-4", "quest-fig7", "psa-fig5"}))
def test_a_model_that_lacks_a_table_s_length_is_told_the_option(
    name: str, model_dir: str, data: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in METHODS.values():  # those that extend positions would read on
        monkeypatch.setattr(method, "extends_positions", False)
    folders = ("--data-dir", str(data), "--protocol-dir", str(protocols))
    result = invoke("table", name, "--model", model_dir, "--limit", "1", *folders)
    assert result.exit_code == 2, result.output
    assert re.search(r"at most the model's \d+ positions.*; give --lengths", words(result))


@pytest.mark.parametrize(("earlier", "name"), RENAMED.items())
def test_an_earlier_name_is_told_the_one_that_replaced_it(earlier: str, name: str) -> None:
    result = invoke("table", earlier)
    assert result.exit_code == 2
    assert f"error: table '{earlier}' is unknown (its name is now '{name}'); known: psa-fig5" in words(result)


@pytest.mark.parametrize(
    ("option", "value"), [("lengths", "0"), ("limit", "0"), ("limit", "-1"), ("token-budget", "0"), ("dtype", "int8")]
)
def test_values_that_are_not_allowed_are_one_line(option: str, value: str, model_dir: str) -> None:
    result = CliRunner().invoke(app, ["table", "quest-1", "--model", model_dir, f"--{option}", value])
    assert result.exit_code == 2
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert option.replace("-", "_") in error
    assert value in error


def test_other_tasks_are_refused(model_dir: str) -> None:
    result = invoke("table", "tokenselect-4", "--model", model_dir, "--tasks", "vt")
    assert result.exit_code == 2
    assert "one or more of longbook_qa_eng" in words(result)


@pytest.mark.parametrize(
    ("name", "groups"),
    [("tokenselect-1", [3]), ("tokenselect-2", [3]), ("squeezed-3", [1, 2]), ("quest-1", [1, 1]), ("psa-fig5", [1])],
)
def test_on_another_model_one_run_serves_those_that_differ_in_variants_alone(name: str, groups: list[int]) -> None:
    found = _alike(table_runs(read_sweep(read_table(name).path, {}), {"model": "smollm2"}))
    assert [len(group) for group in found] == groups
    for group in found:
        shared = _united(group)
        assert set(shared.variants) == {variant for run in group for variant in run.variants}
        assert set(make_variants(shared.config)) == set(shared.variants), "the folder's settings name what was run"


def test_a_figure_of_a_run_that_another_one_served_is_compared(model_dir: str, data: Path, protocols: Path) -> None:
    """SelfExtend has another group for each of the table's models, and dense attention is measured once for all."""
    result = run_table("tokenselect-1", model_dir, data, protocols)
    assert result.exit_code == 0, result.output
    for group in (5, 19, 43):
        assert re.search(rf"group_size={group}\b.*\b\d+\.\d\d\b.*\b1\b", result.output), group
