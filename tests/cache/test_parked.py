"""Parked caches: they free the device's memory, come back by themselves, and continue as if never parked."""

import copy
import weakref
from dataclasses import replace

import pytest
import torch

from hf_sparse_attn import (
    PSA,
    ArkVale,
    KeyCodes,
    Quest,
    SparseCache,
    Squeezed,
    prepare_context,
    sparse_attention,
    sparse_attention_stats,
)
from hf_sparse_attn.cache import parked
from hf_sparse_attn.cache.host.storage import HostStorage
from tests.layers import make_layer
from tests.models import DEVICE, make_model, random_ids, shared_model
from tests.test_contracts import METHOD_CLASSES, padded_batch, sparse

ROOM = 160
QUEST = Quest(token_budget=48, page_size=8)
pytestmark = pytest.mark.usefixtures("exact")


@pytest.fixture
def model():
    model = shared_model("llama", torch.float64)
    yield model
    assert model.config._attn_implementation == "sdpa"


def feed(model, cache, mask, number, seed=4, each=1):
    """Feed tokens, ``each`` at a time, and return the logits and the mask."""
    tokens, logits = random_ids(len(mask), number * each, seed=seed), []
    for begin in range(0, number * each, each):
        mask = torch.cat((mask, mask.new_ones(len(mask), each)), dim=1)
        part = tokens[:, begin : begin + each]
        logits.append(model(part, attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, dim=1), mask


def filled(model, cache):
    ids, mask = padded_batch()
    model(ids, attention_mask=mask, past_key_values=cache)
    return feed(model, cache, mask, 3)[1]


def turns(model, cache, mask, between):
    """Return the logits of two answers and a question; ``between`` is called with the cache before each of them."""
    between(cache)
    first, mask = feed(model, cache, mask, 2, seed=5)
    between(cache)
    question, mask = feed(model, cache, mask, 1, seed=6, each=7)
    between(cache)
    return torch.cat((first, question, feed(model, cache, mask, 2, seed=7)[0]), dim=1)


def device_tensors(cache):
    """Return the tensors that a cache has on its device, but for lengths and counts."""
    found = []

    def note(tensor, tokens=None, /):
        found.append(tensor)
        return tensor

    for layer in cache.layers:
        layer._exchange(note) if hasattr(layer, "_exchange") else found.extend((layer.keys, layer.values))
    return found


def park(cache, shares=False):
    """Park a cache, and check that nothing but a fork that ``shares`` buffers holds what it had on the device."""
    if cache.is_parked:
        return
    tensors = [weakref.ref(tensor) for tensor in device_tensors(cache)]
    cache.park()
    assert tensors
    assert shares or not any(reference() is not None for reference in tensors)
    assert cache.is_parked
    assert {tensor.device.type for tensor in device_tensors(cache)} == {"meta"}


def check_turns(model, method, room=None, **patch):
    """Compare the logits and the stats of a cache that is parked between turns with those of one that is not."""
    with sparse_attention(model, method, **patch):
        answers, stats = [], []
        for between in (lambda cache: None, park):
            cache = SparseCache.for_model(model, room)
            answers.append(turns(model, cache, filled(model, cache), between))
            stats.append(sparse_attention_stats(model))
            assert not cache.is_parked
            cache.park()
            assert sparse_attention_stats(model) == stats[-1]
        assert torch.equal(answers[0], answers[1])
        return stats


def in_either_room():
    """Return every method with both kinds of buffers; one of them, by turns, is left to the large grid."""
    for number, name in enumerate(METHOD_CLASSES):
        for kind, room in enumerate((None, ROOM)):
            marks = [pytest.mark.grid] if number % 2 != kind else []
            yield pytest.param(name, room, marks=marks, id=f"{name}-{'growing' if room is None else 'static'}")


@pytest.mark.parametrize(("method_name", "room"), in_either_room())
@torch.inference_mode()
def test_a_parked_cache_continues_as_one_that_was_not_parked(method_name, room, model):
    expected, found = check_turns(model, sparse(method_name), room)
    assert found == expected


@pytest.mark.parametrize("room", [None, ROOM], ids=["growing", "static"])
@pytest.mark.parametrize("method", [QUEST, KeyCodes(token_budget=48, page_size=16)], ids=lambda method: method.name)
@torch.inference_mode()
def test_keys_and_values_in_host_memory_stay_there(method, room, model):
    expected, found = check_turns(model, method, room, kv_storage="host")
    assert found.tokens_read == expected.tokens_read
    assert found.blocks_read == expected.blocks_read
    assert found.blocks_hit < expected.blocks_hit  # the slots are empty after parking


@pytest.mark.parametrize(
    "method",
    [
        Quest(token_budget=48, page_size=8, offload=True, gpu_cache_tokens=96),
        ArkVale(token_budget=48, page_size=8, offload=True, gpu_cache_tokens=96),
        PSA(token_budget=48, block_size=8, microbatch=2, offload=True, gpu_cache_tokens=96),
    ],
    ids=lambda method: method.name,
)
@torch.inference_mode()
def test_a_parked_cache_frees_its_pool(method, model):
    with sparse_attention(model, method):
        answers = []
        for parks in (False, True):
            cache = SparseCache.for_model(model)
            mask = filled(model, cache)
            memory = cache.sparse_layers[-1].storage._memory
            held = memory.memory[0].numel()

            def between(cache, parks=parks, memory=memory, held=held):
                if parks:
                    park(cache)
                    assert memory.memory[0].numel() == memory.staging[0].numel() == 0 < held

            answers.append(turns(model, cache, mask, between))
            assert memory.memory[0].numel() == held
        torch.testing.assert_close(answers[1], answers[0], rtol=1e-12, atol=1e-12)  # other blocks come from the pool


@pytest.mark.parametrize("parks_fork", [False, True], ids=["original", "fork"])
@pytest.mark.parametrize(
    "method",
    [
        QUEST,
        sparse("tokenselect"),
        sparse("h2o"),
        sparse("duo_attention"),
        Quest(token_budget=48, page_size=8, offload=True, gpu_cache_tokens=96),
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_fork_is_parked_without_the_other(method, parks_fork, model):
    with sparse_attention(model, method):
        expected = SparseCache.for_model(model, ROOM)
        mask = filled(model, expected)
        expected = turns(model, expected, mask, lambda cache: None)
        cache = SparseCache.for_model(model, ROOM)
        filled(model, cache)
        fork = cache.fork(method)
        idle, used = (fork, cache) if parks_fork else (cache, fork)
        park(idle, shares=True)
        assert not used.is_parked
        assert torch.equal(turns(model, used, mask, lambda cache: None), expected)
        assert idle.is_parked
        torch.testing.assert_close(turns(model, idle, mask, park), expected, rtol=1e-12, atol=1e-12)


@torch.inference_mode()
def test_both_of_a_cache_and_its_fork_can_be_parked(model):
    with sparse_attention(model, QUEST):
        cache = SparseCache.for_model(model)
        mask = filled(model, cache)
        fork = cache.fork(KeyCodes(token_budget=48, page_size=16))
        park(cache, shares=True)
        park(fork)
        fork.unpark()
        assert cache.is_parked
        expected = SparseCache.for_model(model)
        assert filled(model, expected).shape == mask.shape
        expected = turns(model, expected, mask, lambda cache: None)
        assert torch.equal(turns(model, cache, mask, park), expected)


def test_the_parked_part_of_a_buffer_ends_with_its_tokens():
    layer = make_layer(QUEST, max_cache_len=64)
    keys = torch.randn(2, 3, 10, 8, device=DEVICE)
    layer.update(keys, keys)
    before, address = layer.keys.clone(), layer.keys.data_ptr()
    layer.offload()
    (contents,) = [each.contents for each in layer._parked._tensors if each.placeholder is layer.keys]
    assert contents.shape == keys.shape
    assert contents.device.type == "cpu"
    assert layer.keys.shape == before.shape
    layer.offload()  # once more changes nothing
    assert layer.storage.keys.device.type == "meta"
    layer.prefetch()
    assert torch.equal(layer.keys, before)  # zeros to the end
    assert layer.keys.data_ptr() != 0 != address
    assert hasattr(layer.keys, "_dynamo_static_input_type")
    assert layer.keys._dynamo_weak_dynamic_indices == {2}


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.update(torch.zeros(2, 3, 1, 8, device=DEVICE), torch.zeros(2, 3, 1, 8, device=DEVICE)),
        lambda layer: layer.crop(-3),
        lambda layer: layer.reset(),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([1])),
    ],
    ids=["update", "crop", "reset", "reorder", "repeat", "select"],
)
@pytest.mark.parametrize("room", [None, 64])
def test_every_use_of_an_offloaded_layer_brings_it_back(room, use):
    layers = [make_layer(QUEST, room) for _ in range(2)]
    keys = torch.arange(2 * 3 * 10 * 8.0, device=DEVICE).view(2, 3, 10, 8)
    for layer in layers:
        layer.update(keys, -keys)
    layers[0].offload()
    for layer in layers:
        use(layer)
    ours, theirs = layers
    assert ours.held == theirs.held
    assert torch.equal(ours.keys[:, :, : ours.held], theirs.keys[:, :, : ours.held])
    assert torch.equal(ours.values[:, :, : ours.held], theirs.values[:, :, : ours.held])
    for name, shape in theirs.metadata_shapes(ours.held).items() if ours.held else ():  # that of no tokens is undefined
        part = tuple(slice(size) for size in shape)
        assert torch.equal(ours.metadata[name][part], theirs.metadata[name][part])


