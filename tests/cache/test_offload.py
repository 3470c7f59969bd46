"""Offloaded caches: the tokens of resident ones, whatever the pool holds, and what moves is counted."""

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from transformers import DynamicCache

from hf_sparse_attn import (
    PSA,
    ArkVale,
    Quest,
    SparseCache,
    patch_model,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.offload import blocks, transfers
from hf_sparse_attn.cache.offload.blocks import SharedBlocks
from hf_sparse_attn.cache.offload.storage import OffloadStorage
from hf_sparse_attn.cache.storage import GrowingStorage
from hf_sparse_attn.cache.traffic import Traffic
from tests.cache.test_block_pool import Simulation
from tests.layers import hand_over, make_layer, step
from tests.models import DEVICE, ROUNDING, make_model, random_ids, shared_model
from tests.test_contracts import GREEDY, SCENARIOS, padded_batch

PAGE = 8
SMALL = {"token_budget": 48, "page_size": PAGE}
LAYERS, KV_HEADS, HEAD_DIM, DENSE = 4, 2, 16, 2


def resident(**overrides):
    return Quest(**{**SMALL, **overrides})


def offloaded(tokens=200, **overrides):
    return resident(offload=True, gpu_cache_tokens=tokens, **overrides)


class Late(transfers.Transfers):
    """Copies to the device that arrive when something waits for them, and no earlier."""

    def __init__(self, device):
        super().__init__(device)
        self.on_their_way = {}

    def load(self, copy, traffic, num_bytes):
        self.last_load += 1
        self.on_their_way[self.last_load] = functools.partial(super().load, copy, traffic, num_bytes)
        return self.last_load

    def wait(self, load, traffic):
        last = self.last_load
        for number in sorted(number for number in self.on_their_way if number <= load):
            self.last_load = self.arrived = number - 1
            self.on_their_way.pop(number)()
            super().wait(number, traffic)
        self.last_load = last

    def finish(self):
        self.wait(self.last_load, Traffic())
        super().finish()


@pytest.fixture(params=["prompt", "late"])
def loads(request, monkeypatch):
    """Loads as on this machine, and late ones. Memory that nothing was written to holds NaN."""

    def poisoned(size, dtype, device):
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(blocks, "device_empty", poisoned)
    if request.param == "late":
        monkeypatch.setattr(blocks, "Transfers", Late)
    return request.param


@pytest.mark.parametrize(
    ("method_class", "tokens", "eviction"),
    [(Quest, 64, "lru"), (Quest, 200, "fifo"), (Quest, 2000, "lru"), (ArkVale, 200, "lru")],
)
@torch.inference_mode()
def test_tokens_are_those_of_the_resident_method(method_class, tokens, eviction, exact, loads):
    model = shared_model("llama", torch.float64)
    ids, mask = padded_batch((111, 90, 63))
    runs, stats = [], []
    for method in (
        method_class(**SMALL),
        method_class(**SMALL, offload=True, gpu_cache_tokens=tokens, eviction=eviction),
    ):
        with sparse_attention(model, method):
            runs.append(model.generate(ids, attention_mask=mask, **{**GREEDY, "max_new_tokens": 20}))
            stats.append(sparse_attention_stats(model))
    assert torch.equal(*runs)
    for name in ("decode_steps", "tokens_read", "kv_bytes", "metadata_bytes", "dense_bytes"):
        assert getattr(stats[0], name) == getattr(stats[1], name)
    assert (stats[0].blocks_read, stats[0].bytes_loaded, stats[0].hit_rate) == (0, 0, 1.0)
    assert 0 < stats[1].blocks_hit < stats[1].blocks_read


@pytest.mark.parametrize(("tokens", "eviction"), [(40, "lru"), (200, "fifo"), (2000, "lru")])
@pytest.mark.parametrize("threshold", [0.6, 0.95, 1.0])
@torch.inference_mode()
def test_psa_reads_the_blocks_of_the_resident_method(threshold, tokens, eviction, exact, loads, monkeypatch):
    """The smallest pool holds two microbatches of one layer."""
    monkeypatch.setattr(PSA, "covers", lambda self, length: False)  # which threshold=1 does, if resident
    model = shared_model("llama", torch.float64)
    ids, mask = padded_batch((111, 90, 63))
    parameters = {"threshold": threshold, "block_size": 8, "microbatch": 3, "sink_tokens": 8}
    runs, stats = [], []
    for method in (PSA(**parameters), PSA(**parameters, offload=True, gpu_cache_tokens=tokens, eviction=eviction)):
        with sparse_attention(model, method):
            runs.append(model.generate(ids, attention_mask=mask, **GREEDY))
            stats.append(sparse_attention_stats(model))
    assert torch.equal(*runs)
    for name in ("decode_steps", "tokens_read", "metadata_bytes", "dense_bytes", "method_counts"):
        assert getattr(stats[0], name) == getattr(stats[1], name)
    if tokens != 200:
        assert stats[1].hit_rate < 0.1 if tokens == 40 else stats[1].hit_rate > 0.5


@pytest.mark.parametrize(
    "method",
    [
        PSA(threshold=0.9, block_size=8, microbatch=2, sink_tokens=8, offload=True, gpu_cache_tokens=400),
        Quest(**SMALL, offload=True, gpu_cache_tokens=400),
    ],
    ids=lambda method: method.name,
)
def test_steps_run_where_gradients_are_on(method):
    model = shared_model("llama")
    ids = random_ids(1, 111)
    outputs = []
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, sparse_attention(model, method):
            cache = model(ids).past_key_values
            outputs.append(model(ids[:, :1], past_key_values=cache).logits.detach())
    assert torch.equal(*outputs)


@torch.inference_mode()
def test_a_step_loads_at_once_what_the_step_before_read(exact, monkeypatch):
    """So its rounds are few. Without a step before, or where a head reads more, they are microbatches."""
    model = shared_model("llama", torch.float64)
    rounds = []
    block_rows = OffloadStorage.block_rows

    def counted(storage, blocks, lengths):
        rounds[-1].append(blocks)
        return block_rows(storage, blocks, lengths)

    monkeypatch.setattr(OffloadStorage, "block_rows", counted)
    method = PSA(threshold=0.9, block_size=8, microbatch=2, sink_tokens=8, offload=True, gpu_cache_tokens=2000)
    with sparse_attention(model, method):
        out = model(random_ids(1, 111))
        for ids in random_ids(1, 8).unbind(1):
            rounds.append([])
            out = model(ids[:, None], past_key_values=out.past_key_values)
    first, *others = rounds
    assert set(first) == {2}
    assert len(first) > 3 * LAYERS
    assert max(map(max, others)) > 2
    assert LAYERS <= np.mean([len(step) for step in others]) < 0.6 * len(first)


@pytest.mark.parametrize(
    ("token_budget", "needed"),
    [
        (None, r"64 \(1 rows x 2 KV heads x 32 blocks: two microbatches\).* must be at least 64"),
        (264, r"64 \(1 rows x 2 KV heads x 32 blocks: two microbatches\).* must be at least 64"),
        (256, r"62 \(1 rows x 2 KV heads x 31 blocks: token_budget without the newest\).* must be at least 64"),
    ],
)
def test_a_pool_smaller_than_two_microbatches_is_refused(token_budget, needed):
    method = PSA(token_budget, block_size=8, microbatch=16, offload=True, gpu_cache_tokens=24)
    with pytest.raises(ValueError, match=f"a step of one layer needs {needed}"):
        patch_model(make_model("llama"), method)


@torch.inference_mode()
def test_bf16_logits_differ_from_those_of_the_resident_method_by_rounding(exact, loads, monkeypatch):
    """Every step finds some pages and loads others. Where it waits for nothing it rounds as the resident one does."""
    monkeypatch.setattr(Quest, "covers", lambda self, length: False)
    model, ids, steps = shared_model("llama", torch.bfloat16), random_ids(2, 150), random_ids(2, 20, seed=4)
    expected = copy.deepcopy(model).double()(torch.cat([ids, steps], dim=1)).logits[:, 150:]
    logits, errors = [], []
    for method in (resident(token_budget=160), offloaded(296, token_budget=160)):
        with sparse_attention(model, method):
            cache = SparseCache.for_model(model)
            model(ids, past_key_values=cache)
            logits.append(continued(model, cache, steps))
            errors.append((logits[-1] - expected).abs().max())
            hit_rate = sparse_attention_stats(model).hit_rate
    assert 0.5 < hit_rate < 0.9
    assert errors[1] < 2 * errors[0]
    if loads == "prompt" and DEVICE == "cpu":
        assert torch.equal(*logits)


@pytest.mark.parametrize("scenario", SCENARIOS)
@torch.inference_mode()
def test_full_budget_is_dense_token_for_token(scenario, loads):
    """Beams, several turns, chunks and drafts crop and reorder the rows."""
    model = shared_model("llama")
    expected = scenario(model, DynamicCache)
    # At most 160 tokens: 19 pages beside the newest, of 6 rows, in 2 layers.
    with sparse_attention(model, offloaded(19 * PAGE * 3, token_budget=160)):
        assert torch.equal(scenario(model, lambda: SparseCache.for_model(model)), expected)


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
@torch.inference_mode()
def test_hits_and_bytes_are_as_predicted(eviction, exact):
    model = shared_model("llama", torch.float64)
    prompt, new = 150, 40
    method = offloaded(136, eviction=eviction)  # 17 blocks x 2 layers x 2 heads
    with sparse_attention(model, method), record_selections(model) as record:
        model.generate(random_ids(2, prompt), **{**GREEDY, "max_new_tokens": new + 1})
        stats = sparse_attention_stats(model)
    simulation = Simulation(17 * 2 * KV_HEADS, eviction)
    hits = reads = 0
    for number in range(new):
        newest = (prompt + number) // PAGE
        for layer in range(DENSE, LAYERS):
            chosen = record.selections(layer)[number].block_indices
            pairs = [(row, head) for row in range(2) for head in range(KV_HEADS)]
            names = [(layer, *pair, block) for pair in pairs for block in chosen[pair].tolist() if 0 <= block != newest]
            was_there = simulation.take(names)
            hits, reads = hits + sum(was_there), reads + len(names)
            if (prompt + number + 1) % PAGE == 0:  # the newest page is full, and moves to the pool
                simulation.take([(layer, *pair, newest) for pair in pairs])
    assert (stats.blocks_hit, stats.blocks_read) == (hits, reads)
    assert 0.2 < stats.hit_rate == hits / reads < 0.95
    token = 2 * 2 * KV_HEADS * HEAD_DIM * 8 * 2  # two rows, two layers, keys and values in float64
    block = 2 * PAGE * HEAD_DIM * 8
    assert stats.bytes_loaded == (reads - hits) * block + prompt % PAGE * token
    assert stats.step_bytes_loaded == (reads - hits) * block == stats.loaded_per_step * new
    full = (prompt + new) // PAGE - prompt // PAGE
    assert stats.bytes_stored == prompt * token + full * PAGE * token
    assert stats.stall_seconds > 0
    assert [layer.blocks_read > 0 for layer in stats.layers] == [False, False, True, True]


@torch.inference_mode()
def test_only_sparse_layers_are_offloaded_and_the_device_holds_less():
    model = shared_model("llama")
    with sparse_attention(model, offloaded(64)):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 500), past_key_values=cache)
        model(random_ids(1, 1), past_key_values=cache)
    kinds = [type(layer.storage) for layer in cache.layers]
    assert kinds == [GrowingStorage] * DENSE + [OffloadStorage] * (LAYERS - DENSE)
    memory = cache.layers[-1].storage._memory
    assert memory is cache.layers[-2].storage._memory
    pool_tokens = 64 * 2 * KV_HEADS + (2 * KV_HEADS + 1) * PAGE  # slots, newest blocks, and the first block's offset
    assert memory.memory[0].numel() == pool_tokens * HEAD_DIM
    assert memory.staging[0].numel() == cache.layers[-1].capacity * KV_HEADS * HEAD_DIM


