"""Keys and values in host memory: the tokens and logits of the device's storage, and what crosses the link."""

import copy
import ctypes
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from hf_sparse_attn import (
    ArkVale,
    Full,
    KeyCodes,
    Quest,
    SparseCache,
    TokenSelect,
    patch_model,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.cache.host import kept, memory, prompts, room, storage
from hf_sparse_attn.cache.host.storage import GrowingHostStorage, StaticHostStorage
from hf_sparse_attn.cache.offload.transfers import Transfers
from hf_sparse_attn.cache.storage import GrowingStorage
from tests.methods.toy import UnboundedQuest
from tests.models import DEVICE, make_model, random_ids, shared_model
from tests.test_contracts import GREEDY, SCENARIOS, padded_batch

LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 16
SMALL = (
    Quest(token_budget=48, page_size=8),
    ArkVale(token_budget=48, page_size=8, bounds_dtype="model", dense_layers=0),
    KeyCodes(token_budget=48, page_size=16),
    KeyCodes(token_budget=40, page_size=32, bits=2, query_centre=False, dense_layers=1),
    UnboundedQuest(token_budget=48, page_size=8),
)
small_methods = pytest.mark.parametrize("method", SMALL, ids=str)


class LateStores(Transfers):
    """Copies to the host that arrive when something waits for them, and no earlier."""

    def __init__(self, device):
        super().__init__(device)
        self.on_their_way = []

    def store(self, copy_out, traffic, num_bytes):
        self.on_their_way.append(lambda: super(LateStores, self).store(copy_out, traffic, num_bytes))

    def load(self, copy_in, traffic, num_bytes):
        self.protect_stored()  # a load follows the stores before it
        return super().load(copy_in, traffic, num_bytes)

    def protect_stored(self):
        for store in self.on_their_way:
            store()
        self.on_their_way.clear()
        super().protect_stored()


@pytest.fixture(params=["prompt", "late"])
def stores(request, monkeypatch):
    """Stores as on this machine, and late ones. Slots that nothing was written to hold NaN, and tables anything."""
    create = kept.KeptBlocks.__init__

    def poisoned(self, *arguments):
        create(self, *arguments)
        self._keys.fill_(torch.nan)
        self._values.fill_(torch.nan)
        self._block_slots.random_(-3, 9)

    monkeypatch.setattr(kept.KeptBlocks, "__init__", poisoned)
    if request.param == "late":
        monkeypatch.setattr(prompts, "Transfers", LateStores)


def logits_of(model, cache, parts, **options):
    return [model(part, past_key_values=cache, **options).logits for part in parts]


@pytest.mark.one_in(2)
@small_methods
@pytest.mark.parametrize("cache_implementation", [None, "static"])
@torch.inference_mode()
def test_generated_logits_are_those_of_the_device(method, cache_implementation, exact, stores):
    model = shared_model("llama", torch.float64)
    ids, mask = padded_batch((111, 90, 63))
    options = {**GREEDY, "max_new_tokens": 24, "output_logits": True, "return_dict_in_generate": True}
    runs, stats = [], []
    for kv_storage in ("device", "host"):
        with sparse_attention(model, method, kv_storage=kv_storage):
            runs.append(model.generate(ids, attention_mask=mask, cache_implementation=cache_implementation, **options))
            stats.append(sparse_attention_stats(model))
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    for on_device, on_host in zip(runs[0].logits, runs[1].logits, strict=True):
        assert torch.equal(on_device, on_host)
    for name in ("decode_steps", "tokens_read", "kv_bytes", "metadata_bytes", "dense_bytes"):
        assert getattr(stats[0], name) == getattr(stats[1], name)
    assert stats[0].bytes_loaded == stats[0].bytes_stored == 0
    sparse_layers = stats[1].layers[method.dense_layers :]
    if method.selection_size.blocks is None:
        assert stats[1].bytes_loaded == sum(layer.kv_bytes for layer in sparse_layers)
    else:
        assert 0 < stats[1].blocks_hit < stats[1].blocks_read
        assert 0 < stats[1].bytes_loaded < sum(layer.kv_bytes for layer in sparse_layers)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("method", SMALL[:3], ids=str)
@torch.inference_mode()
def test_every_use_gives_the_tokens_of_the_device(method, scenario, exact, stores):
    """Beams, several turns, chunks and drafts crop, extend and reorder the rows."""
    model = shared_model("llama", torch.float64)
    tokens = []
    for kv_storage in ("device", "host"):
        with sparse_attention(model, method, kv_storage=kv_storage):
            tokens.append(scenario(model, lambda: SparseCache.for_model(model)))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("method", [Quest(token_budget=512), KeyCodes(token_budget=512)], ids=str)
@torch.inference_mode()
def test_full_budget_is_dense_token_for_token(method, scenario):
    model = shared_model("llama")
    expected = scenario(model, DynamicCache)
    with sparse_attention(model, method, kv_storage="host"):
        assert torch.equal(scenario(model, lambda: SparseCache.for_model(model)), expected)


@pytest.mark.one_in(2)
@small_methods
@pytest.mark.parametrize("max_cache_len", [None, 200])
@torch.inference_mode()
def test_cached_rows_change_as_on_the_device(method, max_cache_len, exact, stores):
    """A later turn, a crop, other rows, a reset: after each of them steps give the device's logits."""
    model = shared_model("llama", torch.float64)
    steps = random_ids(3, 12, seed=4)

    def run(kv_storage):
        with sparse_attention(model, method, kv_storage=kv_storage):
            cache = SparseCache.for_model(model, max_cache_len)
            parts = [random_ids(2, 90), *steps[:2, :5].split(1, dim=1), random_ids(2, 30, seed=9)]
            logits = logits_of(model, cache, [*parts, *steps[:2, 5:].split(1, dim=1)])
            cache.crop(-19)
            logits += logits_of(model, cache, steps[:2].flip(1).split(1, dim=1))
            cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
            logits += logits_of(model, cache, steps[:2, :4].split(1, dim=1))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1], device=DEVICE))
            logits += logits_of(model, cache, steps.split(1, dim=1))
            cache.reset()
            return logits + logits_of(model, cache, [random_ids(3, 70, seed=1), *steps.split(1, dim=1)])

    for on_device, on_host in zip(run("device"), run("host"), strict=True):
        assert torch.equal(on_device, on_host)


