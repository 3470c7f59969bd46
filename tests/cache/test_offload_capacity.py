"""Contexts whose keys and values do not fit into the device's memory."""

import gc

import pytest
import torch

from hf_sparse_attn import patch_model, sparse_attention_stats
from tests.models import make_model, random_ids

GIB = 1 << 30
TOKENS = 8192
# The layers and KV heads of a Llama with 70 billion parameters: 640 KiB a token in float32, 5 GiB in all.
SHAPE = {"num_hidden_layers": 80, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
LIMIT = 3 * GIB
OFFLOADED = {"offload": True, "gpu_cache_tokens": TOKENS // 4}


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize(
    ("method", "parameters", "elsewhere"),
    [
        ("quest", {"token_budget": 1024}, OFFLOADED),
        ("psa", {"threshold": 0.9, "token_budget": 2048}, OFFLOADED),
        ("quest", {"token_budget": 512}, {"kv_storage": "host"}),
        ("keycodes", {"token_budget": 512}, {"kv_storage": "host"}),
    ],
    ids=["quest-offloaded", "psa-offloaded", "quest-host", "keycodes-host"],
)
def test_a_context_larger_than_the_device_s_memory_decodes_to_the_resident_tokens(method, parameters, elsewhere):
    model = make_model("llama", hidden_size=128, max_position_embeddings=2 * TOKENS, initializer_range=0.1, **SHAPE)
    ids = random_ids(1, TOKENS)
    generated = []
    for settings in ({}, elsewhere):
        patch_model(model, method, **parameters, **settings)
        if settings:
            _limit_memory(LIMIT)
        try:
            generated.append(_generate(model, ids))
            if settings:
                assert torch.cuda.max_memory_allocated() < LIMIT < sparse_attention_stats(model).bytes_stored
                patch_model(model, method, **parameters)
                with pytest.raises(torch.OutOfMemoryError):
                    _generate(model, ids)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(*generated)


def _generate(model, ids):
    return model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None).cpu()


def _limit_memory(limit):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
