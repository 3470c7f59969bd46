"""ArkVale against its definition in plain torch, and its metadata while tokens come and go."""

import pytest
import torch

from hf_sparse_attn import ArkVale
from hf_sparse_attn.methods import SparseMethod, make_method
from tests.layers import hand_over, make_layer, noted_selections

HEAD_DIM, KV_HEADS, GROUP = 16, 2, 3


def filled(method, length, padding, max_cache_len=None, dtype=torch.float32):
    """A layer with random tokens, the second row padded on the left, and a step's query, key and value."""
    generator = torch.Generator().manual_seed(0)
    layer = make_layer(method, max_cache_len, padding=[0, padding])
    shape = (2, 2, KV_HEADS, length, HEAD_DIM)
    layer.update(*torch.randn(shape, generator=generator).to(dtype))
    query = torch.randn(2, KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(dtype)
    return layer, query, torch.randn(2, 2, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)


def box(keys):
    """The paper's cuboid mean of one page and KV head, [tokens, head_dim]."""
    centre = (keys.amax(0) + keys.amin(0)) / 2
    deviation = (centre - keys).abs().mean(0)
    return centre - deviation, centre + deviation


def best_pages(keys, queries, method):
    """The pages that one row and KV head reads: the first, the last, and the best by the definition."""
    pages = keys.split(method.page_size)
    scores = torch.zeros(len(pages), dtype=keys.dtype)
    for query in queries:
        products = torch.stack([torch.maximum(*(query * side for side in box(page))).sum() for page in pages])
        scores += (products * HEAD_DIM**-0.5).softmax(0)
    always = {0, len(pages) - 1}
    others = sorted(set(range(len(pages))) - always, key=lambda page: -scores[page])
    return sorted(always | set(others[: method.num_pages - len(always)]))


@pytest.mark.parametrize("max_cache_len", [None, 256], ids=["growing", "static"])
@pytest.mark.parametrize("length", [111, 127, 200])
def test_a_step_reads_the_pages_that_the_definition_chooses(length, max_cache_len, monkeypatch):
    """In float64, with a box in the model's dtype: nothing is rounded that could change a selection."""
    method = ArkVale(token_budget=64, page_size=16, bounds_dtype="model")
    selections = noted_selections(monkeypatch)
    layer, query, (key, value) = filled(method, length, 21, max_cache_len, torch.float64)
    hand_over(layer, key, value)
    method.decode(query, layer, key, value, HEAD_DIM**-0.5)
    (selection,) = selections
    assert selection.block_size == 16
    assert (selection.block_counts == 4).all()
    for row, start in enumerate((0, 21)):
        for head in range(KV_HEADS):
            keys = layer.keys[row, head, start : length + 1]
            expected = best_pages(keys, query[row].unflatten(0, (KV_HEADS, GROUP))[head], method)
            assert selection.block_indices[row, head].tolist() == expected


@pytest.mark.parametrize("bounds_dtype", ["int8", "model"])
@pytest.mark.parametrize("length", [63, 64, 200])
def test_the_fused_op_equals_its_parts(bounds_dtype, length, monkeypatch):
    method = ArkVale(token_budget=96, bounds_dtype=bounds_dtype)
    selections, results = noted_selections(monkeypatch), []
    for decode in (ArkVale.decode, SparseMethod.decode):
        layer, query, (key, value) = filled(method, length, 21)
        hand_over(layer, key, value)
        results.append((layer, decode(method, query, layer, key, value, HEAD_DIM**-0.5)))
    (fused, output), (parts, right) = results
    chosen, expected = selections
    assert torch.equal(output, right)
    assert torch.equal(chosen.block_indices, expected.block_indices)
    assert torch.equal(chosen.block_counts, expected.block_counts)
    assert torch.equal(fused.counter.totals, parts.counter.totals)
    for row, tokens in enumerate((length + 1, length + 1 - 21)):
        for name, held in fused.metadata.items():
            pages = slice(None) if name == "channel_exponent" else slice(-(-tokens // 32))
            assert torch.equal(held[row, :, pages], parts.metadata[name][row, :, pages]), name


def test_the_metadata_are_the_cuboid_mean():
    layer, _, _ = filled(ArkVale(bounds_dtype="model"), 90, 21)
    for row, start in enumerate((0, 21)):
        for head in range(KV_HEADS):
            for page, keys in enumerate(layer.keys[row, head, start:90].double().split(32)):
                for name, expected in zip(("page_min", "page_max"), box(keys), strict=True):
                    torch.testing.assert_close(layer.metadata[name][row, head, page].double(), expected)


@pytest.mark.parametrize("bounds_dtype", ["int8", "model"])
def test_the_box_lies_within_quests(bounds_dtype):
    """Keys spread evenly from -1 to 1 have a box from about -1/2 to 1/2; Quest's holds all of them."""
    keys = torch.linspace(-1, 1, 32).view(1, 1, 32, 1).expand(1, 1, 32, HEAD_DIM).contiguous()
    scores = {}
    for name in ("arkvale", "quest"):
        method = make_method(name, page_size=32, group_reduce="mean", bounds_dtype=bounds_dtype)
        layer = make_layer(method, padding=[0])
        layer.update(keys, keys)
        scores[name] = method.score_pages(torch.ones(1, 1, HEAD_DIM), layer, 1 / HEAD_DIM).item()
    deviation = keys[..., 0].abs().mean().item()
    level = 2.0**-6 if bounds_dtype == "int8" else 1e-6
    assert scores["arkvale"] == pytest.approx(deviation, abs=level)
    assert scores["quest"] == pytest.approx(1.0, abs=level)
    assert deviation == pytest.approx(0.5, abs=0.02)


def test_cropping_recomputes_the_last_page():
    method = ArkVale(token_budget=64, page_size=16, bounds_dtype="model")
    layer, _, _ = filled(method, 90, 21)
    layer.crop(-17)
    fresh = make_layer(method, padding=[0, 21])
    fresh.update(layer.keys[:, :, :73].clone(), layer.values[:, :, :73].clone())
    for row, tokens in enumerate((73, 52)):
        pages = -(-tokens // 16)
        for name in ("page_min", "page_max"):
            assert torch.equal(layer.metadata[name][row, :, :pages], fresh.metadata[name][row, :, :pages])


def test_defaults_and_errors():
    assert ArkVale() == make_method("arkvale", token_budget=1024, page_size=32, dense_layers=2, sink_tokens=16)
    assert ArkVale().num_pages == 32
    with pytest.raises(ValueError, match="arkvale: page_size must be a power of two, such as 16, got 24"):
        ArkVale(page_size=24)
    with pytest.raises(ValueError, match=r"arkvale: token_budget must be at least one page \(32 tokens\), got 16"):
        ArkVale(token_budget=16)