@pytest.mark.one_in(2)
@small_methods
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda cache: cache.fork(cache.method)], ids=["copy", "fork"])
@pytest.mark.parametrize("max_cache_len", [None, 140])
@torch.inference_mode()
def test_copies_and_forks_go_on_by_themselves(method, make_copy, max_cache_len, exact, stores):
    model = shared_model("llama", torch.float64)
    ids, steps = random_ids(2, 100), random_ids(2, 24, seed=4).split(1, dim=1)
    with sparse_attention(model, method):
        cache = SparseCache.for_model(model, max_cache_len)
        expected = logits_of(model, cache, [ids, *steps])
    with sparse_attention(model, method, kv_storage="host"):
        cache = SparseCache.for_model(model, max_cache_len)
        logits_of(model, cache, [ids, *steps[:6]])
        other = make_copy(cache)
        for each in (other, cache):  # one after the other, as forks are used
            for actual, wanted in zip(logits_of(model, each, steps[6:]), expected[7:], strict=True):
                assert torch.equal(actual, wanted)
        cache.crop(-24)
        assert torch.equal(logits_of(model, cache, steps[:1])[0], expected[1])


@pytest.mark.parametrize("method", [SMALL[0], SMALL[2]], ids=str)
@torch.inference_mode()
def test_hits_and_bytes_are_as_predicted(method, exact):
    model, prompt, new = shared_model("llama", torch.float64), 90, 20
    size, dense = method.selection_size.block_size, method.dense_layers
    with sparse_attention(model, method, kv_storage="host"), record_selections(model) as record:
        model.generate(random_ids(2, prompt), **{**GREEDY, "max_new_tokens": new + 1})
        stats = sparse_attention_stats(model)
    hits = reads = tokens = 0
    for layer in range(dense, LAYERS):
        for pair in ((row, head) for row in range(2) for head in range(KV_HEADS)):
            slots, partial = [None] * method.selection_size.blocks, None
            for number, selection in enumerate(record.selections(layer)):
                held = prompt + number + 1
                chosen = [block for block in selection.block_indices[pair].tolist() if block >= 0]
                newest = held // size if held % size else None
                full = [block for block in chosen if block != newest]
                free = [slot for slot, block in enumerate(slots) if block not in full]
                for block in full:
                    if block not in slots:
                        slots[free.pop(0)] = block
                        tokens += size
                    else:
                        hits += 1
                reads += len(full)
                if newest in chosen:
                    tokens += 1 if partial == newest else held % size
                    partial = newest
    assert (stats.blocks_hit, stats.blocks_read) == (hits, reads)
    assert 0 < stats.hit_rate < 1
    token = 2 * HEAD_DIM * 8
    assert stats.bytes_loaded == stats.step_bytes_loaded == tokens * token
    assert stats.loaded_per_step == tokens * token / new
    assert stats.bytes_stored == (prompt + new) * 2 * KV_HEADS * (LAYERS - dense) * token
    assert [layer.bytes_stored > 0 for layer in stats.layers] == [index >= dense for index in range(LAYERS)]


