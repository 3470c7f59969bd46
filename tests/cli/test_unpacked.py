"""The copy of an alias's weights as safetensors, with a tiny GGUF file."""

import hashlib
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_sparse_attn.cli import models, unpacked
from hf_sparse_attn.cli.app import app
from hf_sparse_attn.cli.files import file_sha256
from hf_sparse_attn.cli.models import ModelLoadError, PackagedWeights, load_model, load_tokenizer
from hf_sparse_attn.identity import ModelIdentity

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 2, 16, 64, 96
TOKENS = ["<end>", "<start>", *"abcdefghij", "Ġ", "ab", "abc"]
TEMPLATE = "{% for message in messages %}<start>{{ message['content'] }}<end>{% endfor %}"


def write_gguf(path: Path, seed: int = 0) -> None:
    """Write a Llama of two layers with tied embeddings, its matrices in 8-bit blocks as in the file of an alias."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    special, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([special, special, *[normal] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    layer = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
    }
    matrices = {"token_embd": (len(TOKENS), HIDDEN)}
    matrices |= {f"blk.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    for name, shape in matrices.items():
        blocks = gguf.quantize(rng.normal(0, 0.3, shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", *(f"blk.{index}.{norm}" for index in range(2) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.q8.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def file(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of the alias ``tiny`` in a cache folder that has nothing else."""
    weights = PackagedWeights("tiny-weights==1.0", written.name, file_sha256(written), written.stat().st_size)
    monkeypatch.setitem(models.ALIASES, "tiny", weights)
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return Path(shutil.copy(written, tmp_path / "cache"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that copies were written to."""
    folders = []
    write = unpacked._write

    def counted(file: Path, folder: Path, origin: dict[str, str], dtype: torch.dtype | None = None) -> None:
        folders.append(folder)
        write(file, folder, origin, dtype)

    monkeypatch.setattr(unpacked, "_write", counted)
    return folders


def test_the_copy_is_the_model_of_the_file(file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    copy, copied_tokenizer = load_model("tiny", device="cpu")
    assert Path(copy.name_or_path) == file.with_suffix("")
    weights, copied_weights = model.state_dict(), copy.state_dict()
    assert weights.keys() == copied_weights.keys()
    assert all(torch.equal(weights[name], copied_weights[name]) for name in weights)
    assert copy.get_output_embeddings().weight is copy.get_input_embeddings().weight
    assert type(copied_tokenizer) is type(tokenizer)
    assert copied_tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert copied_tokenizer.chat_template == tokenizer.chat_template == TEMPLATE
    assert copied_tokenizer.special_tokens_map == tokenizer.special_tokens_map
    assert copied_tokenizer("abcab j").input_ids == tokenizer("abcab j").input_ids
    assert copy.generation_config.to_dict() == model.generation_config.to_dict()
    if hasattr(model.config, "quantization_config"):  # Transformers 5.23 marks weights that it dequantized
        del model.config.quantization_config
    assert ModelIdentity.of(copy).config_hash == ModelIdentity.of(model).config_hash
    assert load_tokenizer("tiny")[1].to_dict() == copy.config.to_dict()


def test_the_file_is_read_once(file: Path, reads: list[Path]) -> None:
    first, _ = load_model("tiny", device="cpu")
    again, _ = load_model("tiny", device="cpu", dtype=torch.bfloat16)
    assert len(reads) == 1
    assert torch.equal(again.lm_head.weight, first.lm_head.weight.bfloat16())
    assert {path.name for path in file.parent.iterdir()} == {file.name, file.stem, f".{file.stem}.lock"}


@pytest.mark.parametrize("damaged", ["model.safetensors", "tokenizer.json", "config.json", unpacked.CHECKSUMS])
def test_a_damaged_copy_is_replaced(file: Path, reads: list[Path], damaged: str) -> None:
    folder = unpacked.unpacked(file, file_sha256(file))
    assert folder is not None
    whole = (folder / damaged).read_bytes()
    for content in (bytes([whole[0] ^ 1]) + whole[1:], whole[:-1] + b"x", b"", None):
        (folder / damaged).unlink()
        if content is not None:
            (folder / damaged).write_bytes(content)
        assert unpacked.unpacked(file, file_sha256(file)) == folder
        assert (folder / damaged).read_bytes() == whole
    assert len(reads) == 5


def test_a_copy_of_another_file_or_by_another_transformers_is_replaced(
    file: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpacked.unpacked(file, file_sha256(file))
    assert folder is not None
    former = (folder / "model.safetensors").read_bytes()
    write_gguf(file, seed=1)
    assert unpacked.unpacked(file, file_sha256(file)) == folder
    assert (folder / "model.safetensors").read_bytes() != former
    monkeypatch.setattr(unpacked, "version", lambda package: "5.99.0")
    assert unpacked.unpacked(file, file_sha256(file)) == folder
    assert json.loads((folder / unpacked.CHECKSUMS).read_text())["transformers"] == "5.99.0"
    assert len(reads) == 3


def test_an_interrupted_copy_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: Path, folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(unpacked, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model("tiny")
    assert {path.name for path in file.parent.iterdir()} == {file.name, f".{file.stem}.lock"}


def test_without_room_for_a_copy_the_file_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(unpacked, "_write", full)
    with pytest.warns(UserWarning, match=r"tiny\.q8 cannot be written .*No space left.*read from tiny\.q8\.gguf"):
        model, _ = load_model("tiny", device="cpu")
    assert model.config.num_hidden_layers == 2
    assert {path.name for path in file.parent.iterdir()} == {file.name, f".{file.stem}.lock"}


def test_a_file_that_transformers_cannot_read_is_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b"GGUF of somebody else")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    weights = PackagedWeights("tiny-weights==1.0", file.name, digest, file.stat().st_size)
    monkeypatch.setitem(models.ALIASES, "tiny", weights)
    with pytest.raises(ModelLoadError, match="model 'tiny' could not be loaded") as raised:
        load_model("tiny")
    assert "\n" not in str(raised.value)


def test_another_gguf_file_is_not_copied(written: Path) -> None:
    load_model(written, device="cpu")
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_a_file_is_unpacked_by_a_command_and_loads_as_the_same_model(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tiny"
    result = CliRunner().invoke(app, ["unpack", str(written), str(folder), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    copy, tokenizer = load_model(str(folder), torch.float32, "cpu")
    model, _ = load_model(written, torch.bfloat16, "cpu")
    weights, copied = model.state_dict(), copy.state_dict()
    assert weights.keys() == copied.keys()
    assert all(torch.equal(weights[name].float(), copied[name]) for name in weights)
    assert tokenizer.chat_template == TEMPLATE


def test_what_cannot_be_unpacked_is_said_in_a_line_and_nothing_is_written(written: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(40))
    new = str(tmp_path / "new")
    for arguments, said in [
        ([str(written), str(tmp_path / "there")], "there' exists; name a new one"),
        ([str(tmp_path / "none.gguf"), new], "no such GGUF file"),
        ([str(tmp_path / "damaged.gguf"), new], "could not be loaded"),
        ([str(tmp_path / "model.bin"), new], "model.bin' does not exist; it must be a .gguf file"),
        ([str(tmp_path / "there"), new], "there' is not a .gguf file"),
        ([str(written), new, "--dtype", "int8"], "--dtype 'int8' is unknown; allowed: float32, bfloat16, float16"),
    ]:
        refused = CliRunner().invoke(app, ["unpack", *arguments])
        assert refused.exit_code == 2, refused.output
        assert said in " ".join(refused.stderr.split())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.gguf", "there"]
    assert not list((tmp_path / "there").iterdir())
    with pytest.raises(FileExistsError, match="there' exists; name a new one"):
        unpacked.unpack(written, tmp_path / "there")


def test_a_folder_made_while_a_model_is_unpacked_is_kept(tmp_path, monkeypatch):
    target = tmp_path / "target"

    def write(file, folder, origin, dtype):
        folder.mkdir()
        (folder / "model.safetensors").touch()
        target.mkdir()
        (target / "thesis.txt").touch()

    monkeypatch.setattr("hf_sparse_attn.cli.unpacked._write", write)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FileExistsError, match="target' exists; name a new one"):
        unpacked.unpack(tmp_path / "model.gguf", target)
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "target"]