@torch.inference_mode()
def test_a_maximum_length_is_kept_without_compiling():
    model = shared_model("llama")
    with sparse_attention(model, offloaded()):
        cache = SparseCache.for_model(model, max_cache_len=71)
        assert not cache.is_compileable
        model(random_ids(1, 70), past_key_values=cache)
        assert {layer.capacity for layer in cache.layers} == {71}
        model(random_ids(1, 1), past_key_values=cache)
        with pytest.raises(ValueError, match=r"1 new tokens do not fit: the cache holds 71 of max_cache_len=71"):
            model(random_ids(1, 1), past_key_values=cache)
        stats = sparse_attention_stats(model)
        model.generate(random_ids(1, 30), cache_implementation="static", **GREEDY)
    assert stats.decode_steps == 1


def continued(model, cache, steps):
    return torch.cat([model(token, past_key_values=cache).logits for token in steps.split(1, dim=1)], dim=1)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda cache: cache.fork(cache.method)], ids=["copy", "fork"])
@torch.inference_mode()
def test_copies_and_forks_share_the_device_but_no_tokens(make_copy, exact):
    """They take turns in the places of the newest blocks."""
    model = shared_model("llama", torch.float64)
    ids, steps = random_ids(2, 61), random_ids(2, 24, seed=4)
    with sparse_attention(model, offloaded()):
        alone = SparseCache.for_model(model, max_cache_len=200)
        model(ids, past_key_values=alone)
        expected = [continued(model, alone, part) for part in steps.split(8, dim=1)]
        cache = SparseCache.for_model(model, max_cache_len=200)
        model(ids, past_key_values=cache)
        torch.testing.assert_close(continued(model, cache, steps[:, :8]), expected[0])
        twin = make_copy(cache)
        torch.testing.assert_close(continued(model, twin, steps[:, 8:16]), expected[1])
        assert (twin.length, cache.length) == (77, 69)
        torch.testing.assert_close(continued(model, cache, steps[:, 8:16]), expected[1])
        torch.testing.assert_close(continued(model, twin, steps[:, 16:]), expected[2])
        del twin
        torch.testing.assert_close(continued(model, cache, steps[:, 16:]), expected[2])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (offloaded(), offloaded(token_budget=24)),
        (offloaded(token_budget=24), offloaded()),
        (offloaded(), offloaded(dense_layers=0)),
        (
            PSA(threshold=0.6, block_size=PAGE, microbatch=2, offload=True, gpu_cache_tokens=200),
            offloaded(dense_layers=0),
        ),
    ],
    ids=["lower budget", "higher budget", "fewer dense layers", "another method"],
)
@torch.inference_mode()
def test_a_fork_for_another_method_answers_as_a_cache_of_its_own(first, second, exact):
    model = shared_model("llama", torch.float64)
    ids, steps = random_ids(2, 61), random_ids(2, 8, seed=4)
    with sparse_attention(model, second):
        own = SparseCache.for_model(model)
        model(ids, past_key_values=own)
        expected = continued(model, own, steps)
    with sparse_attention(model, first):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        fork = cache.fork(second)
    with sparse_attention(model, second):
        torch.testing.assert_close(continued(model, fork, steps), expected, **ROUNDING)


