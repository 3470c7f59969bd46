"""Files of contexts: complete or absent, and refused where they do not belong."""

import errno
import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

import hf_sparse_attn
from hf_sparse_attn import FixedContext, sparse_attention, tensor_file
from hf_sparse_attn.context import files
from hf_sparse_attn.context.contents import read_budget
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


def rewrite(path, texts=None, tensors=None):
    """Change a file so that its checksums still hold; a tensor of None is left out."""
    with tensor_file.open_tensors(path, files.FORMAT, "a fixed context") as file:
        contents = {**{name: file.read(name) for name in file.checksums}, **(tensors or {})}
        written = {**file.header, **(texts or {})}
    contents = {name: tensor for name, tensor in contents.items() if tensor is not None}
    tensor_file.write_tensors(path, files.FORMAT, written, contents)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"num_layers": "0"}, "num_layers must be at least 1, got 0"),
        ({"num_layers": "3"}, r"layers\.3\.\w+ is no part of what its header describes"),
        ({"num_layers": "9" * 30}, r"layers\.4\.queries is missing"),
        ({"num_tokens": "5"}, "num_tokens must be at least 25, got 5"),
        ({"num_tokens": "229"}, r"layers\.0\.keys must be \[1, 2, 229, 16\]"),
        ({"num_tokens": "9" * 400}, "num_tokens must be at most 2147483647"),
        ({"seconds": "[1, 2, NaN]"}, "seconds must be finite numbers"),
        ({"seconds": '[1, 2, "3"]'}, "seconds must be finite numbers"),
        ({"notes": "[1]"}, "notes must be a JSON object with values of type str"),
        ({"notes": "[" * 100_000}, "maximum recursion depth"),
        ({"identity": '{"model_id": 1, "config_hash": 2, "weights_hash": NaN}'}, "identity must be a JSON object"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_header_that_cannot_be_true_is_refused(texts, message, saved, model):
    rewrite(saved, texts)
    for use in (files.read_header, lambda path: FixedContext.load(path, model)):
        with pytest.raises(ValueError, match=rf"novel\.safetensors .*damaged.*{message}"):
            use(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.queries": None}, r"layers\.1\.queries is missing"),
        ({"layers.1.cluster_sizes": None}, r"layers\.1\.cluster_sizes is missing"),
        ({"layers.4.keys": torch.zeros(3)}, r"layers\.4\.keys is no part of what its header describes"),
        ({"layers.2.values": torch.zeros(1, 2, 230, 16)}, r"must be \[1, 2, 230, 16\] in float64, got .* float32"),
        ({"layers.0.keys": torch.zeros(4)}, r"layers\.0\.keys must be"),
        ({"layers.0.queries": torch.zeros(())}, r"layers\.0\.queries must be"),
        ({"layers.3.run_clusters": torch.zeros(())}, r"layers\.3\.run_\w+ must be"),
        ({"layers.3.threshold": torch.zeros(1).long()}, r"layers\.3\.threshold must be \[1\] in float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_tensors_that_the_header_does_not_describe_are_refused(change, message, saved, model):
    rewrite(saved, tensors=change)
    for use in (files.read_header, read_budget, lambda path: FixedContext.load(path, model)):
        with pytest.raises(ValueError, match=rf"novel\.safetensors is damaged: .*{message}"):
            use(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 10**6) for name in ("cluster_sizes", "coarse_sizes", "run_starts", "run_clusters", "parents")),
        *((name, 10**6) for name in ("token_order", "context_start", "context_lengths")),
        *((name, -2) for name in ("cluster_sizes", "run_starts", "run_clusters", "parents", "token_order")),
        ("run_starts", 0),
        ("token_order", 0),
    ],
)
def test_an_index_that_leads_outside_the_context_is_refused(name, value, saved, model, contexts):
    tensor = contexts(0.5, 2).layers[1].metadata[name].cpu()
    rewrite(saved, tensors={f"layers.1.{name}": torch.full_like(tensor, value)})
    with pytest.raises(ValueError, match=rf"novel\.safetensors has a damaged index of layer 1: {name} must"):
        FixedContext.load(saved, model)
    if name not in ("token_order", "context_start", "context_lengths"):
        with pytest.raises(ValueError, match=f"damaged index of layer 1: {name} must"):
            read_budget(saved)


def test_an_order_that_names_a_token_twice_is_refused(saved, model, contexts):
    order = contexts(0.5, 2).layers[1].metadata["token_order"].cpu().clone()
    order[0, 1, 3] = order[0, 1, 4]
    rewrite(saved, tensors={"layers.1.token_order": order})
    with pytest.raises(ValueError, match="token_order must name each of the tokens 0 to 229 once"):
        FixedContext.load(saved, model)


def test_heads_of_another_model_are_damage(saved, model, contexts):
    one_head = {
        f"layers.{number}.{name}": tensor[:, :1].cpu()
        for number, layer in enumerate(contexts(0.5, 2).layers)
        for name, tensor in {"keys": layer.keys, "values": layer.values, **layer.metadata}.items()
        if tensor.dim() > 1
    }
    rewrite(saved, tensors=one_head)
    with pytest.raises(ValueError, match="is damaged: it has 4 layers of 6 query heads and 1 KV heads"):
        FixedContext.load(saved, model)


def test_keys_of_another_dtype_are_damage(saved, model, contexts):
    narrow = {
        f"layers.{number}.{name}": tensor.cpu().float()
        for number, layer in enumerate(contexts(0.5, 2).layers)
        for name, tensor in {"keys": layer.keys, "values": layer.values, **layer.metadata}.items()
        if tensor.dtype == torch.float64
    }
    rewrite(saved, tensors=narrow)
    with pytest.raises(ValueError, match=r"is damaged: its keys are in torch\.float32, .* in torch\.float64"):
        FixedContext.load(saved, model)


def test_notes_that_are_no_texts_are_not_saved(saved, contexts):
    before = saved.read_bytes()
    with pytest.raises(TypeError, match="notes must be texts by name, got 'title': 3"):
        replace(contexts(0.5, 2), notes={"title": 3}).save(saved)
    assert saved.read_bytes() == before


def test_a_missing_file_is_named(tmp_path, model):
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        FixedContext.load(tmp_path / "absent.safetensors", model)


@pytest.mark.parametrize("target", ["tensor_file.save_file", "whole_file._flush"])
def test_a_full_disk_leaves_the_former_file_and_nothing_else(target, saved, contexts, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = saved.read_bytes()
    monkeypatch.setattr(f"hf_sparse_attn.{target}", full)
    with pytest.raises(OSError, match="No space left"):
        contexts(0.9).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_folder_that_does_not_exist_is_named(tmp_path, contexts):
    with pytest.raises(OSError, match="nowhere"):
        contexts(0.5).save(tmp_path / "nowhere" / "novel.safetensors")
