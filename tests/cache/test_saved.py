"""Saved caches: a loaded one continues as the saved one does, and is refused where it does not belong."""

import errno
import json

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import AutoModelForCausalLM

from hf_sparse_attn import (
    H2O,
    FixedContext,
    KeyCodes,
    Quest,
    SparseCache,
    TokenSelect,
    patch_model,
    prepare_context,
    sparse_attention,
    tensor_file,
    unpatch_model,
)
from hf_sparse_attn.cache import saved as saved_caches
from hf_sparse_attn.cache.contents import method_text
from hf_sparse_attn.cache.host import room
from hf_sparse_attn.cache.offload.storage import OffloadStorage
from hf_sparse_attn.identity import ModelIdentity
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


def steps(model, cache, mask, number=20, seed=4):
    """Feed tokens one by one, and return the logits."""
    tokens, logits = random_ids(len(mask), number, seed=seed), []
    for i in range(number):
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        logits.append(model(tokens[:, i : i + 1], attention_mask=mask, past_key_values=cache).logits)
    return torch.cat(logits, dim=1), mask


def check_continues(model, method, path, room=None, **patch):
    """Fill a cache with a prompt and an answer, save it, and compare what it and a loaded one answer next."""
    ids, mask = padded_batch()
    with sparse_attention(model, method, **patch):
        cache = SparseCache.for_model(model, room)
        model(ids, attention_mask=mask, past_key_values=cache)
        _, mask = steps(model, cache, mask)
        cache.save(path, model)
        loaded = SparseCache.load(path, model, max_cache_len=room)
        assert loaded.get_seq_length() == cache.get_seq_length() == 90
        assert loaded.kv_storage == cache.kv_storage
        for ours, theirs in zip(loaded.sparse_layers, cache.sparse_layers, strict=True):
            assert type(ours.storage) is type(theirs.storage)
            assert ours.metadata.keys() == theirs.metadata.keys()
        # A question in one pass, then an answer.
        question, wider = random_ids(3, 7, seed=8), torch.cat((mask, mask.new_ones(3, 7)), dim=1)
        answers = []
        for each in (cache, loaded):
            logits = model(question, attention_mask=wider, past_key_values=each).logits
            answers.append(torch.cat((logits, steps(model, each, wider)[0]), dim=1))
        torch.testing.assert_close(answers[1], answers[0], rtol=1e-9, atol=1e-9)
        return cache, loaded


@pytest.mark.parametrize("room", [None, ROOM], ids=["growing", "static"])
@pytest.mark.parametrize("method_name", [name for name, each in METHOD_CLASSES.items() if not each.evicts])
@torch.inference_mode()
def test_a_loaded_cache_continues_as_the_saved_one(method_name, room, model, tmp_path):
    check_continues(model, sparse(method_name), tmp_path / "cache", room)


@pytest.mark.parametrize("method", [QUEST, KeyCodes(token_budget=48, page_size=16)], ids=lambda method: method.name)
@torch.inference_mode()
def test_keys_and_values_in_host_memory_come_back_there(method, model, tmp_path):
    check_continues(model, method, tmp_path / "cache", kv_storage="host")


@torch.inference_mode()
def test_too_little_host_memory_is_found_before_the_tensors_are_read(model, tmp_path, monkeypatch):
    path, method = tmp_path / "cache", KeyCodes(token_budget=48, page_size=16)
    with sparse_attention(model, method, kv_storage="host"):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 90), past_key_values=cache)
        cache.save(path, model)
        monkeypatch.setattr(room, "available_bytes", lambda: 1)
        monkeypatch.setattr(SparseCache, "update", None)
        with pytest.raises(RuntimeError, match=r"kv_storage='host': 90 tokens take .* GiB are left"):
            SparseCache.load(path, model)


@torch.inference_mode()
def test_offloaded_keys_and_values_come_back_offloaded(model, tmp_path):
    method = Quest(token_budget=48, page_size=8, offload=True, gpu_cache_tokens=128, dense_layers=0)
    _, loaded = check_continues(model, method, tmp_path / "cache")
    assert all(isinstance(layer.storage, OffloadStorage) for layer in loaded.sparse_layers)


