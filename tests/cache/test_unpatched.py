"""Caches of patched models in models that are not patched: read as their own, or refused."""

import pytest
import torch

from hf_sparse_attn import METHODS, SparseCache, patch_model, unpatch_model
from tests.compared import ROUNDING
from tests.families import tiny_model
from tests.models import SPARSE, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")
PARAMETERS = {**SPARSE, "ntk": {"factor": 4}}
REFUSED = {
    "tokenselect": "before RoPE",
    "infllm": "before RoPE",
    "self_extend": "before RoPE",
    "ntk": "a RoPE of its own",
}


def _patched(method_name):
    model = make_model("llama", dtype=torch.float64)
    budget = {} if method_name == "ntk" else {"token_budget": 512}
    return patch_model(model, method_name, **budget, **PARAMETERS.get(method_name, {}))


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "static"])
@pytest.mark.parametrize("method_name", METHODS)
@torch.inference_mode()
def test_an_unpatched_model_reads_a_cache_as_its_own_or_refuses_it(method_name, max_cache_len):
    model, ids = _patched(method_name), random_ids(1, 44)
    filled, empty = (SparseCache.for_model(model, max_cache_len=max_cache_len) for _ in range(2))
    model(ids[:, :40], past_key_values=filled)
    unpatch_model(model)
    for cache, cached in ((filled, 40), (empty, 0)):
        if method_name in REFUSED:
            with pytest.raises(ValueError, match=f"'{method_name}' caches keys .*{REFUSED[method_name]}.*patch_model"):
                model(ids[:, cached:], past_key_values=cache)
            assert cache.get_seq_length() == cached
        else:
            logits = model(ids[:, cached:], past_key_values=cache).logits
            expected = model(ids).logits[:, cached:]
            assert (logits - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "static"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "olmo3"])
@torch.inference_mode()
def test_no_token_after_the_last_one_is_read_beside_sliding_windows(family, max_cache_len):
    model, ids = tiny_model(family), random_ids(1, 44)
    cache = SparseCache(model.config, "full", max_cache_len)
    assert any(layer.is_sliding for layer in cache.layers)
    model(ids[:, :40], past_key_values=cache)
    for position in range(40, 44):
        logits = model(ids[:, position : position + 1], past_key_values=cache).logits[:, -1]
        expected = model(ids[:, : position + 1]).logits[:, -1]
        assert (logits - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.parametrize("method_name", REFUSED)
@torch.inference_mode()
def test_a_refused_cache_goes_on_in_a_patched_model(method_name):
    model, ids = _patched(method_name), random_ids(1, 44)
    refused, untouched = (SparseCache.for_model(model) for _ in range(2))
    for cache in (refused, untouched):
        model(ids[:, :40], past_key_values=cache)
    method = refused.method
    unpatch_model(model)
    with pytest.raises(ValueError, match="patch_model"):
        model(ids[:, 40:], past_key_values=refused)
    patch_model(model, method)
    logits = model(ids[:, 40:], past_key_values=refused).logits
    assert torch.equal(logits, model(ids[:, 40:], past_key_values=untouched).logits)
