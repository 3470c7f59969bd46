"""The lm_eval command with local tasks, dense and sparse."""

import copy
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.lm_eval.model import HFSparseLM
from hf_sparse_attn.lm_eval.results import add_kv_fraction
from tests.tiny import save_model

ROOT = Path(__file__).resolve().parents[2]

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{passage}} The harbour is called",
        "doc_to_choice": "{{[' Northmere', ' Eastholm', ' Lake']}}",
        "doc_to_target": 1,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{passage}} The harbour is called",
        "doc_to_target": " Eastholm",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    },
}


def passage(sentences: int) -> str:
    name = "The harbour is called Eastholm."
    return " ".join([name, *[f"Boat {number} sailed out and came home again." for number in range(sentences)]])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    documents = [{"passage": passage(sentences), "text": passage(sentences // 6)} for sentences in (9, 6, 8)]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    data = {"data_files": {"test": str(folder / "documents.jsonl")}, "cache_dir": str(folder / "cache")}
    for name, task in TASKS.items():
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return folder


@pytest.fixture(autouse=True)
def _no_description_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it takes seconds


def evaluate(model: LM, tasks: Path) -> dict[str, Any]:
    """Run the tasks in this process, without lm_eval's own tasks, whose index takes seconds to load."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results: dict[str, Any] = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    return results


def run(options: list[str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels/torch-ext")))}
    environment.pop("TRITON_INTERPRET", None)  # as a user runs it
    command = [sys.executable, "-m", "hf_sparse_attn.lm_eval", "--model", "hf-sparse", "--device", "cpu", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def written(out: Path) -> dict[str, Any]:
    (path,) = out.glob("**/results_*.json")
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def test_results_contain_the_reads(tasks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = HFSparseLM(str(save_model(tmp_path)), token_budget=64, dtype="float64", device="cpu", batch_size=2)
    logging.getLogger("lm_eval").propagate = True
    with caplog.at_level(logging.INFO, logger="lm_eval"):
        results = evaluate(model, tasks)
    config = results["config"]
    assert config["sparse_attention"]["token_budget"] == 64
    assert 0 < config["kv_fraction"] < 1
    assert config["kv_fraction_by_task"].keys() == TASKS.keys()
    assert f"kv_fraction={config['kv_fraction']:.4f} (" in caplog.text
    table = make_table(add_kv_fraction(results))
    for task, fraction in config["kv_fraction_by_task"].items():
        assert results["results"][task]["kv_fraction,none"] == fraction
    assert len(re.findall(r"\|kv_fraction *\|↓ *\| *[01]\.\d+\|", table)) == len(TASKS)


def test_results_of_another_model_stay_as_they_are() -> None:
    results = {"config": {"model": "hf"}, "results": {"choices": {"acc,none": 1.0}}, "higher_is_better": {}}
    assert add_kv_fraction(copy.deepcopy(results)) == results


def test_a_task_that_decoded_nothing_has_no_fraction() -> None:
    config = {"kv_fraction_by_task": {"choices": None}}
    results = {"config": config, "results": {"choices": {"acc,none": 1.0}}, "higher_is_better": {"choices": {}}}
    assert add_kv_fraction(results)["results"] == {"choices": {"acc,none": 1.0}}


def test_command_ends_with_one_line(tasks: Path) -> None:
    options = ["--include_path", str(tasks), "--tasks", "choices"]
    result = run(["--model_args", "pretrained=x,method=quset", *options])
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("unknown method 'quset'")
    assert "Traceback" not in result.stderr


@pytest.mark.weights
def test_smollm2_scores_as_dense_attention_where_the_budget_covers_all(tasks: Path) -> None:
    model, tokenizer = load_model("smollm2", device="cpu")
    options = {"tokenizer": tokenizer, "batch_size": 2}
    dense = evaluate(HFLM(model, **options), tasks)
    covered = evaluate(HFSparseLM(model, token_budget=1024, **options), tasks)
    for task, metric in (("choices", "acc,none"), ("answers", "exact_match,none")):
        assert covered["results"][task][metric] == dense["results"][task][metric] == 1
        for ours, theirs in zip(covered["samples"][task], dense["samples"][task], strict=True):
            pairs = zip(ours["filtered_resps"], theirs["filtered_resps"], strict=True)
            assert all(one == pytest.approx(other, abs=1e-3) for one, other in pairs)
    texts = [found["results"]["texts"]["bits_per_byte,none"] for found in (covered, dense)]
    assert texts[0] == pytest.approx(texts[1], abs=1e-4)
    assert covered["config"]["kv_fraction"] == 1


@pytest.mark.weights
def test_smollm2_by_the_command(tasks: Path, tmp_path: Path) -> None:
    given = "pretrained=smollm2,method=quest,token_budget=48,decode_last=4,rolling_prefill=16"
    where = ["--include_path", str(tasks), "--output_path", str(tmp_path), "--log_samples"]
    result = run(["--model_args", given, "--tasks", ",".join(TASKS), "--batch_size", "2", *where])
    assert result.returncode == 0, result.stderr
    results = written(tmp_path)
    config = results["config"]
    assert config["model"] == "hf-sparse"
    assert 0 < config["kv_fraction_by_task"]["choices"] < 0.9
    assert f"kv_fraction={config['kv_fraction']:.4f} (" in result.stderr
    assert "|choices" in result.stdout
    for task in TASKS:
        assert results["results"][task]["kv_fraction,none"] == config["kv_fraction_by_task"][task]
    assert result.stdout.count("|kv_fraction") == len(TASKS)
