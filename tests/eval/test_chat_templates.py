"""Chat templates for models without one: files, RULER's, and what cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.chat_templates import read_chat_template, with_chat_template
from eval.cli import app
from eval.errors import EvalError
from eval.prompts import in_chat_template
from eval.store import read_json, read_records
from tests.eval.tokenizers import tiny_tokenizer


def test_a_template_of_ruler_wraps_the_message(protocols: Path) -> None:
    tokenizer = tiny_tokenizer()
    wrapped = with_chat_template(tokenizer, read_chat_template("ruler:other", protocols), "ruler:other")
    assert in_chat_template(wrapped, 'a "{brace}" {{ x }}') == '<s><u>a "{brace}" {{ x }}</u>'
    assert tokenizer.chat_template is None
    plain = with_chat_template(tokenizer, read_chat_template("ruler:base", protocols), "ruler:base")
    assert in_chat_template(plain, "text") == "<s>text"


def test_what_cannot_be_used_is_named(protocols: Path, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"'ruler:vicuna' is unknown; RULER has ruler:base, ruler:other"):
        read_chat_template("ruler:vicuna", protocols)
    with pytest.raises(EvalError, match=r"none\.jinja' cannot be read"):
        read_chat_template(str(tmp_path / "none.jinja"), None)
    with pytest.raises(EvalError, match="chat_template='a' cannot be used: TemplateSyntaxError"):
        with_chat_template(tiny_tokenizer(), "{{ messages", "a")
    with pytest.raises(EvalError, match="chat_template='a' cannot be used: it leaves out the message"):
        with_chat_template(tiny_tokenizer(), "hello", "a")
    with pytest.raises(EvalError, match="chat_template='a' cannot be used: it leaves out the message, or changes it"):
        with_chat_template(tiny_tokenizer(), "{{ messages[0]['content'] | escape }}", "a")


def test_a_run_uses_the_file_and_its_folder_belongs_to_its_content(
    model_dir: str, protocols: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "mine.jinja", tmp_path / "out"
    words: Any = ["run", "needle", "--model", model_dir, "--tasks", "essay", "--lengths", "400", "--limit", "1"]
    words += ["--data-dir", str(tmp_path), "--out", str(out), "--chat-template", str(file)]
    (tmp_path / "PaulGrahamEssays.json").write_text('{"text": "' + "A long walk home. " * 200 + '"}')
    file.write_text("{{ bos_token }}<<{{ messages[0]['content'] }}>>")
    assert CliRunner().invoke(app, words).exit_code == 0
    before = read_records(out / "rows.jsonl")[0]["prompt_tokens"]
    assert len(read_json(out / "config.json", "")["chat_template_sha256"]) == 64
    file.write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "chat_template_sha256 was" in again.output
    assert before <= 400


def test_a_search_of_budgets_takes_a_template(model_dir: str, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.jinja", tmp_path / "out"
    file.write_text("{{ bos_token }}<<{{ messages[0]['content'] }}>>")
    (tmp_path / "PaulGrahamEssays.json").write_text('{"text": "' + "A long walk home. " * 200 + '"}')
    words = ["budget", "needle", "--model", model_dir, "--tasks", "essay", "--lengths", "400", "--limit", "1"]
    words += ["--method", "quest", "--steps", "quest=[64]", "--divergence", "1", "--data-dir", str(tmp_path)]
    for name, more in (("plain", []), ("own", ["--chat-template", str(file)])):
        result = CliRunner().invoke(app, [*words, "--out", str(out / name), *more])
        assert result.exit_code == 0, result.output
    assert "chat_template_sha256" not in read_json(out / "plain" / "config.json", "")
    assert len(read_json(out / "own" / "config.json", "")["chat_template_sha256"]) == 64