@pytest.mark.parametrize("use", ["save", "fork", "copy", "crop", "reorder", "reset", "length"])
@torch.inference_mode()
def test_every_use_of_a_parked_cache_brings_it_back(use, model, tmp_path):
    uses = {
        "save": lambda cache: (cache.save(tmp_path / "cache", model), SparseCache.load(tmp_path / "cache", model))[1],
        "fork": lambda cache: cache.fork(QUEST),
        "copy": copy.deepcopy,
        "crop": lambda cache: (cache.crop(-4), cache)[1],
        "reorder": lambda cache: (cache.reorder_cache(torch.tensor([2, 0, 1])), cache)[1],
        "reset": lambda cache: (cache.reset(), cache)[1],
        "length": lambda cache: (cache.length, cache)[1],
    }
    with sparse_attention(model, QUEST):
        answers = []
        for between in (lambda cache: None, park):
            cache = SparseCache.for_model(model)
            mask = filled(model, cache)
            between(cache)
            used = uses[use](cache)
            assert used.length == (0 if use == "reset" else mask.shape[1] - 4 * (use == "crop"))
            mask = mask[:, : used.length]
            answers.append(feed(model, used, mask, 1, seed=8, each=9)[0])
        assert torch.equal(answers[0], answers[1])


@torch.inference_mode()
def test_an_unpatched_model_brings_a_parked_cache_back(model):
    answers = []
    for between in (lambda cache: None, park):
        cache = SparseCache(model.config, QUEST)
        ids = random_ids(2, 50)
        model(ids, past_key_values=cache)
        between(cache)
        answers.append(model(ids[:, :5], past_key_values=cache).logits)
    assert torch.equal(answers[0], answers[1])


