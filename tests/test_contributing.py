"""CONTRIBUTING.md: its example method works, and the files and targets that it names exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from hf_sparse_attn import SparseMethod, sparse_attention, sparse_attention_stats
from tests.models import POSITIONS, random_ids, shared_model

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture(scope="module")
def middle(tmp_path_factory) -> type[SparseMethod]:
    """Import the page's method from its own file."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert source[source.index("@dataclass") :].count("\n") < 40
    path = tmp_path_factory.mktemp("methods") / "middle.py"
    path.write_text(source, encoding="utf-8")
    return runpy.run_path(str(path))["Middle"]


def padded_batch() -> dict[str, torch.Tensor]:
    ids = random_ids(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    return {"inputs": ids * mask, "attention_mask": mask}


@torch.inference_mode()
def test_the_method_is_dense_within_its_budget(middle, monkeypatch):
    model = shared_model("llama")
    expected = model.generate(**padded_batch(), **GREEDY)
    monkeypatch.setattr(middle, "covers", lambda self, length: False)
    with sparse_attention(model, middle(token_budget=POSITIONS)):
        assert torch.equal(model.generate(**padded_batch(), **GREEDY), expected)
        stats = sparse_attention_stats(model)
    assert stats.kv_bytes == stats.dense_bytes > 0


@torch.inference_mode()
def test_the_method_reads_less_with_a_small_budget(middle):
    model = shared_model("llama")
    with sparse_attention(model, middle(token_budget=32)):
        model.generate(**padded_batch(), **GREEDY)
        stats = sparse_attention_stats(model)
    steps, rows = GREEDY["max_new_tokens"] - 1, 2
    assert 0 < stats.tokens_read <= 32 * rows * steps * model.config.num_key_value_heads * len(stats.layers)
    assert 0 < stats.kv_bytes + stats.metadata_bytes < stats.dense_bytes


def test_files_and_targets_exist():
    words = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL))
    paths = [word for word in words if "/" in word and "NAME" not in word and not word.startswith("build/")]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert len(paths) > 10
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word.removeprefix("make ") for word in words if word.startswith("make ")}
    assert named == targets - {"help", "install", "cuda"} - {name for name in targets if name.startswith("test-gpu-")}


@pytest.mark.parametrize(
    "path", [ROOT / ".ci/run", *sorted((ROOT / ".github/workflows").glob("*.yml"))], ids=lambda path: path.name
)
def test_ci_runs_targets_of_the_makefile(path):
    """CI adds versions and publishes; what is run stands in the Makefile alone."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = re.findall(r"^(?: *- run: )?make (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    called = [word for line in lines for word in line.split() if re.fullmatch(r"[a-z][a-z-]*", word)]
    assert called
    assert set(called) <= targets


def test_a_step_crosses_at_most_eight_files():
    section = TEXT.split("\n## A decode step, file by file\n")[1].split("\n## ")[0]
    files = re.findall(r"^\d+\. `([^`]+)`: ", section, re.MULTILINE)
    assert 0 < len(files) <= 8
    assert len(files) == len(set(files)) == len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    kernel = (ROOT / files[-1]).read_text(encoding="utf-8")
    assert "@triton.jit" in kernel or "\nKERNEL(" in kernel


def test_class_variables_and_verbs_that_are_named_exist():
    section = TEXT.split("\n## Adding a method\n")[1].split("\nA complete method")[0]
    for name in ("rotates_keys", "needs_mask", "extends_positions", "counts", "sparse_phases", "finish_prompt"):
        assert name in section
        assert hasattr(SparseMethod, name)


def test_lines_and_length():
    lines = TEXT.splitlines()
    assert len(lines) < 170
    assert [line for line in lines if len(line) > 120] == []