@torch.inference_mode()
def test_a_pool_that_a_forks_steps_do_not_fit_into_is_named():
    model = shared_model("llama", torch.float64)
    with sparse_attention(model, offloaded(48, token_budget=24)):
        cache = SparseCache.for_model(model)
        model(random_ids(2, 61), past_key_values=cache)
        fork = cache.fork(offloaded(48, token_budget=96))
    with sparse_attention(model, fork.method), pytest.raises(ValueError, match="gpu_cache_tokens must be at least 88"):
        model(random_ids(2, 1), past_key_values=fork)


@torch.inference_mode()
def test_a_fork_cannot_have_more_dense_layers_than_the_device_holds():
    cache = SparseCache(shared_model("llama").config, offloaded(dense_layers=1))
    with pytest.raises(ValueError, match=r"dense_layers=2 needs keys and values on the device .* at most .*layers=1"):
        cache.fork(offloaded())


@pytest.mark.parametrize(
    "other", [resident(), offloaded(100), offloaded(eviction="fifo"), offloaded(page_size=4)], ids=str
)
@torch.inference_mode()
def test_forks_must_offload_alike(other):
    cache = SparseCache(shared_model("llama").config, offloaded())
    with pytest.raises(ValueError, match="offload, gpu_cache_tokens, eviction and the size of a block must agree"):
        cache.fork(other)


