"""Saved caches: a loaded one continues as the saved one does, and is refused where it does not belong."""

import errno

import pytest
import torch

from hf_sparse_attn import (
    H2O,
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
from hf_sparse_attn.cache.host import room
from hf_sparse_attn.cache.offload.storage import OffloadStorage
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
        with pytest.raises(ValueError, match="'h2o' can neither be saved nor parked"):
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


@pytest.mark.parametrize("fails_in", ["save_file", "_flush"])
def test_a_full_disk_leaves_the_former_file_and_a_cache_that_goes_on(fails_in, saved, model, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    path, _ = saved
    before = path.read_bytes()
    with torch.inference_mode(), sparse_attention(model, QUEST):
        cache = SparseCache.load(path, model)
        monkeypatch.setattr(tensor_file, fails_in, full)
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