@pytest.mark.parametrize("method_name", [name for name, each in METHOD_CLASSES.items() if not each.evicts])
@torch.inference_mode()
def test_a_prompt_may_be_saved_before_its_first_answer(method_name, model, tmp_path):
    ids, mask = padded_batch()
    method = sparse(method_name)
    with sparse_attention(model, method):
        cache = SparseCache.for_model(model)
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.save(tmp_path / "cache", model, ids)
        answers = [
            steps(model, each, mask)[0]
            for room in (None, ROOM)
            for each in (SparseCache.load(tmp_path / "cache", model, ids, room),)
        ]
        expected, _ = steps(model, cache, mask)
    for answer in answers:
        torch.testing.assert_close(answer, expected, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def test_sliding_windows_continue(tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_model("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=20, dtype=torch.float64)
    check_continues(model, QUEST, tmp_path / "cache")


@torch.inference_mode()
def test_generate_goes_on_from_a_loaded_cache(model, tmp_path):
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    document, question = random_ids(1, 120), random_ids(1, 9, seed=5)
    whole = torch.cat((document, question), dim=1)
    with sparse_attention(model, QUEST):
        cache = SparseCache.for_model(model)
        model(document, past_key_values=cache)
        cache.save(tmp_path / "cache", model, document)
        expected = model.generate(whole, past_key_values=cache, **options)
        loaded = SparseCache.load(tmp_path / "cache", model, document)
        assert torch.equal(model.generate(whole, past_key_values=loaded, **options), expected)


@pytest.fixture
def saved(model, tmp_path):
    """A file, and the tokens of its cache."""
    ids, path = random_ids(2, 40), tmp_path / "cache.safetensors"
    with torch.inference_mode(), sparse_attention(model, QUEST):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.save(path, model, ids)
    return path, ids


def test_what_does_not_belong_together_is_refused(saved, model):
    path, ids = saved
    with pytest.raises(ValueError, match="is not patched"):
        SparseCache.load(path, model)
    with sparse_attention(model, Quest(token_budget=64, page_size=8)), pytest.raises(ValueError, match="token_budget"):
        SparseCache.load(path, model)
    with (
        sparse_attention(model, "keycodes"),
        pytest.raises(ValueError, match=r"patched with keycodes .* patch it with"),
    ):
        SparseCache.load(path, model)
    with sparse_attention(model, QUEST):
        with pytest.raises(ValueError, match="other token ids"):
            SparseCache.load(path, model, ids.flip(1))
        with pytest.raises(ValueError, match="max_cache_len=39 must be at least 40"):
            SparseCache.load(path, model, max_cache_len=39)
        assert SparseCache.load(path, model, ids, 40).get_seq_length() == 40
    for family, differs in (("llama", "other weights"), ("qwen3", "another configuration")):
        other = make_model(family, seed=1, dtype=torch.float64)
        with sparse_attention(other, QUEST), pytest.raises(ValueError, match=f"written by a model with {differs}"):
            SparseCache.load(path, other)


def in_memory(model, folder):
    return cpu_offload(model)


def on_disk(model, folder):
    return disk_offload(model, folder)


def as_one_module(model, folder):
    """The model has two hooks, one of which has the weights of all modules, by their full names."""
    return cpu_offload(model, preload_module_classes=[type(model).__name__])


def with_hooks_of_a_user(model, folder):
    disk_offload(model, folder)
    for module in (model.model.embed_tokens, model.lm_head):
        for _ in range(2):
            add_hook_to_module(module, ModelHook(), append=True)
    return model


def half_on_disk(model, folder):
    """Tied embeddings are loaded as ``lm_head``, and from then on offloaded as ``embed_tokens``."""
    places = {"model.rotary_emb": DEVICE, "model.norm": DEVICE, "lm_head": DEVICE, "model.embed_tokens": "disk"}
    places |= {f"model.layers.{layer}": DEVICE if layer < 2 else "disk" for layer in range(4)}
    return dispatch_model(model, places, main_device=DEVICE, offload_dir=folder, force_hooks=True)


def from_a_checkpoint_in_another_dtype(model, folder):
    """The map has the checkpoint's tensors, in float64."""
    dtype = model.dtype
    model.to(torch.float64).save_pretrained(folder / "checkpoint")
    return AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", device_map={"": "disk"}, offload_folder=folder, dtype=dtype
    ).eval()


OFFLOADS = [in_memory, on_disk, as_one_module, with_hooks_of_a_user, half_on_disk, from_a_checkpoint_in_another_dtype]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("offload", OFFLOADS)
@torch.no_grad()
def test_offloaded_weights_are_those_of_the_whole_model(offload, tied, tmp_path):
    whole = make_model("llama", tie_word_embeddings=tied)
    offloaded = offload(make_model("llama", tie_word_embeddings=tied), tmp_path)
    for _ in range(2):
        assert any(parameter.is_meta for parameter in offloaded.parameters())
        assert ModelIdentity.of(offloaded).weights_hash == ModelIdentity.of(whole).weights_hash
        offloaded(random_ids(1, 5))  # which replaces parameters, and so may untie them


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_each_offloaded_parameter_counts(offload, name, tmp_path):
    changed = make_model("llama")
    with torch.no_grad():
        changed.get_parameter(name).neg_()
    whole = ModelIdentity.of(make_model("llama"))
    assert ModelIdentity.of(offload(changed, tmp_path)).weights_hash != whole.weights_hash


@torch.no_grad()
def test_output_weights_untied_by_hand_count_when_offloaded(tmp_path):
    """The configuration still calls them tied."""
    hashes = []
    for offload in (lambda model, folder: model, in_memory, on_disk):
        model = make_model("llama", tie_word_embeddings=True)
        model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
        hashes.append(ModelIdentity.of(offload(model, tmp_path)).weights_hash)
    assert len(set(hashes)) == 1
    assert hashes[0] != ModelIdentity.of(make_model("llama", tie_word_embeddings=True)).weights_hash


@pytest.fixture(params=[in_memory, on_disk])
def offloaded(request, tmp_path):
    """Two offloaded models: one with the weights of ``model``, and one with others."""
    offload, models = request.param, (make_model("llama", seed, torch.float64) for seed in (0, 1))
    return [offload(model, tmp_path / f"weights {number}") for number, model in enumerate(models)]


@torch.inference_mode()
def test_a_cache_belongs_to_the_same_weights_whole_or_offloaded(offloaded, saved, model, tmp_path):
    (path, ids), (same, other) = saved, offloaded
    with sparse_attention(same, QUEST):
        cache = SparseCache.load(path, same, ids)
        cache.save(tmp_path / "by offloaded", same, ids)
        answer, _ = steps(same, cache, torch.ones_like(ids), 3)
    with sparse_attention(model, QUEST):
        expected, _ = steps(model, SparseCache.load(tmp_path / "by offloaded", model, ids), torch.ones_like(ids), 3)
    torch.testing.assert_close(answer, expected, rtol=1e-9, atol=1e-9)
    for each in (path, tmp_path / "by offloaded"):
        with sparse_attention(other, QUEST), pytest.raises(ValueError, match="written by a model with other weights"):
            SparseCache.load(each, other, ids)


@torch.inference_mode()
def test_a_context_belongs_to_the_same_weights_whole_or_offloaded(offloaded, model, tmp_path):
    path, (same, other) = tmp_path / "context", offloaded
    context = prepare_context(model, random_ids(1, 90), target_sparsity=0.5, clusters=0.1, window=8)
    context.save(path)
    loaded = FixedContext.load(path, same)
    assert loaded.identity == context.identity
    assert {layer.keys.device.type for layer in loaded.layers} == {torch.device(DEVICE).type}
    with pytest.raises(ValueError, match="prepared by a model with other weights"):
        FixedContext.load(path, other)


def test_weights_that_are_nowhere_are_named(saved):
    path, _ = saved
    whole = make_model("llama", dtype=torch.float64)
    cut = cpu_offload(make_model("llama", dtype=torch.float64))
    del cut.model.layers[2].mlp.up_proj._hf_hook.weights_map.dataset["model.layers.2.mlp.up_proj.weight"]
    for model, name in ((whole.to("meta"), "model.embed_tokens"), (cut, "model.layers.2.mlp.up_proj")):
        with sparse_attention(model, QUEST), pytest.raises(ValueError, match=rf"{name}\.weight is on the meta device"):
            SparseCache.load(path, model)


@pytest.mark.parametrize(
    ("tied", "expected"),
    [
        (False, "be4733eb55f37a96c24228f09ab2f96d59c2b63da7a85fb449c5e3796e6dd1f7"),
        (True, "a77ab9df3cc2a3fb5c1f4cb11a4fc2fb52e6376b95828cdb2c4c305702edc331"),
    ],
    ids=["untied", "tied"],
)
@torch.no_grad()
def test_the_hash_of_weights_stays_that_of_files_written_before(tied, expected):
    model = make_model("llama", tie_word_embeddings=tied)
    for number, parameter in enumerate(model.parameters()):
        parameter.copy_(torch.arange(number, number + parameter.numel()).view_as(parameter))
    assert ModelIdentity.of(model).weights_hash == expected


@torch.inference_mode()
def test_codes_with_another_factor_are_another_method(model, tmp_path):
    sizes, corrections = {"token_budget": 48, "page_size": 16}, ("unbiased", "least_squares")
    first, second = (KeyCodes(**sizes, correction=correction) for correction in corrections)
    ids = random_ids(1, 80)
    with sparse_attention(model, first):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache", model)
    with sparse_attention(model, second):
        with pytest.raises(ValueError, match=r'"correction": "unbiased".* patched with keycodes .*"least_squares"'):
            SparseCache.load(tmp_path / "cache", model)
        fork = cache.fork(second)
        model(ids[:, :1], past_key_values=fork)
    with sparse_attention(model, first):
        model(ids[:, :1], past_key_values=cache)
    codes, others = (each.sparse_layers[1].metadata for each in (cache, fork))
    assert torch.equal(others["codes"][:, :, :80], codes["codes"][:, :, :80])
    assert (others["factors"][:, :, :80, 0] < codes["factors"][:, :, :80, 0]).all()  # by the squared cosine


def test_a_cache_saved_without_its_tokens_is_not_compared(saved, model):
    path, ids = saved
    with torch.inference_mode(), sparse_attention(model, QUEST):
        cache = SparseCache.load(path, model)
        with pytest.raises(ValueError, match=r"input_ids must be the tokens .*, \[2, 40\], got \[1, 40\]"):
            cache.save(path, model, ids[:1])
        cache.save(path, model)
        with pytest.raises(ValueError, match="written without input_ids"):
            SparseCache.load(path, model, ids)


@torch.inference_mode()
def test_caches_that_cannot_be_saved_say_why(model, tmp_path):
    path = tmp_path / "cache"
    with sparse_attention(model, QUEST), pytest.raises(ValueError, match="the cache is empty"):
        SparseCache.for_model(model).save(path, model)
    with sparse_attention(model, H2O(token_budget=48)):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 90), past_key_values=cache)
        with pytest.raises(ValueError, match="'h2o' cannot be saved"):
            cache.save(path, model)
    context = prepare_context(model, random_ids(1, 90), target_sparsity=0.5, clusters=0.1, window=8)
    with pytest.raises(ValueError, match=r"begins with a fixed context of 90 tokens: save the context itself"):
        context.cache(1).save(path, model)
    assert not path.exists()


