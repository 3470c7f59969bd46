"""Patched models under torch.autocast, where RoPE leaves queries and keys in another dtype than values."""

import pytest
import torch

from hf_sparse_attn import METHODS, SparseCache, patch_model, sparse_attention
from tests.models import COVERING, DEVICE, SPARSE, make_model, random_ids, shared_model

READ_ALL = {**COVERING, "infllm": {"n_init": 0, "n_local": 256}}
every_method = pytest.mark.parametrize("method_name", METHODS)


@every_method
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_a_covering_budget_is_dense_attention(method_name, static):
    model, ids = shared_model("llama", torch.float32), random_ids(2, 130)
    expected = model(ids).logits[:, 120:].float()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        stock = model(ids).logits[:, 120:].float()
        with sparse_attention(model, method_name, **READ_ALL.get(method_name, {"token_budget": 512})):
            cache = SparseCache.for_model(model, max_cache_len=160 if static else None)
            model(ids[:, :120], past_key_values=cache)
            steps = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(120, 130)]
    assert {layer.dtype for layer in cache.sparse_layers} == {torch.bfloat16}
    found = torch.cat(steps, dim=1).float()
    rounding = (stock - expected).abs().max()
    assert (found - expected).abs().max() <= 3 * rounding


@every_method
@torch.no_grad()
def test_a_text_that_outgrows_the_budget_goes_on(method_name):
    model, ids = shared_model("llama", torch.float32), random_ids(1, 150)
    with (
        sparse_attention(model, method_name, **{"token_budget": 64, **SPARSE.get(method_name, {})}),
        torch.autocast(DEVICE, dtype=torch.bfloat16),
    ):
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    assert answer.shape == (1, 158)


@torch.no_grad()
def test_a_cache_of_another_dtype_keeps_it():
    model, ids = shared_model("llama", torch.float32), random_ids(1, 150)
    with sparse_attention(model, "quest", token_budget=512):
        cache = SparseCache.for_model(model)
        model(ids[:, :140], past_key_values=cache)
        expected = model(ids).logits[:, 140:]
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            stock = model(ids).logits[:, 140:].float()
            steps = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(140, 150)]
    assert {layer.dtype for layer in cache.sparse_layers} == {torch.float32}
    assert (torch.cat(steps, 1).float() - expected).abs().max() <= 3 * (stock - expected).abs().max()


@every_method
@pytest.mark.parametrize("max_cache_len", [None, 200], ids=["growing", "static"])
@torch.no_grad()
def test_a_cache_is_continued_after_the_model_is_cast(method_name, max_cache_len):
    ids = random_ids(1, 150)
    logits, stock = [], []
    for cast in (torch.float32, torch.bfloat16):
        stock.append(make_model("llama").to(cast)(ids).logits[:, 140:].float())
        model = make_model("llama")
        patch_model(model, method_name, **READ_ALL.get(method_name, {"token_budget": 512}))
        cache = SparseCache.for_model(model, max_cache_len=max_cache_len)
        model(ids[:, :140], past_key_values=cache)
        model.to(cast)
        parts = [ids[:, 140:145], *ids[:, 145:].split(1, dim=1)]
        logits.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1).float())
        assert {layer.dtype for layer in cache.sparse_layers} == {torch.float32}
    rounding = (stock[1] - stock[0]).abs().max()
    assert (logits[1] - logits[0]).abs().max() <= 3 * rounding
