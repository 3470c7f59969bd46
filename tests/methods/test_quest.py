"""Quest's fused op against its parts, and its metadata."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import Quest, sparse_attention, sparse_attention_stats
from hf_sparse_attn.methods import SparseMethod
from tests.layers import hand_over, make_layer, noted_selections
from tests.models import POSITIONS, make_model, random_ids

HEAD_DIM, KV_HEADS = 16, 2


def filled(method, length, padding, max_cache_len, seed=0):
    """A layer with random tokens, the second row padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(method, max_cache_len, padding=[0, padding])
    layer.update(*torch.randn(2, 2, KV_HEADS, length, HEAD_DIM, generator=generator))
    return (
        layer,
        torch.randn(2, 8, HEAD_DIM, generator=generator),
        torch.randn(2, 2, KV_HEADS, HEAD_DIM, generator=generator),
    )


@pytest.mark.parametrize("bounds_dtype", ["int8", "model"])
@pytest.mark.parametrize("max_cache_len", [None, 256], ids=["growing", "static"])
@pytest.mark.parametrize("length", [63, 64, 200])
def test_the_fused_op_equals_its_parts(bounds_dtype, max_cache_len, length, monkeypatch):
    method = Quest(token_budget=64, bounds_dtype=bounds_dtype)
    selections, results = noted_selections(monkeypatch), []
    for decode in (Quest.decode, SparseMethod.decode):
        layer, query, (key, value) = filled(method, length, 21, max_cache_len)
        hand_over(layer, key, value)
        results.append((layer, decode(method, query, layer, key, value, HEAD_DIM**-0.5)))
    (one, output), (parts, right) = results
    chosen, expected = selections
    assert torch.equal(output, right)
    assert torch.equal(chosen.block_indices, expected.block_indices)
    assert torch.equal(chosen.block_counts, expected.block_counts)
    assert torch.equal(one.counter.totals, parts.counter.totals)
    assert one.counter.totals[2] > 0
    assert torch.equal(one.keys[:, :, length], parts.keys[:, :, length])
    for row, tokens in enumerate((length + 1, length + 1 - 21)):
        pages = -(-tokens // method.page_size)
        for name, bound in one.metadata.items():
            held = slice(None) if name == "channel_exponent" else slice(pages)
            assert torch.equal(bound[row, :, held], parts.metadata[name][row, :, held])


def test_bounds_have_the_requested_dtype():
    in_8_bits = filled(Quest(), 50, 0, 160)[0].metadata
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in in_8_bits.items()} == {
        "page_min": ((2, KV_HEADS, 10, HEAD_DIM), torch.int8),
        "page_max": ((2, KV_HEADS, 10, HEAD_DIM), torch.int8),
        "page_exponent": ((2, KV_HEADS, 10), torch.int8),
        "channel_exponent": ((2, KV_HEADS, HEAD_DIM), torch.int8),
    }
    exact = filled(Quest(bounds_dtype="model"), 50, 0, 160)[0].metadata
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    assert set(exact) == {"page_min", "page_max"}
    pages = filled(Quest(bounds_dtype="model"), 50, 0, 160)[0].keys[:, :, :48].unflatten(2, (3, 16))
    assert torch.equal(exact["page_min"][:, :, :3], pages.amin(3))


def test_8_bit_bounds_hold_every_key():
    layer, _, _ = filled(Quest(), 150, 37, None)
    exponent = (
        layer.metadata["page_exponent"][..., None].float() + layer.metadata["channel_exponent"][:, :, None].float()
    )
    lower, upper = (layer.metadata[name].float() * 2.0**exponent for name in ("page_min", "page_max"))
    for row, start in enumerate((0, 37)):
        for token in range(start, 150):
            page = (token - start) // 16
            assert (lower[row, :, page] <= layer.keys[row, :, token]).all()
            assert (layer.keys[row, :, token] <= upper[row, :, page]).all()


def test_cropping_recomputes_the_last_page():
    method = Quest(token_budget=64, bounds_dtype="model")
    layer, _, _ = filled(method, 90, 21, None)
    layer.crop(-17)
    fresh = make_layer(method, padding=[0, 21])
    fresh.update(layer.keys[:, :, :73].clone(), layer.values[:, :, :73].clone())
    for row, tokens in enumerate((73, 52)):
        pages = -(-tokens // 16)
        for name in ("page_min", "page_max"):
            assert torch.equal(layer.metadata[name][row, :, :pages], fresh.metadata[name][row, :, :pages])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ],
    ids=lambda rope: rope["rope_type"],
)
@torch.inference_mode()
def test_quest_takes_every_rope(rope):
    """Keys are cached after RoPE, as the model rotated them."""
    settings = {"rope_theta": 10_000.0, "original_max_position_embeddings": POSITIONS, **rope}
    model, ids = make_model("llama", dtype=torch.float64, rope_parameters=settings), random_ids(1, 120)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    expected = model.generate(ids, **options)
    with use_impl("reference"), sparse_attention(model, "quest", token_budget=POSITIONS):
        assert torch.equal(model.generate(ids, **options), expected)
        assert sparse_attention_stats(model).decode_steps == 7
