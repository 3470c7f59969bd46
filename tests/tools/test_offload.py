"""Weights that accelerate offloads to memory or disk until their layer runs."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoModelForCausalLM

from hf_sparse_attn import SparseCache, patch_model
from tests.tools.checks import GREEDY, check_tool, exact_model, padded_batch, quest_first, small, sparse_methods

LAYERS = {f"model.layers.{layer}": "cpu" if layer < 2 else "disk" for layer in range(4)}
DEVICE_MAP = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", **LAYERS, "model.norm": "cpu", "lm_head": "cpu"}


def in_memory(folder):
    return cpu_offload(exact_model(), torch.device("cpu"))


def in_memory_with_buffers(folder):
    return cpu_offload(exact_model(), torch.device("cpu"), offload_buffers=True)


def on_disk(folder):
    return disk_offload(exact_model(), folder, torch.device("cpu"))


def dispatched(folder):
    return dispatch_model(exact_model(), DEVICE_MAP, main_device="cpu", offload_dir=folder, force_hooks=True)


def loaded(folder):
    exact_model().save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=DEVICE_MAP, offload_folder=folder, dtype=torch.float64
    ).eval()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}
    return model


def loaded_with_a_map_of_accelerates(folder):
    exact_model().save_pretrained(folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model", device_map="auto", dtype=torch.float64).eval()


@quest_first
@pytest.mark.parametrize(
    "make", [in_memory, in_memory_with_buffers, on_disk, dispatched, loaded, loaded_with_a_map_of_accelerates]
)
def test_offloaded_weights(make, method_name, tmp_path):
    model, prompt = make(tmp_path), padded_batch()
    expected = exact_model().generate(**prompt, **GREEDY)
    assert torch.equal(model.generate(**prompt, **GREEDY), expected)
    check_tool(lambda: model.generate(**prompt, **GREEDY), model, method_name)


@sparse_methods
def test_offloading_a_patched_model(method_name, tmp_path):
    prompt = padded_batch()
    model = patch_model(exact_model(), method_name, **small(method_name))
    expected = model.generate(**prompt, **GREEDY)
    disk_offload(model, tmp_path, torch.device("cpu"))
    cache = SparseCache.for_model(model)
    assert torch.equal(model.generate(**prompt, past_key_values=cache, **GREEDY), expected)
    assert {layer.keys.device.type for layer in cache.layers} == {"cpu"}
