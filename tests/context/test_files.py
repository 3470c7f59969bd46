"""Files of contexts: complete or absent, and refused where they do not belong."""

import errno
import json

import pytest
import torch
from safetensors import safe_open

import hf_sparse_attn
from hf_sparse_attn import FixedContext, sparse_attention, tensor_file
from hf_sparse_attn.context import files
from tests.models import make_model, random_ids

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture
def saved(tmp_path, contexts):
    path = tmp_path / "novel.safetensors"
    contexts(0.5, 2).save(path)
    return path


@torch.inference_mode()
def test_a_loaded_context_answers_as_the_saved_one(saved, model, contexts, context_ids):
    context, loaded = contexts(0.5, 2), FixedContext.load(saved, model, context_ids)
    assert loaded.method == context.method
    assert loaded.identity == context.identity
    assert torch.equal(loaded.budget.decode, context.budget.decode)
    with sparse_attention(model, context.method):
        asked = random_ids(2, 9, seed=1)
        first, second = (model.generate(asked, past_key_values=c.cache(), **GREEDY) for c in (context, loaded))
    assert torch.equal(first, second)


def test_the_header_names_model_tokens_and_version(saved, contexts):
    context, header = contexts(0.5, 2), files.read_header(saved)
    assert header.version == hf_sparse_attn.__version__
    assert header.token_ids_hash == context.token_ids_hash
    assert header.identity == context.identity
    assert (header.num_layers, header.num_tokens) == (4, context.num_tokens)
    with safe_open(saved, framework="pt") as file:
        assert {"layers.0.keys", "layers.0.values", "layers.3.centroids", "layers.3.threshold"} <= set(file.keys())


def test_a_context_of_another_model_is_refused(saved):
    with pytest.raises(ValueError, match="prepared by a model with other weights"):
        FixedContext.load(saved, make_model("llama", seed=1, dtype=torch.float64))
    with pytest.raises(ValueError, match="prepared by a model with another configuration"):
        FixedContext.load(saved, make_model("qwen3", dtype=torch.float64))
    with pytest.raises(ValueError, match="prepared by a model in float64, but this one is in float32: load it with"):
        FixedContext.load(saved, make_model("llama"))


def test_other_token_ids_are_refused(saved, model, context_ids):
    with pytest.raises(ValueError, match="other token ids"):
        FixedContext.load(saved, model, context_ids.flip(1))


@pytest.mark.parametrize("kept", [0, 7, 2000, -1], ids=["empty", "no-header", "no-tensors", "last-byte"])
def test_a_cut_file_is_refused(kept, saved, model):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"novel.safetensors is damaged or cut off"):
        FixedContext.load(saved, model)


def test_a_damaged_file_is_refused(saved, model):
    content = bytearray(saved.read_bytes())
    content[-1000] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ValueError, match=r"the checksum of layers\.\d+\.\w+ is wrong"):
        FixedContext.load(saved, model)


def test_a_damaged_header_is_refused(saved, model):
    with files.opened(saved) as (file, header):
        tensors = {name: file.read(name) for name in file.checksums}
    for damaged, message in (
        ({**header.to_texts(), "method": json.dumps({"window": "x"})}, "has a damaged header"),
        ({}, "has a damaged header: 'method'"),
    ):
        tensor_file.write_tensors(saved, files.FORMAT, damaged, tensors)
        with pytest.raises(ValueError, match=message):
            FixedContext.load(saved, model)
    tensor_file.write_tensors(saved, "something else", header.to_texts(), tensors)
    with pytest.raises(ValueError, match="is not a fixed context of this version: its format is 'something else'"):
        FixedContext.load(saved, model)


def test_a_missing_file_is_named(tmp_path, model):
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        FixedContext.load(tmp_path / "absent.safetensors", model)


@pytest.mark.parametrize("fails_in", ["save_file", "_flush"])
def test_a_full_disk_leaves_the_former_file_and_nothing_else(fails_in, saved, contexts, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = saved.read_bytes()
    monkeypatch.setattr(tensor_file, fails_in, full)
    with pytest.raises(OSError, match="No space left"):
        contexts(0.9).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_folder_that_does_not_exist_is_named(tmp_path, contexts):
    with pytest.raises(OSError, match="nowhere"):
        contexts(0.5).save(tmp_path / "nowhere" / "novel.safetensors")
