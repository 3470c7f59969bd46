"""Models spread over several devices."""

import pytest
import torch
from accelerate import dispatch_model

from hf_sparse_attn import SparseCache, patch_model, sparse_attention_stats
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
