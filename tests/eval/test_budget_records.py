"""Budgets judged from records that exist: the same answers as a search, over the samples that have every setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.budget_records import judge
from eval.budget_table import budget_markdown
from eval.cli import app
from eval.errors import EvalError
from eval.findings import Target

COMMON = {"model": "m", "dtype": "bfloat16", "device": "GPU", "versions": {"torch": "2"}, "seed": 0}


def record(method: str, sample: str, score: float, **values: Any) -> dict[str, Any]:
    measured = {"kv_fraction": 0.5, "realised_budget": 10.0, "perplexity": None, "divergence": None}
    return {
        **COMMON,
        "protocol": None,
        "protocol_sha256": None,
        "benchmark": "passkey",
        "question": "decode",
        "task": "filler",
        "length": 400,
        "sample_id": sample,
        "method": method,
        "token_budget": None,
        "variant": "",
        "parameters": {},
        "score": score,
        "prompt_tokens": 400,
        "error": None,
        **measured,
        **values,
    }


def quest(budget: int, sample: str, score: float, **values: Any) -> dict[str, Any]:
    parameters = {"token_budget": budget, "page_size": 16}
    return record(
        "quest", sample, score, token_budget=budget, parameters=parameters, kv_fraction=budget / 400, **values
    )


def psa(threshold: float, sample: str, score: float, rest: str) -> dict[str, Any]:
    return record(
        "psa",
        sample,
        score,
        variant=f"threshold={threshold}",
        parameters={"threshold": threshold, "rest": rest},
        kv_fraction=threshold / 2,
    )


def folder_of(path: Path, records: list[dict[str, Any]], data: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    settings = {"benchmark": "passkey", "model": "m", "question": "decode", "seed": 0, "data": data or {}}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture
def folders(tmp_path):
    dense = [record("full", sample, 1.0) for sample in "abc"]
    first = [quest(budget, sample, float(budget >= 128)) for budget in (64, 128, 256) for sample in "abc"]
    first += [psa(threshold, sample, float(threshold >= 0.9), "least") for threshold in (0.5, 0.9) for sample in "ab"]
    second = [psa(threshold, sample, 1.0, "last") for threshold in (0.5, 0.9) for sample in "abc"]
    return [folder_of(tmp_path / "1", dense + first), folder_of(tmp_path / "2", [*dense, *second])]


def test_the_smallest_recorded_setting_of_each_method_is_found(folders, tmp_path):
    report = judge(folders, Target(target=0.98), tmp_path / "budget.json")
    found = {entry["method"]: entry for entry in report["results"]}
    assert {name: entry["setting"] for name, entry in found.items()} == {
        "quest": 128,
        "psa (rest=least)": 0.9,
        "psa (rest=last)": 0.5,
    }
    assert found["quest"]["steps"] == [64, 128, 256]
    assert found["quest"]["found"]["kv_fraction"] == 128 / 400
    assert {entry["dense"]["samples"] for entry in report["results"]} == {2}  # sample c lacks a setting
    assert json.loads((tmp_path / "budget.json").read_text()) == report
    assert "data" not in report["config"]
    page = budget_markdown(report, "")
    assert f"--records {folders[0].as_posix()} --records {folders[1].as_posix()} --target 0.98`" in page


def test_one_folder_names_its_methods_without_their_hyperparameters(folders):
    assert [entry["method"] for entry in judge(folders[1:], Target(target=0.98))["results"]] == ["psa"]


def test_a_setting_in_two_folders_counts_once(tmp_path):
    dense = [record("full", sample, 1.0) for sample in "abc"]
    halves = [[quest(budget, sample, 1.0) for budget in budgets for sample in "abc"] for budgets in ((64, 128), (128,))]
    folders = [folder_of(tmp_path / str(number), dense + half) for number, half in enumerate(halves)]
    [entry] = judge(folders, Target(target=0.98))["results"]
    assert (entry["setting"], entry["is_monotone"]) == (64, True)
    probes = [(probe["setting"], probe["reached"], probe["samples"], probe["failed"]) for probe in entry["probes"]]
    assert probes == [(64, True, 3, 0), (128, True, 3, 0)]


@pytest.mark.parametrize("failed_first", [False, True])
@pytest.mark.parametrize("broken", ["full", "quest"])
def test_a_failure_in_one_folder_replaces_no_measured_record_of_another(tmp_path, failed_first, broken):
    records = [made for sample in "abc" for made in (record("full", sample, 1.0), quest(64, sample, 1.0))]
    failure = {"error": "RuntimeError: out of memory", "score": None}
    again = [each | failure if each["method"] == broken else each for each in records]
    both = [again, records] if failed_first else [records, again]
    folders = [folder_of(tmp_path / str(number), own) for number, own in enumerate(both)]
    [entry] = judge(folders, Target(target=0.98))["results"]
    assert (entry["setting"], entry["found"]["samples"], entry["found"]["failed"]) == (64, 3, 0)


def test_a_sample_that_failed_in_both_folders_fails_its_step(tmp_path):
    failure = {"error": "RuntimeError: no", "score": None}
    records = [record("full", sample, 1.0) for sample in "abc"]
    records += [quest(64, "a", 1.0), quest(64, "b", 1.0), quest(64, "c", 1.0) | failure]
    folders = [folder_of(tmp_path / name, records) for name in "12"]
    [entry] = judge(folders, Target(target=0.98))["results"]
    assert entry["reason"] == "no step reaches the target"
    assert [(probe["samples"], probe["failed"]) for probe in entry["probes"]] == [(2, 1)]


@pytest.mark.parametrize("divergence_first", [False, True])
def test_a_score_in_one_folder_and_a_divergence_in_another_are_of_the_same_sample(tmp_path, divergence_first):
    scored = [made for sample in "ab" for made in (record("full", sample, 1.0), quest(64, sample, 0.5))]
    own = {"score": None, "divergence": 0.25, "kv_fraction": 0.3}
    followed = [each | own if each["method"] == "quest" else each for each in scored]
    both = [followed, scored] if divergence_first else [scored, followed]
    folders = [folder_of(tmp_path / str(number), records) for number, records in enumerate(both)]
    for target, kv_fraction in ((Target(target=0.5), 64 / 400), (Target(divergence=0.5), 0.3)):
        [entry] = judge(folders, target)["results"]
        found = entry["found"]
        assert (found["samples"], found["score"], found["divergence"]) == (2, 0.5, 0.25)
        assert found["kv_fraction"] == pytest.approx(kv_fraction)  # of the record that is judged


def test_a_sample_without_what_is_to_be_reached_has_not_been_tried(tmp_path):
    records = [record("full", "a", 1.0), record("full", "b", 1.0), quest(64, "a", 1.0), quest(64, "b", 1.0)]
    records[-1] |= {"score": None, "divergence": 0.1}
    [entry] = judge([folder_of(tmp_path / "1", records)], Target(target=0.98))["results"]
    assert (entry["setting"], entry["dense"]["samples"], entry["found"]["samples"]) == (64, 1, 1)


@pytest.mark.parametrize("name", ["ntk", "self_extend"])
def test_a_method_that_reads_everything_is_refused(folders, tmp_path, name):
    records = [record(name, sample, 1.0, parameters={"token_budget": 1024}) for sample in "abc"]
    message = f"method: {name} reads everything, so there is nothing to search"
    with pytest.raises(EvalError, match=message):
        judge([*folders, folder_of(tmp_path / "3", records)], Target(target=0.98), tmp_path / "budget.json")
    assert not (tmp_path / "budget.json").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "CPU"}, "records differ in device: GPU, CPU"),
        ({"benchmark": "needle"}, "records differ in benchmark"),
        ({"method": "full", "sample_id": "z"}, "dense attention and another method are needed"),
    ],
)
def test_records_must_belong_together(tmp_path, changed, message):
    folder = folder_of(tmp_path / "1", [record("full", "a", 1.0), {**quest(64, "a", 1.0), **changed}])
    with pytest.raises(EvalError, match=message):
        judge([folder], Target(target=0.98))


def test_records_of_a_file_that_has_changed_do_not_belong_together(tmp_path):
    def files(*digits):
        return {"book": [{"file": f"pg19/{digit}.txt", "sha256": digit * 64} for digit in digits]}

    dense, sparse = [record("full", "a", 1.0)], [quest(64, "a", 1.0)]
    first = folder_of(tmp_path / "1", dense, files("1", "2"))
    second = folder_of(tmp_path / "2", sparse, files("2"))  # fewer samples may need fewer files
    assert [found["method"] for found in judge([first, second], Target(target=0.98))["results"]] == ["quest"]
    changed = {"book": [{"file": "pg19/2.txt", "sha256": "3" * 64}]}
    third = folder_of(tmp_path / "3", sparse, changed)
    with pytest.raises(
        EvalError, match=r"differ in the data of book: pg19/2.txt has sha256 2+ in .*1 and sha256 3+ in"
    ):
        judge([first, third], Target(target=0.98), tmp_path / "budget.json")
    assert not (tmp_path / "budget.json").exists()


def test_samples_without_every_setting_leave_nothing_to_judge(tmp_path):
    records = [record("full", "a", 1.0), record("full", "b", 1.0), quest(64, "a", 1.0), quest(128, "b", 1.0)]
    with pytest.raises(EvalError, match="no sample has been tried with every recorded setting"):
        judge([folder_of(tmp_path / "1", records)], Target(target=0.98))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "holds no records"),
        (["--model", "smollm2"], "model: not allowed with --records"),
        (["--steps", "quest=[64]"], "the recorded settings are the steps"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["budget", "--records", str(tmp_path / "none"), *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("error:")


def test_the_command_judges_prints_and_plots(folders, tmp_path):
    words = [word for folder in folders for word in ("--records", str(folder))]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["budget", *words, "--out", str(out)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "psa (rest=last)" in result.output
    assert {path.name for path in out.iterdir()} == {"budget.json", "budget.png"}


@pytest.mark.parametrize(
    ("target", "measured", "message"),
    [
        (Target(divergence=0.5), {}, "the records have no divergence, .* run them with --measure divergence"),
        (Target(target=0.9), {"score": None, "divergence": 0.1}, "the records have no score, .* --measure score"),
    ],
)
def test_records_without_what_is_to_be_reached_are_refused(tmp_path, target, measured, message):
    records = [record("full", "a", 1.0), *(quest(budget, "a", 1.0) | measured for budget in (64, 128))]
    folder = folder_of(tmp_path / "one", records)
    with pytest.raises(EvalError, match=message):
        judge([folder], target)