@pytest.mark.parametrize("method", [SMALL[0], SMALL[4]], ids=str)
@torch.inference_mode()
def test_what_a_later_prompt_loads_is_no_step_s(method):
    model, dense = shared_model("llama"), method.dense_layers
    with sparse_attention(model, method, kv_storage="host"):
        cache = SparseCache.for_model(model)
        logits_of(model, cache, [random_ids(2, 90)])
        assert sparse_attention_stats(model).loaded_per_step == 0.0
        logits_of(model, cache, random_ids(2, 5).split(1, dim=1))
        before = sparse_attention_stats(model)
        logits_of(model, cache, [random_ids(2, 30)])
        after = sparse_attention_stats(model)
    assert 0 < before.step_bytes_loaded == before.bytes_loaded == after.step_bytes_loaded
    token = 2 * 2 * KV_HEADS * HEAD_DIM * 4 * (LAYERS - dense)  # two rows, keys and values
    assert after.bytes_loaded - before.bytes_loaded == 95 * token
    assert after.loaded_per_step == after.step_bytes_loaded / 5


@torch.inference_mode()
def test_only_sparse_layers_are_in_host_memory():
    model = shared_model("llama")
    with sparse_attention(model, SMALL[0], kv_storage="host"):
        growing = model(random_ids(1, 80)).past_key_values
        static = SparseCache.for_model(model, max_cache_len=90)
    assert [type(layer.storage) for layer in growing.layers] == [GrowingStorage] * 2 + [GrowingHostStorage] * 2
    assert [type(layer.storage) for layer in static.layers[2:]] == [StaticHostStorage] * 2
    assert static.is_compileable


@torch.inference_mode()
def test_unpatched_models_read_host_memory_too(stores):
    model, ids = shared_model("llama"), random_ids(2, 70)
    expected = model.generate(ids, **GREEDY)
    for max_cache_len in (None, 100):
        cache = SparseCache(model.config, SMALL[0], max_cache_len, kv_storage="host")
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)


@torch.inference_mode()
def test_the_storage_comes_back_with_the_method():
    model = make_model("llama")
    patch_model(model, SMALL[0], kv_storage="host")
    with sparse_attention(model, "full"):
        assert SparseCache.for_model(model).kv_storage == "device"
    assert SparseCache.for_model(model).kv_storage == "host"
    with sparse_attention(model, SMALL[0]):  # a cache in either place serves
        cache = SparseCache(model.config, SMALL[0], kv_storage="host")
        model.generate(random_ids(1, 60), past_key_values=cache, **GREEDY)
    unpatch_model(model)


