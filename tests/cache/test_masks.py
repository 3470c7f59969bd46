"""Masks that change between calls: late padding, padding on the right, and masks that hide cached tokens."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import METHODS, SparseCache, patch_model, sparse_attention, sparse_attention_stats, unpatch_model
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.padding import causal_mask
from tests.models import COVERING, DEVICE, SPARSE, make_model, random_ids, shared_model

every_method = pytest.mark.parametrize("method_name", METHODS)
SETTINGS = {
    **SPARSE,
    "tokenselect": {"chunk_size": 32},
    # Without the mean query: no one can take the queries of tokens that turn out to be padding out of it.
    "keycodes": {"page_size": 16, "query_centre": False},
    "rabitqcache": {**SPARSE["rabitqcache"], "query_centre": False},
    "double_sparsity": {**SPARSE["double_sparsity"], "calibration_queries": 32},
    "infinigen": {**SPARSE["infinigen"], "calibration_queries": 32},
    "ntk": COVERING["ntk"],  # dense attention
    "infllm": {**SPARSE["infllm"], "representatives": 8},  # whole blocks, whatever those queries sought
}


@pytest.fixture
def exact():
    with use_impl("reference"):
        yield shared_model("llama", torch.float64)


@pytest.mark.parametrize(
    "method_name",
    # No one can take the weights of queries that turn out to be padding out of the sums.
    [name for name, method in METHODS.items() if not method.needs_weights],
)
@torch.inference_mode()
def test_padding_first_shown_by_a_later_mask_is_obeyed(method_name, exact):
    """Quest's pages start with the row: their bounds are rebuilt when it moves."""
    model, ids, step = exact, random_ids(2, 150), random_ids(2, 1, seed=5)
    mask = torch.ones(2, 151, dtype=torch.long, device=DEVICE)
    mask[1, :21] = 0
    with sparse_attention(model, method_name, token_budget=64, **SETTINGS.get(method_name, {})):
        late, known = SparseCache.for_model(model), SparseCache.for_model(model)
        model(ids[:, :100], past_key_values=late)
        model(ids[:, :100], attention_mask=mask[:, :100], past_key_values=known)
        for layer, other in zip(late.layers, known.layers, strict=True):  # as if those tokens had been masked
            layer.keys[:, :, :100], layer.values[:, :, :100] = other.keys[:, :, :100], other.values[:, :, :100]
        for cache in (late, known):
            model(ids[:, 100:], attention_mask=mask[:, :150], past_key_values=cache)
        for layer, other in zip(late.layers, known.layers, strict=True):
            assert layer.seq_start.tolist() == [0, 21]
            for name in layer.metadata if method_name == "quest" else ():
                held = slice(-(-129 // 16)) if name.startswith("page") else slice(None)
                assert torch.equal(layer.metadata[name][1, :, held], other.metadata[name][1, :, held])
        logits = [model(step, attention_mask=mask, past_key_values=cache).logits for cache in (late, known)]
    torch.testing.assert_close(*logits)


@torch.inference_mode()
def test_bounds_bound_their_pages_after_late_padding():
    model, ids = shared_model("llama"), random_ids(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :21] = 0
    with sparse_attention(model, "quest", token_budget=64, bounds_dtype="model"):
        cache = SparseCache.for_model(model)
        model(ids[:, :60], past_key_values=cache)
        model(ids[:, 60:], attention_mask=mask, past_key_values=cache)
        layer = cache.layers[3]
    for row, start in enumerate((0, 21)):
        for first in range(start, 90, 16):
            keys = layer.keys[row, :, first : min(first + 16, 90)]
            assert torch.equal(layer.metadata["page_min"][row, :, (first - start) // 16], keys.amin(1))
            assert torch.equal(layer.metadata["page_max"][row, :, (first - start) // 16], keys.amax(1))


@torch.inference_mode()
def test_bounds_bound_their_pages_after_a_crop_into_the_padding_and_a_mask_without_it():
    model, ids = shared_model("llama"), random_ids(1, 90)
    mask = torch.ones_like(ids)
    mask[0, :50] = 0
    with sparse_attention(model, "quest", token_budget=64, bounds_dtype="model"):
        cache = SparseCache.for_model(model)
        model(ids[:, :60], past_key_values=cache)
        model(ids[:, 60:70], attention_mask=mask[:, :70], past_key_values=cache)
        cache.crop(-30)
        model(ids[:, 40:], attention_mask=torch.ones_like(mask), past_key_values=cache)
        layer = cache.layers[3]
    pages = layer.keys[0, :, :80].unflatten(1, (5, 16))
    assert torch.equal(layer.metadata["page_min"][0, :, :5], pages.amin(2))
    assert torch.equal(layer.metadata["page_max"][0, :, :5], pages.amax(2))


@torch.inference_mode()
def test_a_decode_steps_mask_that_hides_cached_tokens_is_refused_or_obeyed():
    model, ids, step = make_model("llama"), random_ids(2, 90), random_ids(2, 1, seed=5)
    for max_cache_len in (None, 128):
        patch_model(model, "quest", token_budget=48)
        cache = SparseCache.for_model(model, max_cache_len)
        model(ids, past_key_values=cache)
        holes = torch.ones(2, 91, dtype=torch.long)
        holes[1, 40:50] = 0
        with pytest.raises(ValueError, match=r"padding after a token in rows \[1\]; after cached tokens only left"):
            model(step, attention_mask=holes, past_key_values=cache)
        assert cache.get_seq_length() == 90
        padded = torch.ones(2, 91, dtype=torch.long)
        padded[1, :40] = 0
        model(step, attention_mask=padded, past_key_values=cache)
        assert cache.layers[0].seq_start.tolist() == [0, 40]
        assert sparse_attention_stats(model).layers[0].tokens_read == (91 + 51) * 2
        unpatch_model(model)


def test_a_mask_on_a_device_is_reported_where_the_host_waits_anyway():
    """On CUDA no decode step waits: hidden tokens are noted there, and raised with the next prompt or the stats."""
    lengths = Lengths(2, torch.device("cpu"), is_static=False)
    lengths.note_mask(torch.tensor(False))
    lengths.check_masks()
    lengths.note_mask(torch.tensor(True))
    lengths.note_mask(torch.tensor(False))
    with pytest.raises(ValueError, match="attention_mask of an earlier decode step hid cached tokens"):
        lengths.check_masks()
    lengths.check_masks()  # raises once


@pytest.mark.gpu
@torch.inference_mode()
def test_a_hidden_token_on_cuda_is_reported():
    model, ids = make_model("llama"), random_ids(2, 90)
    with sparse_attention(model, "quest", token_budget=48):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        mask = torch.ones(2, 91, dtype=torch.long, device=DEVICE)
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
        sparse_attention_stats(model)
        mask = torch.ones(2, 92, dtype=torch.long, device=DEVICE)
        mask[0, 5:9] = 0
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="hid cached tokens"):
            sparse_attention_stats(model)


@every_method
@pytest.mark.parametrize("use_cache", [True, False])
@torch.inference_mode()
def test_a_right_padded_forward_is_dense_under_its_mask(method_name, use_cache):
    model, ids = make_model("llama"), random_ids(3, 120)
    mask = torch.ones_like(ids)
    mask[1, 90:], mask[2, 3:] = 0, 0
    ids[mask == 0] = 0
    expected = model(ids, attention_mask=mask, use_cache=use_cache).logits
    with sparse_attention(model, method_name, token_budget=48, **SETTINGS.get(method_name, {})):
        output = model(ids, attention_mask=mask, use_cache=use_cache)
        torch.testing.assert_close(output.logits[mask == 1], expected[mask == 1])
        if not use_cache:
            return
        with pytest.raises(ValueError, match=r"holds padding after a token.*padding_side = 'left'.*back to 0 tokens"):
            model(ids[:, :1], past_key_values=output.past_key_values)
        output.past_key_values.reset()
        left = model(ids[:, :80], past_key_values=output.past_key_values).logits
        torch.testing.assert_close(left, model(ids[:, :80]).logits)


@torch.inference_mode()
def test_padding_on_the_right_after_cached_tokens(exact):
    model, ids = exact, random_ids(2, 90)
    mask = torch.ones_like(ids)
    mask[1, 80:] = 0
    expected = model(ids, attention_mask=mask).logits
    with sparse_attention(model, "quest", token_budget=48):
        cache = SparseCache.for_model(model)
        model(ids[:, :60], past_key_values=cache)
        logits = model(ids[:, 60:], attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(logits[0], expected[0, 60:], rtol=1e-4, atol=1e-5)  # RoPE's tables are float32
        torch.testing.assert_close(logits[1, :20], expected[1, 60:80], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="padding after a token"):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(-30)
        model(ids[:, :1], past_key_values=cache)
    with sparse_attention(model, "tokenselect", token_budget=48, chunk_size=32):
        cache = SparseCache.for_model(model)
        model(ids[:, :60], past_key_values=cache)
        with pytest.raises(ValueError, match=r"padding after a token in rows \[1\]; after cached tokens only left"):
            model(ids[:, 60:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("is_masked", [True, False])
@torch.inference_mode()
def test_a_pass_with_another_number_of_rows_than_the_cache_is_refused_and_changes_nothing(
    tokens, is_masked, max_cache_len, exact
):
    ids = random_ids(3, 93)
    with sparse_attention(exact, "quest", token_budget=48):
        for cached_rows, rows in ((1, 2), (2, 3), (2, 1)):
            cache, untouched = (SparseCache.for_model(exact, max_cache_len=max_cache_len) for _ in range(2))
            for each in (cache, untouched):
                exact(ids[:cached_rows, :90], past_key_values=each)
            mask = torch.ones(rows, 90 + tokens, dtype=torch.long, device=DEVICE) if is_masked else None
            message = f"new tokens must have the cache's batch size {cached_rows}, got {rows}"
            with pytest.raises(ValueError, match=message):
                exact(ids[:rows, 90 : 90 + tokens], attention_mask=mask, past_key_values=cache)
            assert cache.get_seq_length() == 90
            logits = [exact(ids[:cached_rows, 90:], past_key_values=each).logits for each in (cache, untouched)]
            assert torch.equal(*logits)


@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("options", [{"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}])
def test_generate_refuses_more_rows_than_a_kept_cache_has(options, max_cache_len, exact):
    ids = random_ids(1, 95)
    mask = torch.ones_like(ids)
    with sparse_attention(exact, "quest", token_budget=48):
        cache = SparseCache.for_model(exact, max_cache_len=max_cache_len)
        with torch.inference_mode():
            exact(ids[:, :90], past_key_values=cache)
        wanted = {"attention_mask": mask, "max_new_tokens": 3}
        with pytest.raises(ValueError, match="new tokens must have the cache's batch size 1, got 2"):
            exact.generate(ids, past_key_values=cache, **wanted, **options)
        kept = exact.generate(ids, past_key_values=cache, do_sample=False, **wanted)
        fresh = SparseCache.for_model(exact, max_cache_len=max_cache_len)
        with torch.inference_mode():
            exact(ids[:, :90], past_key_values=fresh)
        assert torch.equal(kept, exact.generate(ids, past_key_values=fresh, do_sample=False, **wanted))


def test_generate_refuses_padding_on_the_right_before_any_work():
    model, ids = make_model("llama"), random_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    patch_model(model, "quest", token_budget=48)
    with pytest.raises(ValueError, match=r"padding after a token in rows \[1\].*padding_side = 'left'"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, pad_token_id=0)


@every_method
def test_a_classifier_takes_padding_on_the_right(method_name):
    """The Trainer's evaluation and scoring loops pad on the right, and never decode."""
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    model = LlamaForSequenceClassification(make_model("llama").config).to(DEVICE).eval()
    ids = random_ids(3, 40)
    ids[1, 30:], ids[2, 4:] = 0, 0
    mask = (ids != 0).long()
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask).logits
        with sparse_attention(model, method_name, token_budget=32, **SETTINGS.get(method_name, {})):
            torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected)


@torch.inference_mode()
def test_rows_without_padding_need_no_mask():
    model, ids = make_model("llama"), random_ids(3, 60)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    with sparse_attention(model, "quest", token_budget=48):
        cache = SparseCache.for_model(model)
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 0], device=DEVICE))
        model(ids[:2, :1], past_key_values=cache)
        assert not cache.has_padding


def _blocks(*sizes: int) -> torch.Tensor:
    """The mask of texts side by side in one row, bool [1, 1, tokens, tokens]."""
    return torch.block_diag(*(torch.ones(size, size).tril() for size in sizes)).bool()[None, None].to(DEVICE)


@pytest.mark.parametrize(
    "method_name", ["full", "quest", "keycodes", "tokenselect", "infllm", "self_extend", "squeezed"]
)
@torch.inference_mode()
def test_masks_of_packed_texts_and_of_trees_are_refused(method_name, exact):
    model, ids = exact, random_ids(1, 20)
    prompt = _blocks(20)
    tree = torch.cat([torch.ones(3, 20), torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])], 1).bool()[None, None]
    with sparse_attention(model, method_name, token_budget=256, **SETTINGS.get(method_name, {})):
        with pytest.raises(ValueError, match="not causal over left-padded tokens"):
            model(ids, attention_mask=_blocks(12, 8))
        expected = model(ids).logits
        cache = SparseCache.for_model(model)
        torch.testing.assert_close(model(ids, attention_mask=prompt, past_key_values=cache).logits, expected)
        with pytest.raises(ValueError, match="not causal over left-padded tokens"):
            model(random_ids(1, 3), attention_mask=tree.to(DEVICE), past_key_values=cache)
        assert cache.get_seq_length() == 20


@pytest.mark.parametrize("all_seen", [False, True], ids=["none", "all"])
@torch.inference_mode()
def test_what_padding_sees_does_not_matter(all_seen, exact, monkeypatch):
    """A query of padding has no key, or with old versions of torch all."""
    monkeypatch.setattr("hf_sparse_attn.cache.padding.QUERIES_AT_ONCE", 7)
    model, ids = exact, random_ids(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long, device=DEVICE)
    mask[1, :6] = 0
    causal = causal_mask(mask, 20)
    causal |= all_seen & ~causal.any(dim=3, keepdim=True)
    with sparse_attention(model, "quest", token_budget=64):
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        expected, found = (model(ids, attention_mask=given, position_ids=positions).logits for given in (mask, causal))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1, 6:], expected[1, 6:])