@torch.inference_mode()
def test_a_fork_for_another_method_builds_its_metadata_from_host_memory(exact):
    model, ids, steps = shared_model("llama", torch.float64), random_ids(2, 61), random_ids(2, 8, seed=4)
    other = offloaded(group_reduce="max", bounds_dtype="model")
    with sparse_attention(model, offloaded()):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        continued(model, cache, steps)
    with sparse_attention(model, other):
        expected = SparseCache.for_model(model)
        model(ids, past_key_values=expected)
        cache.crop(-8)
        fork = cache.fork(other)
        torch.testing.assert_close(continued(model, fork, steps), continued(model, expected, steps))


@torch.inference_mode()
def test_an_unpatched_model_reads_an_offloaded_cache(exact):
    model, ids, steps = make_model("llama", dtype=torch.float64), random_ids(2, 61), random_ids(2, 6, seed=4)
    patch_model(model, offloaded(160, token_budget=160))
    cache = SparseCache.for_model(model)
    model(ids, past_key_values=cache)
    continued(model, cache, steps[:, :3])
    unpatch_model(model)
    expected = model(torch.cat([ids, steps], dim=1)).logits[:, -3:]
    logits = [
        model(
            token, attention_mask=torch.ones(2, 65 + number, dtype=torch.long, device=DEVICE), past_key_values=cache
        ).logits
        for number, token in enumerate(steps[:, 3:].split(1, dim=1))
    ]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, **ROUNDING)