@pytest.mark.parametrize("kept", [0, 7, 2000, -1], ids=["empty", "no-header", "no-tensors", "last-byte"])
def test_a_cut_file_is_refused(kept, saved, model):
    path, _ = saved
    path.write_bytes(path.read_bytes()[:kept])
    with sparse_attention(model, QUEST), pytest.raises(ValueError, match=r"cache.safetensors is damaged or cut off"):
        SparseCache.load(path, model)


def test_a_damaged_file_is_refused(saved, model):
    path, _ = saved
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with sparse_attention(model, QUEST), pytest.raises(ValueError, match="the checksum of layers"):
        SparseCache.load(path, model)
    tensor_file.write_tensors(path, "hf_sparse_attn cache 1", {"cache": "{}"}, {})
    with sparse_attention(model, QUEST), pytest.raises(ValueError, match="has a damaged header"):
        SparseCache.load(path, model)


def rewrite(path, header=None, tensors=None, texts=None):
    """Change a file so that its checksums still hold; a tensor of None is left out."""
    with tensor_file.open_tensors(path, saved_caches.FORMAT, "a cache") as file:
        contents = {**{name: file.read(name) for name in file.checksums}, **(tensors or {})}
        cache = {**json.loads(file.header["cache"]), **(header or {})}
        written = {**file.header, "cache": json.dumps(cache), **(texts or {})}
    contents = {name: tensor for name, tensor in contents.items() if tensor is not None}
    tensor_file.write_tensors(path, saved_caches.FORMAT, written, contents)


