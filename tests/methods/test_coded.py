"""What methods with key codes share: the sizes that they pass to the ops."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

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
    for module, name in ((keycodes, "append_and_select_tokens"), (coded, "code_scores")):
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