@torch.inference_mode()
def test_a_load_that_fails_leaves_no_empty_slot_behind(monkeypatch, exact, loads):
    model, ids, steps = shared_model("llama", torch.float64), random_ids(2, 150), random_ids(2, 8, seed=4)
    with sparse_attention(model, offloaded()):
        untouched, cache = SparseCache.for_model(model), SparseCache.for_model(model)
        for each in (untouched, cache):
            model(ids, past_key_values=each)
        expected = continued(model, untouched, steps)
        actual = [continued(model, cache, steps[:, :3])]
        for error in (RuntimeError("out of memory"), KeyboardInterrupt()):

            def fail(*args, error=error):
                raise error

            cache.layers[3].storage._memory.pool.forget_all()  # so that the next step must load
            with monkeypatch.context() as patch:
                patch.setattr(OffloadStorage, "_fill", fail)
                with pytest.raises(type(error)):
                    model(steps[:, 3:4], past_key_values=cache)
            assert cache.get_seq_length() == 153
        actual.append(continued(model, cache, steps[:, 3:]))
    torch.testing.assert_close(torch.cat(actual, dim=1), expected)


def test_a_pool_that_is_too_small_is_refused_before_generation_starts():
    model = make_model("llama")
    message = (
        r"gpu_cache_tokens=16 gives the 2 offloaded layers a pool of 8 blocks of 8 tokens, but a step of one layer "
        r"needs 10 \(1 rows x 2 KV heads x 5 blocks: the selection without the newest\); gpu_cache_tokens must be at "
        r"least 24"
    )
    with pytest.raises(ValueError, match=message):
        patch_model(model, offloaded(16))
    patch_model(model, offloaded(24))
    model.generate(random_ids(1, 100), **GREEDY)
    before = sparse_attention_stats(model)
    with pytest.raises(ValueError, match=r"needs 30 \(3 rows x 2 KV heads x 5 blocks: .*\).* must be at least 64"):
        model.generate(random_ids(3, 100), **GREEDY)
    assert sparse_attention_stats(model) == before
    with sparse_attention(model, offloaded(64)):
        model.generate(random_ids(3, 100), **GREEDY)


class ByKernel(Late):
    """Late copies by a kernel that reads host memory, in Triton's interpreter if there is no CUDA device."""

    def __init__(self, device):
        super().__init__(device)
        self.reads_host = True


class ByHost(Late):
    """Late copies of what the host gathers."""

    def __init__(self, device):
        super().__init__(device)
        self.reads_host = False