@pytest.mark.parametrize(
    ("method", "kv_storage", "message"),
    [
        (SMALL[0], "disk", r"kv_storage must be one of 'device', 'host', got 'disk'"),
        (
            TokenSelect(token_budget=64),
            "host",
            r"must be 'device' for method 'tokenselect', got 'host': .*allow 'host': quest, .*keycodes",
        ),
        (Full(), "host", r"must be 'device' for method 'full', got 'host'"),
        (replace(SMALL[0], offload=True, gpu_cache_tokens=999), "host", r"kv_storage='host' and offload=True exclude"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_when_the_model_is_patched(method, kv_storage, message):
    model = shared_model("llama")
    with pytest.raises(ValueError, match=message):
        patch_model(model, method, kv_storage=kv_storage)
    with pytest.raises(ValueError, match=message):
        SparseCache(model.config, method, kv_storage=kv_storage)


@torch.inference_mode()
def test_forks_for_methods_that_read_all_keys_are_refused():
    model = shared_model("llama")
    cache = SparseCache(model.config, SMALL[0], kv_storage="host")
    with pytest.raises(ValueError, match="kv_storage must be 'device' for method 'full'"):
        cache.fork("full")


@pytest.mark.parametrize(("max_cache_len", "tokens"), [(None, 150), (1000, 1000)])
@torch.inference_mode()
def test_too_little_host_memory_is_found_before_the_prompt(max_cache_len, tokens, monkeypatch):
    model = shared_model("llama")
    needed = tokens * 3 * 2 * 2 * KV_HEADS * HEAD_DIM * 4
    monkeypatch.setattr(room, "available_bytes", lambda: needed - 1)
    with sparse_attention(model, SMALL[0], kv_storage="host"):
        cache = SparseCache.for_model(model, max_cache_len)
        with pytest.raises(
            RuntimeError, match=rf"kv_storage='host': {tokens} tokens take 0.00 GiB .* 0.00 GiB are left"
        ):
            model(random_ids(3, 150), past_key_values=cache)
        assert cache.get_seq_length() == 0
        assert not any(layer.is_initialized for layer in cache.layers)
        monkeypatch.setattr(room, "available_bytes", lambda: needed)
        model(random_ids(3, 150), past_key_values=cache)


class Refusing:
    """Host memory of which the ``at``-th allocation is refused. It remembers, weakly, what it gave."""

    def __init__(self, at):
        self.at, self.given = at, []

    def __call__(self, shape, dtype, device):
        if len(self.given) == self.at - 1:
            raise RuntimeError("kv_storage='host': memory cannot be pinned")
        tokens = memory.host_tokens(shape, dtype, device)
        self.given.append(weakref.ref(tokens.host))
        return tokens

    @property
    def held(self):
        gc.collect()
        return sum(tensor() is not None for tensor in self.given)


@pytest.mark.parametrize("max_cache_len", [None, 200])
@pytest.mark.parametrize("used_before", [False, True])
@torch.inference_mode()
def test_memory_that_cannot_be_pinned_is_an_error_before_the_first_layer(max_cache_len, used_before, monkeypatch):
    model = make_model("llama")
    patch_model(model, SMALL[1], kv_storage="host")  # all four layers
    cache, expected = SparseCache.for_model(model, max_cache_len), model(random_ids(2, 90)).logits
    if used_before:  # by other rows, whose buffers do not serve
        model(random_ids(1, 90), past_key_values=cache)
        cache.reset()
    ran = []
    first = model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(0))
    refusing = Refusing(at=3)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "host_tokens", refusing)
        with pytest.raises(RuntimeError, match="cannot be pinned"):
            model(random_ids(2, 90), past_key_values=cache)
    assert (ran, len(refusing.given), refusing.held) == ([], 2, 0)
    assert cache.get_seq_length() == 0
    first.remove()
    assert torch.equal(model(random_ids(2, 90), past_key_values=cache).logits, expected)


@torch.inference_mode()
def test_what_a_failed_prompt_has_reserved_is_freed(monkeypatch):
    model = make_model("llama")
    patch_model(model, SMALL[1], kv_storage="host")
    cache, counting = SparseCache.for_model(model), Refusing(at=99)
    monkeypatch.setattr(storage, "host_tokens", counting)

    def fail(*_):
        assert counting.held == LAYERS
        raise RuntimeError("out of memory")

    with model.model.layers[1].register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="out of memory"):
        model(random_ids(2, 90), past_key_values=cache)
    assert counting.held == 1  # the first layer's buffers, which serve the next pass
    model(random_ids(2, 90), past_key_values=cache)
    assert (counting.held, len(counting.given)) == (LAYERS, 2 * LAYERS - 1)


