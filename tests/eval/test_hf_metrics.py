"""The metrics of the ``evaluate`` library: loaded by path without a network, and imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.errors import EvalError
from eval.hf_metrics.infinitebench import InfiniteBench
from eval.hf_metrics.longbench import LongBench
from eval.hf_metrics.ruler import RULER
from eval.metrics import tasks

REPOSITORY = Path(__file__).resolve().parents[2]

LOAD_AND_SCORE = """
import sys

import evaluate

for folder in sys.argv[1:]:
    longbench = evaluate.load(folder + "/longbench.py")
    result = longbench.compute(predictions=["a b", "c d"], references=["b", ["x", "c"]], task="qasper")
    assert set(result) == {"score", "scores"}, result
    assert result["scores"] == [1.0, 2 / 3], result
    infinitebench = evaluate.load(folder + "/infinitebench.py")
    result = infinitebench.compute(predictions=["2.5", "4"], references=[[2.5], 3], task="math_find")
    assert result == {"score": 0.5, "scores": [1.0, 0.0]}, result
    ruler = evaluate.load(folder + "/ruler.py")
    assert ruler.compute(predictions=["1 2"], references=[["1", "2", "3", "4"]], task="vt")["score"] == 0.5
    print(type(longbench).__name__, type(infinitebench).__name__, type(ruler).__name__)
"""


def test_evaluate_loads_them_by_path_without_a_network(tmp_path):
    without_caches = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**without_caches, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_SCORE, "eval/hf_metrics", str(REPOSITORY / "eval" / "hf_metrics")],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["LongBench", "InfiniteBench", "RULER"] * 2


def test_references_of_all_types_may_be_mixed(tmp_path):
    metric = InfiniteBench(cache_dir=str(tmp_path))
    references = [2.5, [17], "3", ["4"], 5]
    result = metric.compute(predictions=["2.5", "17", "3", "4", "no"], references=references, task="math_find")
    assert result == {"score": 0.8, "scores": [1.0, 1.0, 1.0, 1.0, 0.0]}


def test_classes_reach_the_score(tmp_path):
    metric = LongBench(cache_dir=str(tmp_path))
    rows = {"predictions": ["Food or Date", "Date\nFood"], "references": [["Food"], "Date"]}
    assert metric.compute(**rows, task="trec", all_classes=["Food", "Date"])["scores"] == [0.5, 1.0]
    with pytest.raises(EvalError, match="longbench/trec: all_classes"):
        metric.compute(**rows, task="trec")


def test_predictions_can_be_added_before(tmp_path):
    metric = RULER(cache_dir=str(tmp_path))
    metric.add(prediction="1 2", reference=["1", "2"])
    metric.add_batch(predictions=["1", ""], references=[["1", 2], 3])
    assert metric.compute(task="niah_multivalue") == {"score": 0.5, "scores": [1.0, 0.5, 0.0]}


@pytest.mark.parametrize("metric_class", [LongBench, InfiniteBench, RULER])
def test_an_error_names_what_is_allowed_and_the_metric_stays_usable(tmp_path, metric_class):
    metric = metric_class(cache_dir=str(tmp_path))
    task = "qasper" if metric_class is LongBench else tasks(metric.benchmark)[0]
    for unknown in ({"task": "sst2"}, {}):
        with pytest.raises(EvalError, match=f"{metric.benchmark} has no task=.* are {tasks(metric.benchmark)[0]}"):
            metric.compute(predictions=["7"], references=["7"], **unknown)
    with pytest.raises(EvalError, match="at least one prediction"):
        metric.compute(predictions=[], references=[], task=task)
    with pytest.raises(EvalError, match="reference None"):
        metric.compute(predictions=["7"], references=[None], task=task)
    assert metric.compute(predictions=["7"], references=["7"], task=task)["score"] == 1.0


@pytest.mark.parametrize("metric_class", [LongBench, InfiniteBench, RULER])
def test_it_describes_itself(tmp_path, metric_class):
    metric = metric_class(cache_dir=str(tmp_path))
    assert metric.description.strip()
    assert metric.citation.strip()
    assert all(task in metric.inputs_description for task in tasks(metric.benchmark))