@pytest.mark.parametrize("way", [ByKernel, ByHost])
def test_blocks_are_read_by_a_kernel_or_gathered_by_the_host(way, exact, monkeypatch):
    monkeypatch.setattr(blocks, "Transfers", way)
    parameters = {"token_budget": 12, "page_size": 4, "sink_tokens": 0, "dense_layers": 0}
    method = Quest(**parameters, offload=True, gpu_cache_tokens=16)
    shared = SharedBlocks(method.offloading, kv_heads=2)
    layers = [SparseLayer(method, OffloadStorage(shared), q_heads=4), make_layer(Quest(**parameters), q_heads=4)]
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randn(2, 1, 2, 30, 10, generator=generator, dtype=torch.float64).to(DEVICE)
    tokens = torch.randn(6, 2, 1, 2, 10, generator=generator, dtype=torch.float64).to(DEVICE)
    queries = torch.randn(6, 1, 4, 10, generator=generator, dtype=torch.float64).to(DEVICE)
    outputs = []
    for layer in layers:
        layer.update(*prompt)
        outputs.append([step(layer, query, *token, 0.25) for query, token in zip(queries, tokens, strict=True)])
    torch.testing.assert_close(*outputs)
    traffic = layers[0].storage.traffic
    assert 0 < traffic.blocks_hit < traffic.blocks_read
    block, newest = 2 * 4 * 10 * 8, 2 * 2 * 2 * 10 * 8  # keys and values; of the prompt two tokens of two heads
    assert traffic.bytes_loaded == (traffic.blocks_read - traffic.blocks_hit) * block + newest


def test_a_full_block_moves_to_the_pool_after_a_load_that_nothing_has_waited_for(monkeypatch):
    monkeypatch.setattr(blocks, "Transfers", Late)
    method = Quest(token_budget=12, page_size=4, sink_tokens=0, dense_layers=0, offload=True, gpu_cache_tokens=8)
    layer = SparseLayer(method, OffloadStorage(SharedBlocks(method.offloading, kv_heads=2)), q_heads=2)
    tokens = torch.randn(2, 1, 2, 17, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    layer.update(*tokens[:, :, :, :15])
    storage, _ = layer.storage, layer.newest
    for block in (0, 1):
        storage.locate(np.full((2, 1), block), layer.lengths)  # one block of each head: two of four slots
    for token in tokens[:, :, :, 15:].unbind(3):
        hand_over(layer, *token)
        layer.append(*token.unsqueeze(3))
    memory = storage._memory
    storage.wait(memory.transfers.last_load)
    located = storage.locate(np.full((2, 1), 3), layer.lengths)
    assert located.was_there.all()
    for buffer, expected in zip(memory.memory, tokens[:, 0, :, 12:16], strict=True):
        assert torch.equal(buffer[memory.first_slot + located.slots[:, 0]], expected)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"gpu_cache_tokens": 100}, ValueError, "gpu_cache_tokens must be None without offload=True, got 100"),
        (
            {"offload": True},
            ValueError,
            r"gpu_cache_tokens must be at least 8 \(one page\) with offload=True, got None",
        ),
        ({"offload": True, "gpu_cache_tokens": 7}, ValueError, "gpu_cache_tokens must be at least 8"),
        ({"offload": True, "gpu_cache_tokens": 1e6}, TypeError, "gpu_cache_tokens must be a whole number"),
        ({"offload": 1, "gpu_cache_tokens": 100}, TypeError, "offload must be True or False, got 1"),
        ({"offload": True, "gpu_cache_tokens": 99, "eviction": "mru"}, ValueError, "eviction must be one of lru, fifo"),
    ],
)
def test_bad_parameters(parameters, error, message):
    with pytest.raises(error, match=message):
        resident(**parameters)


@torch.inference_mode()
def test_memory_that_cannot_be_pinned_is_pageable_with_a_warning(monkeypatch):
    def fail(shape, dtype):
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(transfers, "pinned_empty", fail)
    pinning = transfers.Transfers(torch.device("cpu"))
    pinning.pins = pinning.reads_host = True
    message = r"0\.5 GiB of host memory cannot be pinned \(CUDA error: out of memory\); .*copies are slower"
    with pytest.warns(RuntimeWarning, match=message):
        tensor = pinning.host_empty((1 << 27,), torch.float32)
    assert tensor.shape == (1 << 27,)
    assert not pinning.pins
    assert not pinning.reads_host
    pinning.host_empty((4,), torch.float32)  # one warning is enough: others would be errors here


