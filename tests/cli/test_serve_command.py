"""``hf-sparse-attn serve``, up to the call of the server."""

from pathlib import Path
from typing import Any

import pytest

from hf_sparse_attn import Quest
from hf_sparse_attn.cli import serve_command
from hf_sparse_attn.patched import patched_method
from tests.cli.commands import invoke
from tests.tiny import save_model


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the arguments of the server's calls."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve_command, "check_packages", lambda: None)
    monkeypatch.setattr(serve_command, "serve_model", lambda *args, **options: calls.append((*args, options)))
    return calls


def test_serve_loads_and_patches_the_model(served: list[tuple[Any, ...]], tmp_path: Path) -> None:
    folder = str(save_model(tmp_path, chat=True))
    method = ("--method", "quest", "--token-budget", "64", "--set", "page_size=8")
    result = invoke("serve", folder, *method, "--port", "8123", "--compile", "--device", "cpu")
    assert result.exit_code == 0, result.output
    ((model, tokenizer, name, options),) = served
    assert patched_method(model) == Quest(token_budget=64, page_size=8)
    assert tokenizer.chat_template
    assert (name, options) == (folder, {"host": "localhost", "port": 8123, "compile": True})
    assert "with quest (token_budget=64" in result.stderr
    assert "at http://localhost:8123/v1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "qest"), "did you mean 'quest'"),
        (("--set", "pages=8"), "quest has no parameter 'pages'"),
        (("--token-budget", "64", "--set", "token_budget=32"), "token_budget is given twice"),
        (("--dtype", "int3"), "--dtype 'int3' is unknown"),
        ((), "does not exist"),
    ],
)
def test_bad_input_is_one_line(served: list[tuple[Any, ...]], arguments: tuple[str, ...], message: str) -> None:
    result = invoke("serve", "/no/such/model", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert served == []


def test_missing_packages_are_named_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    result = invoke("serve", "/no/such/model")
    assert result.exit_code == 2
    assert "pip install 'transformers[serving]'" in result.stderr