@torch.inference_mode()
def test_buffers_of_other_tokens_than_expected_are_allocated_anew(monkeypatch):
    """As under autocast: keys have another dtype than the weights."""
    model, counting = make_model("llama"), Refusing(at=99)
    cache = SparseCache(model.config, SMALL[1], kv_storage="host")
    monkeypatch.setattr(storage, "host_tokens", counting)
    cache.reserve_host((2, KV_HEADS, 90, HEAD_DIM), torch.bfloat16, lambda: [torch.device("cpu")] * LAYERS)
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, 2, KV_HEADS, 90, HEAD_DIM), layer)
    assert (counting.held, len(counting.given)) == (LAYERS, 2 * LAYERS)


@pytest.mark.parametrize("failing", ["room", "pin"])
@torch.inference_mode()
def test_too_little_memory_to_grow_leaves_the_cache_as_it_was(failing, monkeypatch):
    model = make_model("llama")
    patch_model(model, SMALL[1], kv_storage="host")
    cache, turn = SparseCache.for_model(model), random_ids(2, 60, seed=3)
    model(random_ids(2, 90), past_key_values=cache)
    expected = model(turn, past_key_values=copy.deepcopy(cache)).logits
    token = 2 * 2 * KV_HEADS * HEAD_DIM * 4
    ran = []
    first = model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(0))
    with monkeypatch.context() as patched:
        if failing == "pin":
            patched.setattr(storage, "host_tokens", Refusing(at=3))
            message = "cannot be pinned"
        else:  # all grow from 90 to 180 tokens, one after another
            patched.setattr(room, "available_bytes", lambda: (LAYERS * 90 + 90) * token - 1)
            message = r"180 tokens take 0.00 GiB of host memory beside the 90 that they replace, and 0.00 GiB are left"
        with pytest.raises(RuntimeError, match=message):
            model(turn, past_key_values=cache)
    assert ran == []
    assert cache.get_seq_length() == 90
    assert {layer.capacity for layer in cache.layers} <= ({90} if failing == "room" else {90, 180})
    first.remove()
    monkeypatch.setattr(room, "available_bytes", lambda: (LAYERS * 90 + 90) * token)
    assert torch.equal(model(turn, past_key_values=cache).logits, expected)


@torch.inference_mode()
def test_a_layer_alone_grows_only_if_there_is_room(monkeypatch):
    model = shared_model("llama")
    cache = SparseCache(model.config, SMALL[1], kv_storage="host")
    model(random_ids(1, 70), past_key_values=cache)  # unpatched: each layer grows by itself
    layer = cache.layers[0]
    before = layer.keys
    monkeypatch.setattr(room, "available_bytes", lambda: 140 * 2 * KV_HEADS * HEAD_DIM * 4 - 1)
    with pytest.raises(RuntimeError, match=r"140 tokens take 0.00 GiB of host memory beside the 70 that they replace"):
        layer.reserve(71)
    assert layer.keys is before