@torch.inference_mode()
def test_a_device_without_room_for_the_pool_is_a_clear_error(monkeypatch):
    def fail(size, dtype, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, ids = make_model("llama"), random_ids(1, 100)
    expected = model.generate(ids, **GREEDY)
    patch_model(model, offloaded(200))
    message = r"the pool of gpu_cache_tokens=200 takes 0\.00 GiB for keys and values, more than (cpu|cuda:0) has"
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "device_empty", fail)
        with pytest.raises(RuntimeError, match=message):
            model.generate(ids, **GREEDY)
    model.generate(ids, **GREEDY)
    unpatch_model(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize("bounds_dtype", ["int8", "model"])
@pytest.mark.parametrize("method_class", [Quest, ArkVale])
def test_kernels_read_the_pool_and_write_the_newest_blocks(method_class, bounds_dtype):
    """Rows that begin before their buffer, and buffers that overlap, are nothing special to a kernel."""
    generator = torch.Generator().manual_seed(0)
    parameters = {"token_budget": 16, "page_size": 4, "sink_tokens": 4, "dense_layers": 0, "bounds_dtype": bounds_dtype}
    method = method_class(**parameters, offload=True, gpu_cache_tokens=32)
    of_pool = SparseLayer(method, OffloadStorage(SharedBlocks(method.offloading, kv_heads=2)), q_heads=6)
    alone = make_layer(method_class(**parameters), q_heads=6)
    prompt = torch.randn(2, 2, 2, 42, 16, generator=generator).to(DEVICE)
    tokens = torch.randn(9, 2, 2, 2, 16, generator=generator).to(DEVICE)
    queries = torch.randn(9, 2, 6, 16, generator=generator).to(DEVICE)
    for layer, impl in ((alone, "reference"), (of_pool, "triton")):
        with use_impl(impl):
            layer.update(*prompt)
            layer.outputs = [step(layer, query, *token, 0.25) for query, token in zip(queries, tokens, strict=True)]
    torch.testing.assert_close(of_pool.outputs, alone.outputs, rtol=1e-4, atol=1e-5)
    assert of_pool.storage.traffic.blocks_hit < of_pool.storage.traffic.blocks_read == 9 * 2 * 2 * 3
    for name, expected in alone.metadata.items():
        assert torch.equal(of_pool.metadata[name][:, :, :12], expected[:, :, :12])


@pytest.mark.parametrize("threshold", [0.7, 1.0])
def test_the_kernel_attends_to_single_blocks_of_the_pool(threshold):
    """Rows that share one address, each of them in as many blocks as a microbatch has."""
    generator = torch.Generator().manual_seed(0)
    parameters = {"threshold": threshold, "block_size": 4, "microbatch": 3, "sink_tokens": 4}
    method = PSA(**parameters, offload=True, gpu_cache_tokens=48)
    of_pool = SparseLayer(method, OffloadStorage(SharedBlocks(method.offloading, kv_heads=2)), q_heads=6)
    alone = make_layer(PSA(**parameters), q_heads=6)
    prompt = torch.randn(2, 2, 2, 42, 10, generator=generator).to(DEVICE)
    tokens = torch.randn(3, 2, 2, 2, 10, generator=generator).to(DEVICE)
    queries = torch.randn(3, 2, 6, 10, generator=generator).to(DEVICE)
    for layer, impl in ((alone, "reference"), (of_pool, "triton")):
        with use_impl(impl):
            layer.update(*prompt)
            layer.outputs = [step(layer, query, *token, 0.25) for query, token in zip(queries, tokens, strict=True)]
    torch.testing.assert_close(of_pool.outputs, alone.outputs, rtol=1e-4, atol=1e-5)
    assert of_pool.counter.own.tolist() == alone.counter.own.tolist()
    assert 0 < of_pool.storage.traffic.blocks_hit < of_pool.storage.traffic.blocks_read


def test_an_offloaded_cache_says_why_it_cannot_be_pickled():
    model = shared_model("llama")
    with torch.no_grad(), sparse_attention(model, resident(offload=True, gpu_cache_tokens=400)):
        cache = model(random_ids(1, 111)).past_key_values
    with pytest.raises(TypeError, match=r"offload=True cannot be pickled; cache.save\(path\) writes it"):
        pickle.dumps(cache)
