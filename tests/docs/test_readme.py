"""The README's code and commands run, and everything it lists exists."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.cli import app as harness
from hf_sparse_attn.cli.app import app as commands
from hf_sparse_attn.lm_eval.model import HFSparseLM

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL_NAME = "Qwen/Qwen2.5-7B-Instruct"
LINES = 120


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def shell_lines() -> list[list[str]]:
    return [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]


def command(*beginning: str) -> list[str]:
    """Return the arguments of the only command with this beginning."""
    (found,) = (words for words in shell_lines() if words[: len(beginning)] == list(beginning))
    return found[len(beginning) :]


def small(arguments: list[str], folder: Path) -> list[str]:
    """Return the command for the small model and a shorter text."""
    shorter = {"smollm2": str(folder), "2000": "400"}
    return [shorter.get(word, word) for word in arguments]


def test_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    (code,) = blocks("python")
    names: dict[str, Any] = {}
    exec(code.replace(MODEL_NAME, str(folder)).replace("max_new_tokens=200", "max_new_tokens=3"), names)
    assert 0 < float(capsys.readouterr().out) < 1  # decoding was sparse


def test_calls_that_are_listed_are_public() -> None:
    import hf_sparse_attn

    section = TEXT.split("\n## Use\n")[1].split("\n## ")[0]
    calls = re.findall(r"^\| `(?:with )?([\w.]+)\(", section, re.MULTILINE)
    assert len(calls) == 7
    for call in calls:
        name, *attributes = call.split(".")
        assert name in hf_sparse_attn.__all__
        found = getattr(hf_sparse_attn, name)
        assert all(hasattr(found, attribute) for attribute in attributes)


def test_compare_runs(folder: Path) -> None:
    result = CliRunner().invoke(commands, ["compare", *small(command("hf-sparse-attn", "compare"), folder), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [variant["method"] for variant in report["variants"]] == ["quest", "keycodes"]


def test_a_text_is_prepared_and_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("prepare", "ask"):
        arguments = small(command("hf-sparse-attn", "context", name), folder)
        result = CliRunner().invoke(commands, ["context", name, *arguments, "--json"])
        assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["answers"]["squeezed"]["texts"]) == 1


def test_the_harness_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(harness, small(command("python", "-m", "eval"), folder))
    assert result.exit_code == 0, result.output
    assert list(tmp_path.glob("eval-results/*/rows.jsonl"))


def test_lm_evals_model_takes_the_arguments(folder: Path) -> None:
    arguments = command("python", "-m", "hf_sparse_attn.lm_eval")
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert set(options) == {"--model", "--model_args", "--tasks"}
    model = HFSparseLM.create_from_arg_string(
        options["--model_args"].replace("smollm2", str(folder)), {"device": "cpu"}
    )
    assert model.method.name == "quest"


def test_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words[1] for words in shell_lines() if words[0] == "make"} | set(re.findall(r"`make ([a-z-]+)`", TEXT))
    assert named
    assert named <= targets


def test_it_is_read_in_two_minutes() -> None:
    assert len(TEXT.splitlines()) <= LINES
    assert [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith("|")] == []
