"""Layers: static buffers keep their addresses, all layers share one record of the lengths, appends are lazy."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparse_attn import Quest, SparseCache, patch_model, sparse_attention, sparse_attention_stats
from hf_sparse_attn.attention import sparse_attention_forward
from hf_sparse_attn.cache.storage import DOUBLED_UP_TO, MIN_CAPACITY, grown_capacity
from hf_sparse_attn.methods import FULL
from tests.layers import make_layer
from tests.models import DEVICE, make_model, random_ids, shared_model

SMALL = Quest(token_budget=48)


def lasting_tensors(cache):
    """All tensors whose addresses a CUDA graph of the step would hold."""
    for layer in cache.layers:
        yield from (layer.keys, layer.values, layer.seq_start, layer.seq_end, layer.counter.totals)
        yield from layer.metadata.values()


def padded_prompt():
    ids = random_ids(3, 90)
    mask = torch.ones_like(ids)
    mask[1, :31] = 0
    return ids, mask


@use_impl("reference")
@torch.inference_mode()
def test_static_tensors_keep_their_addresses_and_contents():
    model = shared_model("llama", torch.float64)
    ids, mask = padded_prompt()
    order = torch.tensor([2, 1, 1], device=DEVICE)
    with sparse_attention(model, SMALL):
        caches = [SparseCache.for_model(model, max_cache_len=128), SparseCache.for_model(model)]
        for cache in caches:
            model(ids, attention_mask=mask, past_key_values=cache)
        addresses = [tensor.data_ptr() for tensor in lasting_tensors(caches[0])]
        for cache in caches:
            cache.crop(-7)
            cache.reorder_cache(order)
        step_mask = torch.cat([mask[order, :83], mask.new_ones(3, 1)], dim=1)
        for step in random_ids(5, 1).unsqueeze(0).expand(3, -1, -1).unbind(1):
            logits = [model(step, attention_mask=step_mask, past_key_values=cache).logits for cache in caches]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
            step_mask = torch.cat([step_mask, mask.new_ones(3, 1)], dim=1)
        for cache in caches:
            cache.reset()
            model(ids[:, :20], past_key_values=cache)
            assert cache.layers[0].seq_start.tolist() == [0, 0, 0]
        assert [tensor.data_ptr() for tensor in lasting_tensors(caches[0])] == addresses
        assert sparse_attention_stats(model).decode_steps == 5


@torch.inference_mode()
def test_layers_share_one_record_of_lengths_and_forks_have_their_own():
    model = shared_model("llama")
    with sparse_attention(model, SMALL):
        cache = SparseCache.for_model(model, max_cache_len=100)
        model(random_ids(2, 60), past_key_values=cache)
        assert len({id(layer.lengths) for layer in cache.layers}) == 1
        fork = cache.fork(SMALL)
        assert len({id(layer.lengths) for layer in fork.layers}) == 1
        model(random_ids(2, 1), past_key_values=fork)
        assert [layer.length for layer in cache.layers] == [60] * 4
        assert [layer.length for layer in fork.layers] == [61] * 4
        assert fork.layers[3].seq_end.tolist() == [61, 61]
        empty = SparseCache.for_model(model).fork(SMALL)
        model(random_ids(2, 10), past_key_values=empty)
        assert empty.get_seq_length() == 10


@torch.inference_mode()
def test_decoding_raises_at_the_step_that_finds_the_cache_full():
    model = shared_model("llama")
    with sparse_attention(model, SMALL):
        cache = SparseCache.for_model(model, max_cache_len=62)
        model(random_ids(1, 60), past_key_values=cache)
        for step in random_ids(2, 1):
            model(step[None], past_key_values=cache)
        with pytest.raises(ValueError, match=r"1 new tokens do not fit: the cache holds 62 of max_cache_len=62"):
            model(random_ids(1, 1), past_key_values=cache)
        assert cache.get_seq_length() == 62


def test_layer_refuses_tokens_that_do_not_fit():
    layer = make_layer(SMALL, max_cache_len=10)
    tokens = torch.randn(2, 1, 8, 16)
    layer.update(tokens, tokens)
    with pytest.raises(ValueError, match=r"3 new tokens do not fit: the cache holds 8 of max_cache_len=10"):
        layer.update(tokens[:, :, :3], tokens[:, :, :3])
    with pytest.raises(ValueError, match=r"new tokens must have the cache's batch size 2, got 1"):
        layer.update(tokens[:1, :, :1], tokens[:1, :, :1])
    assert layer.length == 8
    layer.reset()
    layer.update(tokens[:1], tokens[:1])  # an empty cache takes any batch
    assert layer.keys.shape == (1, 1, 10, 16)


@pytest.mark.parametrize("drop", [lambda cache: cache.crop(0), lambda cache: cache.fork(SMALL), SparseCache.recover])
def test_a_token_that_no_attention_function_processed_is_dropped(drop):
    tokens, step = torch.randn(2, 2, 20, 16), torch.randn(2, 2, 1, 16)
    cache = SparseCache(shared_model("llama").config, SMALL)
    for layer_idx in range(4):
        cache.update(tokens, tokens, layer_idx)
    cache.expect_step()
    assert cache.update(step, step, 0)[0] is step  # left to the method's decode
    with pytest.raises(ValueError, match="holds a decode step's token that no attention function has processed"):
        cache.update(step, step, 0)
    drop(cache)
    assert cache.get_seq_length() == 20
    assert [layer.take_token() for layer in cache.layers] == [None] * 4
    keys, _ = cache.update(step, step, 0)  # not announced, like an unpatched model's: written at once
    assert torch.equal(keys, torch.cat([tokens, step], dim=2))


class CountLaunches(TorchDispatchMode):
    """Counts the operators that would be launched on a device: all except views."""

    def __init__(self):
        super().__init__()
        self.launched = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.launched.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_sparse_layers_step_launches_nothing_but_its_ops(monkeypatch):
    """On CUDA an eager step is launch-bound: one launch for all rows, then two ops a layer."""
    model = patch_model(make_model("llama"), SMALL)
    cache = SparseCache(model.config, SMALL, initial_capacity=200)
    with torch.inference_mode():
        model(random_ids(1, 100), past_key_values=cache)
        monkeypatch.setattr(Quest, "decode", lambda self, query, *args: query)
        cache.expect_step()
        step, query = torch.randn(1, 2, 1, 16, device=DEVICE), torch.randn(1, 6, 1, 16, device=DEVICE)
        with CountLaunches() as counted:
            for layer_idx in (0, 2, 3):
                keys, values = cache.update(step, step, layer_idx)
                if layer_idx == 0:
                    assert counted.launched == ["aten.add_.Tensor"]
                    counted.launched.clear()
                    cache.layers[0].take_token()
                    continue
                attention = model.model.layers[layer_idx].self_attn
                sparse_attention_forward(attention, query, keys, values, None, sparse_cache=cache)
        assert counted.launched == []


def test_full_attends_densely_in_static_buffers_too():
    tokens = torch.randn(1, 1, 8, 16)
    for method in (FULL, SMALL):
        layer = make_layer(method, max_cache_len=64)
        layer.update(tokens, tokens)
        assert layer.step_method is method
    layer = make_layer(SMALL)
    layer.update(tokens, tokens)
    assert layer.step_method is FULL  # within the budget


def test_growing_buffers_are_copied_rarely_and_waste_little():
    capacity, copied, copies = MIN_CAPACITY, 0, 0
    while capacity < 1 << 20:
        before, capacity = capacity, grown_capacity(capacity)
        assert 0 < capacity - before <= max(DOUBLED_UP_TO, before / 8)
        copied, copies = copied + before, copies + 1
    assert copies < 50
    assert copied < 9 * capacity


@torch.inference_mode()
def test_a_full_layer_grows_by_that_amount():
    layer = make_layer(FULL)
    tokens = torch.randn(1, 1, 2 * DOUBLED_UP_TO, 4, device=DEVICE)
    layer.update(tokens, tokens)
    assert layer.capacity == 2 * DOUBLED_UP_TO
    keys, _ = layer.update(tokens[:, :, :1], tokens[:, :, :1])
    assert layer.capacity == 3 * DOUBLED_UP_TO
    assert torch.equal(keys, torch.cat([tokens, tokens[:, :, :1]], dim=2))
    layer.update(tokens, tokens)
    assert layer.capacity == layer.length == 4 * DOUBLED_UP_TO + 1


@pytest.mark.parametrize("max_cache_len", [None, 128], ids=["growing", "static"])
@pytest.mark.parametrize(
    "change",
    [
        lambda fork: fork.crop(-3),
        lambda fork: fork.reset(),
        lambda fork: fork.reorder_cache(torch.tensor([1, 0], device=DEVICE)),
        lambda fork: fork.batch_select_indices(torch.tensor([1, 1], device=DEVICE)),
    ],
    ids=["crop", "reset", "reorder", "select"],
)
@torch.inference_mode()
def test_a_fork_that_changes_shared_tokens_does_not_change_the_cache(change, max_cache_len):
    model, ids = shared_model("llama"), random_ids(2, 60)
    with sparse_attention(model, SMALL):
        cache = SparseCache.for_model(model, max_cache_len)
        model(ids, past_key_values=cache)
        before = [(layer.keys[:, :, :60].clone(), layer.values[:, :, :60].clone()) for layer in cache.layers]
        fork = cache.fork(SMALL)
        assert fork.layers[3].keys is cache.layers[3].keys
        change(fork)
        model(ids[:, :5], past_key_values=fork)
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys[:, :, :60], keys)
            assert torch.equal(layer.values[:, :, :60], values)


@pytest.mark.parametrize("max_cache_len", [None, 128], ids=["growing", "static"])
@torch.inference_mode()
def test_an_empty_cache_takes_tokens_of_another_type(max_cache_len):
    model, ids = make_model("llama"), random_ids(2, 60)
    patch_model(model, SMALL)
    cache = SparseCache.for_model(model, max_cache_len)
    model(ids, past_key_values=cache)
    cache.reset()
    model.to(torch.bfloat16)
    model(ids, past_key_values=cache)
    assert torch.equal(
        model(ids[:, :1], past_key_values=cache).logits,
        model(
            ids[:, :1],
            past_key_values=model(ids, past_key_values=SparseCache.for_model(model, max_cache_len)).past_key_values,
        ).logits,
    )
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}


@torch.inference_mode()
def test_a_prompt_of_one_token_is_no_decode_step_in_a_used_cache_either():
    model = shared_model("llama")
    with sparse_attention(model, SMALL):
        cache = SparseCache.for_model(model)
        for _ in range(2):
            model(random_ids(1, 1), past_key_values=cache)
            assert sparse_attention_stats(model).decode_steps == 0
            cache.reset()
