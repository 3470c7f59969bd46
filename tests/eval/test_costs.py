"""A run's records of the reads of a method whose KV heads keep different numbers of tokens."""

import pytest
import torch

from eval.costs import sparse_reads
from hf_sparse_attn import SparseCache, sparse_attention
from tests.models import random_ids, shared_model

HEADS = ((1, 0), (0, 0), (1, 1), (0, 1))


@torch.inference_mode()
def test_the_realised_budget_is_the_mean_over_heads_of_different_lengths():
    model = shared_model("llama")
    with sparse_attention(model, "duo_attention", token_budget=20, sink_tokens=4, heads=HEADS):
        cache = SparseCache.for_model(model)
        model(random_ids(2, 100), past_key_values=cache)
        for token in random_ids(5, 2, seed=1).unsqueeze(2):
            model(token, past_key_values=cache)
        reads = sparse_reads(model, cache)
    whole = sum(range(101, 106)) / 5
    assert reads.realised_budget == pytest.approx((4 * 20 + 4 * whole) / 8)
    assert reads.kv_bytes / reads.dense_bytes == pytest.approx((20 + whole) / 2 / whole)
