"""Models spread over several devices."""

import pytest
import torch
from accelerate import dispatch_model

from hf_sparse_attn import (
    PSA,
    KeyCodes,
    Quest,
    SparseCache,
    TokenSelect,
    patch_model,
    sparse_attention_stats,
)
from tests.models import make_model, random_ids

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("token_budget", [64, 1024])
def test_layers_on_different_devices(token_budget):
    ids = random_ids(2, 150).cpu()
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    whole = patch_model(make_model("llama").cpu(), "quest", token_budget=token_budget)
    expected = whole.generate(ids, attention_mask=mask, **GREEDY)

    layers = {f"model.layers.{i}": "cpu" if i < 3 else 0 for i in range(4)}
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", **layers, "model.norm": 0, "lm_head": 0}
    spread = dispatch_model(make_model("llama").cpu(), device_map, main_device="cpu")
    patch_model(spread, "quest", token_budget=token_budget)
    cache = SparseCache.for_model(spread)
    actual = spread.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(actual.cpu(), expected)
    assert {layer.keys.device.type for layer in cache.layers} == {"cpu", "cuda"}
    assert sparse_attention_stats(spread) == sparse_attention_stats(whole)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs CUDA, 2 devices")
@torch.inference_mode()
@pytest.mark.parametrize("max_cache_len", [None, 200])
@pytest.mark.parametrize(
    "method",
    [
        Quest(token_budget=48, dense_layers=1),
        PSA(threshold=0.8, block_size=16, microbatch=2),
        TokenSelect(token_budget=48, chunk_size=64, selection_cache_threshold=0.5),
        KeyCodes(token_budget=48, page_size=16),
    ],
    ids=lambda method: method.name,
)
def test_layers_on_two_gpus(method, max_cache_len):
    """The cache and its metadata are where their layer is, and the tokens are those of one GPU."""
    ids = random_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    whole = patch_model(make_model("llama"), method)
    expected = whole.generate(ids, attention_mask=mask, disable_compile=True, **GREEDY)

    layers = {f"model.layers.{i}": i // 2 for i in range(4)}
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, **layers, "model.norm": 1, "lm_head": 1}
    spread = patch_model(dispatch_model(make_model("llama"), device_map), method)
    cache = SparseCache.for_model(spread, max_cache_len)
    actual = spread.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(actual, expected)
    assert sparse_attention_stats(spread) == sparse_attention_stats(whole)
    for layer, device in zip(cache.layers, (0, 0, 1, 1), strict=True):
        state = {"keys": layer.keys, "values": layer.values, "seq_end": layer.seq_end, **layer.metadata}
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        assert {name: value.device.index for name, value in tensors.items()} == dict.fromkeys(tensors, device)
        assert layer.metadata or layer is cache.layers[0]  # which is dense with Quest


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("token_budget", [64, 1024])
@pytest.mark.parametrize("max_cache_len", [None, 200])
def test_decode_steps_never_wait_for_the_device(token_budget, max_cache_len):
    model = patch_model(make_model("llama"), "quest", token_budget=token_budget)
    ids, steps = random_ids(2, 150), random_ids(2, 5, seed=1)
    mask = torch.ones(2, 155, dtype=torch.long, device="cuda")
    mask[0, :21] = 0
    cache = SparseCache.for_model(model, max_cache_len)
    model(ids, attention_mask=mask[:, :150], past_key_values=cache)
    model(steps[:, :1], attention_mask=mask[:, :151], past_key_values=cache)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 5):
            model(steps[:, step : step + 1], attention_mask=mask[:, : 151 + step], past_key_values=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sparse_attention_stats(model).decode_steps == 5