@torch.inference_mode()
def test_sliding_windows_are_parked_too():
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_model("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=20, dtype=torch.float64)
    check_turns(model, QUEST)


@torch.inference_mode()
def test_generate_continues_from_a_parked_cache(model):
    ids = random_ids(1, 80)
    with sparse_attention(model, QUEST):
        tokens = []
        for between in (lambda cache: None, park):
            cache = SparseCache.for_model(model)
            first = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
            between(cache)
            tokens.append(model.generate(first, past_key_values=cache, max_new_tokens=8, do_sample=False))
        assert torch.equal(tokens[0], tokens[1])


@torch.inference_mode()
def test_the_prefix_of_a_prepared_context_stays_with_it(model):
    method = Squeezed(target_sparsity=0.8, clusters=0.1, window=8)
    context = prepare_context(model, random_ids(1, 130), method, progress=False)
    with sparse_attention(model, method):
        cache = context.cache(2)
        question = random_ids(2, 9, seed=3)
        expected = turns(model, context.cache(2), torch.ones_like(question)[:, :0], lambda cache: None)
        model(question, past_key_values=cache)
        prefix = cache.sparse_layers[0].prefix.keys.data_ptr()
        cache.park()
        assert cache.sparse_layers[0].prefix.keys.data_ptr() == prefix
        cache.reset()
        assert torch.equal(turns(model, cache, torch.ones_like(question)[:, :0], park_filled), expected)


def park_filled(cache):
    if cache.length:
        park(cache)


@torch.inference_mode()
def test_a_cache_that_cannot_be_parked_stays_as_it_was(model, monkeypatch):
    with sparse_attention(model, QUEST):
        cache = SparseCache.for_model(model)
        mask = filled(model, cache)
        expected = turns(model, copy.deepcopy(cache), mask, lambda cache: None)
        calls = []

        def fails_late(like):
            calls.append(like)
            if len(calls) > 7:
                raise RuntimeError("no host memory")
            return torch.empty(like.shape, dtype=like.dtype)

        monkeypatch.setattr(parked, "_host_empty", fails_late)
        with pytest.raises(RuntimeError, match="no host memory"):
            cache.park()
        assert not cache.is_parked
        assert torch.equal(turns(model, cache, mask, lambda cache: None), expected)


@torch.inference_mode()
def test_a_cache_that_does_not_fit_on_the_device_stays_parked(model, monkeypatch):
    with sparse_attention(model, QUEST):
        cache = SparseCache.for_model(model)
        mask = filled(model, cache)
        expected = turns(model, copy.deepcopy(cache), mask, lambda cache: None)
        park(cache)
        restored, calls = parked.ParkedTensor.restored, []

        def fails_late(self):
            calls.append(self)
            if len(calls) == 6:
                raise torch.OutOfMemoryError("no device memory")
            return restored(self)

        monkeypatch.setattr(parked.ParkedTensor, "restored", fails_late)
        with pytest.raises(torch.OutOfMemoryError, match="no device memory"):
            feed(model, cache, mask, 1)
        assert cache.is_parked
        assert torch.equal(turns(model, cache, mask, lambda cache: None), expected)


@torch.inference_mode()
def test_a_compiled_step_refuses_a_parked_cache(model):
    cache = SparseCache(model.config, QUEST, max_cache_len=ROOM)
    cache.check_present()
    model(random_ids(1, 50), past_key_values=cache)
    cache.park()
    with pytest.raises(ValueError, match=r"the cache is parked, .* call cache\.unpark\(\) first"):
        cache.check_present()
    cache.unpark()
    cache.check_present()


@torch.inference_mode()
def test_an_empty_cache_can_be_parked(model):
    cache = SparseCache(model.config, QUEST)
    cache.park()
    cache.park()
    with sparse_attention(model, QUEST):
        assert model(random_ids(1, 20), past_key_values=cache).logits.isfinite().all()
    assert not cache.is_parked


@pytest.mark.gpu
@pytest.mark.parametrize("patch", [{}, {"kv_storage": "host"}], ids=["device", "host"])
@pytest.mark.parametrize("room", [None, 8192])
def test_parking_frees_the_memory_of_the_device(patch, room, model):
    with torch.inference_mode(), sparse_attention(model, replace(QUEST, dense_layers=1), **patch):
        before = torch.cuda.memory_allocated()
        cache = SparseCache.for_model(model, room)
        model(random_ids(2, 400), past_key_values=cache)
        held = torch.cuda.memory_allocated() - before
        cache.park()
        freed = held - (torch.cuda.memory_allocated() - before)
        assert freed > 0.9 * sum(tensor.numel() * tensor.element_size() for tensor in device_tensors(cache)) > 0
        assert all(each.contents.is_pinned() for layer in cache.sparse_layers for each in layer._parked._tensors)
        model(random_ids(2, 1), past_key_values=cache)
        assert isinstance(cache.sparse_layers[-1].storage, HostStorage) == bool(patch)


@torch.inference_mode()
def test_the_windows_of_a_cache_stay_parked_when_its_fork_comes_back():
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_model("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=20, dtype=torch.float64)
    with sparse_attention(model, replace(QUEST, dense_layers=0)):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 60), past_key_values=cache)
        fork = cache.fork(cache.method)
        for each in (cache, fork):
            each.park()
        fork.unpark()
        assert cache.is_parked
        assert cache.layers[1].keys.is_meta
