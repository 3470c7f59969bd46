"""Common parts of methods with key codes: the sizes that they pass to the ops."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from hf_sparse_attn_kernels.codes.mass_weights import step_weights
from hf_sparse_attn_kernels.codes.rotation import rotation, rotation_levels

from hf_sparse_attn import KeyCodes, RaBitQCache, SparseCache, sparse_attention
from hf_sparse_attn.methods import coded, keycodes
from tests.methods.coded import decode
from tests.models import random_ids, shared_model

METHODS = [
    KeyCodes(token_budget=52, page_size=48),
    RaBitQCache(top_p=0.6, page_size=48, sink_tokens=48, dense_layers=0),
]


@pytest.mark.parametrize("max_cache_len", [None, 145, 192], ids=["growing", "static-145", "static-192"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@torch.inference_mode()
def test_scores_are_those_of_whole_pages_for_which_the_codes_have_room(method, max_cache_len, monkeypatch):
    scored = []
    for module, name in ((keycodes, "append_and_attend_tokens"), (coded, "code_scores")):
        op = getattr(module, name)

        def seeing(*args, op=op, **options):
            scored.append((options["num_tokens"], options["codes"].shape[2]))
            return op(*args, **options)

        monkeypatch.setattr(module, name, seeing)
    model = shared_model("llama", torch.float64)
    with use_impl("reference"), sparse_attention(model, method):
        cache = SparseCache.for_model(model, max_cache_len=max_cache_len)
        model(random_ids(2, 142), past_key_values=cache)
        decode(model, cache, random_ids(2, 3, seed=1))
    # Growing: steps of 143, 144 and 145 tokens.
    expected = [144, 144, 192] if max_cache_len is None else [192] * 3
    assert [tokens for tokens, _ in scored] == [tokens for tokens in expected for _ in cache.layers]
    assert all(tokens <= room for tokens, room in scored)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@torch.inference_mode()
def test_a_prompt_makes_the_tensors_that_steps_share(method):
    """A step may be recorded as a CUDA graph, which overwrites memory that is first allocated in it."""
    constants = [make.__wrapped__ for make in (rotation, rotation_levels, step_weights)]
    for make in constants:
        make.cache_clear()
    model = shared_model("llama")
    with sparse_attention(model, method):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 120), past_key_values=cache)
        made = [make.cache_info().misses for make in constants]
        model(random_ids(1, 1), past_key_values=cache)
    assert all(made)
    assert [make.cache_info().misses for make in constants] == made