@pytest.mark.parametrize("version", [1, 2])
def test_available_memory_is_the_least_of_system_and_container(version, tmp_path, monkeypatch):
    system, group = tmp_path / "meminfo", tmp_path / "group"
    folder = group if version == 2 else group / "memory"
    folder.mkdir(parents=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    system.write_text("MemTotal:  900 kB\nMemAvailable:  700 kB\nHugePages_Total:  0\n")
    monkeypatch.setattr(memory, "MEMORY_INFO", system)
    monkeypatch.setattr(memory, "CONTROL_GROUP", group)
    assert memory.available_bytes() == 700 * 1024
    for name, value in zip(names, (600_000, 200_000), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text("anon 100000\ninactive_file 50000\n")
    assert memory.available_bytes() == 450_000
    (folder / names[0]).write_text("max\n")
    assert memory.available_bytes() == 700 * 1024
    system.unlink()
    assert memory.available_bytes() is None


@pytest.mark.gpu
@pytest.mark.parametrize("is_managed", [True, False])
def test_kernels_and_host_share_the_memory_and_it_is_freed_in_the_end(is_managed, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    if not is_managed:
        monkeypatch.setattr(memory, "managed_bytes", lambda num_bytes, device: None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gc.collect()
        host = check_shared_memory(dtype, device, head_dim=80)
        # Memory that is registered is unpinned with its last alias, and stays the host's own.
        assert is_of_cuda(host) == is_managed
        begin = host.data_ptr()
        del host
        gc.collect()
        assert not is_of_cuda(begin)


def is_of_cuda(host: torch.Tensor | int) -> bool:
    """Whether the CUDA driver knows the memory of a tensor, or at an address."""
    begin = host if isinstance(host, int) else host.data_ptr()
    kind = ctypes.c_uint()
    memory_type = 2
    return (
        ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(kind), memory_type, ctypes.c_uint64(begin)) == 0
    )


@pytest.mark.gpu
def test_managed_memory_stays_on_the_host():
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.mem_get_info()[0]
    host, keys, _ = memory.host_tokens((1, 8, 65536, 128), torch.bfloat16, device)  # 256 MiB
    assert is_of_cuda(host)
    assert not host.is_pinned()
    for _ in range(3):
        keys.add_(1)
        torch.cuda.synchronize()
        host[:, :, ::4096] += 1
    assert bool((keys[:, :, ::4096] == 6).all())
    assert before - torch.cuda.mem_get_info()[0] < 128 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 20, 64])
def test_keys_and_values_are_neighbours_without_a_storage_in_common(head_dim, dtype):
    check_shared_memory(dtype, torch.device("cpu"), head_dim)


def check_shared_memory(dtype, device, head_dim):
    host, keys, values = memory.host_tokens((2, 3, 5, head_dim), dtype, device)
    assert keys.device == values.device == device
    assert host.data_ptr() == keys.data_ptr()
    assert values.data_ptr() - keys.data_ptr() < 16 + head_dim * dtype.itemsize
    for tensor in (keys, values):
        assert tensor.shape == (2, 3, 5, head_dim)
        assert tensor.data_ptr() % 16 == tensor.stride(2) * dtype.itemsize % 16 == 0
        assert tensor.stride(3) == 1
        assert not tensor.any()
    # Compiled steps take tensors of one storage for one tensor.
    assert keys.untyped_storage()._cdata != values.untyped_storage()._cdata
    expected = torch.randn(2, 3, 5, 2, head_dim, device=device).to(dtype)
    keys.copy_(expected[:, :, :, 0])
    values.copy_(expected[:, :, :, 1])
    values[1, :, 2:4] += 1
    expected[1, :, 2:4, 1] += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host, expected.cpu())
    host[0] = 3
    assert bool((keys[0] == 3).all())
    assert bool((values[0] == 3).all())
    del keys, tensor
    gc.collect()
    if device.type == "cuda":
        assert is_of_cuda(host)
    assert torch.equal(values[1].cpu(), host[1, :, :, 1])
    del values
    gc.collect()
    assert bool((host[0] == 3).all())
    return host


@pytest.mark.gpu
@torch.inference_mode()
def test_where_the_driver_pins_no_pages_torch_allocates_them_and_a_second_refusal_is_an_error(monkeypatch):
    monkeypatch.setattr(memory, "managed_bytes", lambda num_bytes, device: None)
    monkeypatch.setattr(memory, "_register", lambda host, device: False)
    model = make_model("llama")
    with sparse_attention(model, SMALL[0]):
        expected = model.generate(random_ids(1, 70), **GREEDY)
    with sparse_attention(model, SMALL[0], kv_storage="host"):
        assert torch.equal(model.generate(random_ids(1, 70), **GREEDY), expected)

    def refuse(shape, dtype):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(memory, "pinned_empty", refuse)
    with sparse_attention(model, SMALL[0], kv_storage="host"):
        cache = SparseCache.for_model(model)
        with pytest.raises(RuntimeError, match=r"GiB of host memory cannot be pinned \(out of memory\)"):
            model(random_ids(1, 70), past_key_values=cache)
        assert cache.get_seq_length() == 0
