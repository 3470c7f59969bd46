"""``--revision`` reaches whatever is loaded from the hub, and is refused where Transformers would ignore it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse_attn.cli import models, serve_command
from hf_sparse_attn.cli.models import ModelLoadError, load_model
from tests.cli.commands import invoke
from tests.tiny import save_model

SMALL = ("--window", "20", "--clusters", "0.2", "--target-sparsity", "0.5")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(save_model(tmp_path / "model", chat=True))


@pytest.fixture
def loaded(folder: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str | None]]:
    """Return what each ``from_pretrained`` is asked for; the folder's model stands in for all of the hub's."""
    asked: list[tuple[str, str, str | None]] = []
    for kind in (AutoTokenizer, AutoModelForCausalLM):

        def load(source: str, kind: Any = kind, own: Any = kind.from_pretrained, **options: Any) -> Any:
            asked.append((kind.__name__, source, options.pop("revision", None)))
            return own(folder, **options)

        monkeypatch.setattr(kind, "from_pretrained", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return asked


def both(revision: str | None) -> list[tuple[str, str, str | None]]:
    """Return what is asked for to load a tokenizer and a model."""
    return [(kind.__name__, "owner/model", revision) for kind in (AutoTokenizer, AutoModelForCausalLM)]


def run(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("revision", [None, "v1"])
def test_tokenizer_and_model_are_of_the_revision(
    loaded: list[tuple[str, str, str | None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, revision: str | None
) -> None:
    named = () if revision is None else ("--revision", revision)
    shown = "owner/model" if revision is None else f"owner/model@{revision}"
    text, context = tmp_path / "text", str(tmp_path / "context")
    text.write_text("The day is long. The wind is low. " * 8)
    options = ("--model", "owner/model", *named, "--json")

    short = ("--prompt-file", str(text), "--max-new-tokens", "1")
    assert json.loads(run("compare", *options, *short))["model"] == shown
    assert loaded == both(revision)
    loaded.clear()
    run("context", "prepare", *options, "--text", str(text), "--output", context, *SMALL)
    assert json.loads(run("context", "inspect", context, "--json"))["origin"]["model"] == shown
    assert loaded == both(revision)
    loaded.clear()
    asked = run("context", "ask", context, "Why?", *options, "--max-new-tokens", "1")
    assert json.loads(asked)["model"] == shown
    assert loaded == both(revision)
    loaded.clear()
    served: list[str] = []
    monkeypatch.setattr(serve_command, "check_packages", lambda: None)
    monkeypatch.setattr(serve_command, "serve_model", lambda *arguments, **_: served.append(arguments[2]))
    run("serve", "owner/model", *named)
    assert served == [shown]
    assert loaded == both(revision)


def test_weights_of_a_revision_must_be_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: None)

    def load(_: str, **given: Any) -> None:
        options.update(given)
        raise OSError("no such file")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ModelLoadError, match="no such file"):
        load_model("owner/model", revision="v1")
    assert (options["revision"], options["use_safetensors"]) == ("v1", True)


def test_a_revision_of_what_is_not_on_the_hub_is_refused(
    folder: str, loaded: list[tuple[str, str, str | None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(serve_command, "check_packages", lambda: None)
    text, output = tmp_path / "text", tmp_path / "context"
    text.write_text("The day is long. " * 8)
    for name in (folder, "smollm2", str(tmp_path / "model.gguf")):
        for command in (
            ("compare", "--model", name, "--html", str(tmp_path / "page.html")),
            ("context", "prepare", "--model", name, "--text", str(text), "--output", str(output), *SMALL),
            ("serve", name),
        ):
            result = invoke(*command, "--revision", "v1")
            assert result.exit_code == 2
            (line,) = result.stderr.splitlines()
            said = f"revision='v1' (--revision) is for a model id on the hub, and model {name!r} is not one"
            assert line == f"error: {said}"
        with pytest.raises(ModelLoadError, match="is not one"):
            load_model(name, revision="v1")
    assert loaded == []
    assert {path.name for path in tmp_path.iterdir()} == {"model", "text"}


def test_an_empty_revision_is_not_the_main_branch(loaded: list[tuple[str, str, str | None]]) -> None:
    result = invoke("compare", "--model", "owner/model", "--revision", "")
    assert result.exit_code == 2
    assert "revision='' (--revision) is empty" in result.stderr
    assert loaded == []