def refuses(path, model, message):
    """Check that a file is refused by its name, before any layer gets tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseCache, "update", None)
        patch.setattr(SparseCache, "append_tokens", None)
        with (
            sparse_attention(model, QUEST),
            pytest.raises(ValueError, match=rf"cache\.safetensors .*damaged.*{message}"),
        ):
            SparseCache.load(path, model)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"rows": 1}, "starts must be a list of 1 entries"),
        ({"rows": True}, "rows must be a whole number, got True"),
        ({"tokens": "40"}, "tokens must be a whole number, got '40'"),
        ({"tokens": -1}, "tokens must be at least 1"),
        ({"tokens": 30}, r"layers\.0\.keys must be \[2, 2, 30, 16\] in float64, got \[2, 2, 40, 16\] in float64"),
        ({"tokens": 10**15}, r"layers\.0\.keys must be \[2, 2, 1000000000000000, 16\]"),
        ({"starts": [0, -3]}, "starts must be at least 0, got -3"),
        ({"starts": []}, r"starts must be a list of 2 entries, got \[\]"),
        ({"starts": [0, 2**40]}, "starts must be at most 2147483647"),
        ({"prompt_is_open": 5}, "prompt_is_open must be True or False, got 5"),
        ({"finished_at": "x"}, "finished_at must be a whole number, got 'x'"),
        ({"finished_at": 41}, "finished_at must be at most 40, got 41"),
        ({"closed_from": -5}, "closed_from must be at least 0, got -5"),
        ({"left_out": "abc"}, "left_out must be a list, got 'abc'"),
        ({"left_out": [9999]}, "left_out must be at most 40, got 9999"),
        ({"left_out": [3, 3]}, "left_out must be at least 4, got 3"),
        ({"queries": []}, "queries must be a list of 4 entries"),
        ({"queries": [[1.0, 40]] * 4}, r"layers\.0\.queries\.states is missing"),
        ({"queries": [[float("nan"), 40]] * 4}, "queries: scale must be a finite number, got nan"),
        ({"queries": [[1.0, 41]] * 4}, "queries: end must be at most 40, got 41"),
        ({"window_tokens": []}, "window_tokens must be a list of 4 entries"),
        ({"window_tokens": [40] * 4}, "window_tokens must be None for layer 0, got 40"),
    ],
    ids=str,
)
def test_a_header_that_cannot_be_true_is_refused(header, message, saved, model):
    path, _ = saved
    rewrite(path, header)
    refuses(path, model, message)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"cache": "[" * 100_000}, "maximum recursion depth"),
        ({"cache": "[]"}, "list indices"),
        ({"identity": '{"model_id": 1}'}, "identity must be a JSON object with values of type str"),
    ],
    ids=["deep", "list", "identity"],
)
def test_a_header_of_another_kind_is_refused(texts, message, saved, model):
    path, _ = saved
    rewrite(path, texts=texts)
    refuses(path, model, message)


@pytest.mark.parametrize(
    ("checksums", "message"),
    [(["layers.0.keys"], "checksums must be a JSON object"), ("[" * 100_000, "maximum recursion depth")],
    ids=["list", "deep"],
)
def test_checksums_of_another_kind_are_refused(checksums, message, saved, model, monkeypatch):
    path, _ = saved
    text = checksums if isinstance(checksums, str) else json.dumps(checksums)
    monkeypatch.setattr(tensor_file.json, "dumps", lambda value: text)
    tensor_file.write_tensors(path, saved_caches.FORMAT, {}, {})
    monkeypatch.undo()
    refuses(path, model, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.keys": None}, r"layers\.1\.keys is missing"),
        ({"layers.2.metadata.page_min": None}, r"layers\.2\.metadata\.page_min is missing"),
        ({"layers.7.keys": torch.zeros(3)}, r"layers\.7\.keys is no part of what its header describes"),
        ({"layers.2.metadata.other": torch.zeros(3)}, r"layers\.2\.metadata\.other is no part"),
        ({"layers.1.values": torch.zeros(2, 2, 30, 16).double()}, r"must be \[2, 2, 40, 16\] .* got \[2, 2, 30, 16\]"),
        ({"layers.1.keys": torch.zeros(2, 2, 40, 16).long()}, "in float64, got .* in int64"),
        ({"layers.0.keys": torch.zeros(2, 2, 40, 16).long()}, "in float64, got .* in int64"),
        ({"layers.1.keys": torch.zeros(2, 2, 40, 16).half()}, "in float64, got .* in float16"),
        ({"layers.2.metadata.page_min": torch.zeros(2, 2, 1, 16).char()}, r"must be \[2, 2, 5, 16\] in int8"),
        ({"layers.2.metadata.page_min": torch.zeros(())}, r"must be \[2, 2, 5, 16\] in int8, got \[\] in float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_tensors_that_the_header_does_not_describe_are_refused(change, message, saved, model):
    path, _ = saved
    rewrite(path, tensors=change)
    refuses(path, model, message)


def test_a_cache_of_a_method_that_evicts_is_refused(saved, model):
    path, _ = saved
    method = H2O(token_budget=48)
    rewrite(path, {"method": method_text(method)})
    with sparse_attention(model, method), pytest.raises(ValueError, match="is damaged: caches of 'h2o', which evicts"):
        SparseCache.load(path, model)


@torch.inference_mode()
def test_whatever_state_a_cache_is_in_its_file_can_be_loaded(tmp_path):
    """Rows cut back into their padding, a dtype of autocast, and kept queries are no damage."""
    model, path, (ids, mask) = make_model("llama"), tmp_path / "cache", padded_batch()
    with sparse_attention(model, QUEST):
        cache = SparseCache.for_model(model, keep_queries=5)
        with torch.autocast(DEVICE, torch.bfloat16):
            model(ids, attention_mask=mask, past_key_values=cache)
        for length in (cache.get_seq_length(), 3):
            cache.crop(length - cache.get_seq_length())
            cache.save(path, model)
            loaded = SparseCache.load(path, model)
            for ours, theirs in zip(loaded.sparse_layers, cache.sparse_layers, strict=True):
                assert ours.keys.dtype == theirs.keys.dtype == torch.bfloat16
                assert torch.equal(ours.keys[:, :, :length], theirs.keys[:, :, :length])
                assert torch.equal(ours.prompt_queries.states, theirs.prompt_queries.states)
                assert torch.equal(ours.seq_start, theirs.seq_start)
        assert int(cache.sparse_layers[0].seq_start.max()) > 3


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"window_tokens": [None, 29, None, 30]}, None, "window_tokens must be at least 30, got 29"),
        ({"window_tokens": [None, None, None, 30]}, None, "window_tokens must be a number for layer 1, got None"),
        ({"queries": [[1.0, 30]] * 4}, None, "queries must be None for layer 1, which has a sliding window"),
        (
            None,
            {f"layers.1.{name}": torch.zeros(1, 1, 9, 9) for name in ("keys", "values")},
            r"layers\.1\.keys must be",
        ),
    ],
    ids=["seen", "none", "queries", "held"],
)
@torch.inference_mode()
def test_sliding_windows_are_checked(header, tensors, message, tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_model("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=20)
    path = tmp_path / "cache.safetensors"
    with sparse_attention(model, QUEST):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 30), past_key_values=cache)
        cache.save(path, model)
    rewrite(path, header, tensors)
    refuses(path, model, message)


@pytest.mark.parametrize("target", ["tensor_file.save_file", "whole_file._flush"])
def test_a_full_disk_leaves_the_former_file_and_a_cache_that_goes_on(target, saved, model, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    path, _ = saved
    before = path.read_bytes()
    with torch.inference_mode(), sparse_attention(model, QUEST):
        cache = SparseCache.load(path, model)
        monkeypatch.setattr(f"hf_sparse_attn.{target}", full)
        with pytest.raises(OSError, match="No space left"):
            cache.save(path, model)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]
        assert model(random_ids(2, 1), past_key_values=cache).logits.isfinite().all()


def test_a_model_that_was_patched_again_takes_the_cache(saved, model):
    path, ids = saved
    patch_model(model, TokenSelect(token_budget=48))
    unpatch_model(model)
    with torch.inference_mode(), sparse_attention(model, QUEST):
        assert SparseCache.load(path, model, ids).sparse_layers[0].keys.device.type == DEVICE
