"""Sliding windows: tokens are taken back as long as the window holds what becomes visible, else nothing changes."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_sparse_attn import SelfSpeculation, SparseCache, patch_model, sparse_attention_stats
from tests.models import make_model, random_ids

WINDOW = 20
IDS, NEXT = random_ids(2, 70), random_ids(2, 6, seed=3)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def make(patched: bool = True):
    kinds = ["sliding_attention", "full_attention"]
    windows = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": WINDOW}
    model = make_model("qwen2", dtype=torch.float64, num_hidden_layers=2, **windows)
    return patch_model(model, "quest", token_budget=512, dense_layers=0) if patched else model


def fed(model, length: int = 70) -> SparseCache:
    cache = SparseCache.for_model(model)
    model(IDS[:, :length], past_key_values=cache)
    return cache


def next_logits(model, cache):
    return torch.cat([model(NEXT[:, at : at + 1], past_key_values=cache).logits for at in range(NEXT.shape[1])], 1)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(("length", "removed"), [(70, 1), (70, 70), (20, 1), (20, 9), (15, 4)])
def test_tokens_are_taken_back_that_the_window_can_do_without(length, removed, records):
    model = make()
    cache = fed(model, length)
    if records:
        cache.activate_past_recording()  # after the prompt, whose oldest tokens are gone
    cache.crop(-removed)
    assert cache.get_seq_length() == length - removed
    expected = make(patched=False)(torch.cat((IDS[:, : length - removed], NEXT), dim=1), use_cache=False).logits
    torch.testing.assert_close(next_logits(model, cache), expected[:, length - removed :], rtol=0, atol=1e-9)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(("length", "removed"), [(70, 2), (70, 69), (21, 2)])
def test_a_crop_that_would_show_dropped_tokens_is_refused_and_changes_nothing(length, removed, records):
    model = make()
    cache = fed(model, length)
    if records:
        cache.activate_past_recording()
    with pytest.raises(
        RuntimeError, match=f"window of 20 has dropped tokens that would be .* without the last {removed};"
    ):
        cache.crop(-removed)
    assert cache.get_seq_length() == length
    expected = make(patched=False)(torch.cat((IDS[:, :length], NEXT), dim=1), use_cache=False).logits[:, length:]
    torch.testing.assert_close(next_logits(model, cache), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("room", [-1, 0, 1], ids=["as much as it needs", "one more", "two more"])
@pytest.mark.parametrize("new", [2, 5, 6])
def test_verification_with_no_room_for_a_second_token(new, room):
    expected = make(patched=False).generate(IDS, max_new_tokens=new, **GREEDY)
    model = patch_model(make(patched=False), "quest", token_budget=24, page_size=4, dense_layers=0)
    cache = SparseCache.for_model(model, 70 + new + room)
    arguments = {"past_key_values": cache, "max_new_tokens": new, "custom_generate": SelfSpeculation(3)}
    assert torch.equal(model.generate(IDS, **arguments, **GREEDY), expected)


def test_padding_in_a_window_is_not_counted_as_read():
    model, ids = make(), random_ids(2, 71)
    mask = torch.ones_like(ids)
    mask[0, :60] = 0
    cache, positions = SparseCache.for_model(model), (mask.cumsum(-1) - 1).clamp_min(0)
    for part in (slice(0, 70), slice(70, 71)):
        model(
            ids[:, part],
            attention_mask=mask[:, : part.stop],
            position_ids=positions[:, part],
            past_key_values=cache,
        )
    read = [layer.tokens_read for layer in sparse_attention_stats(model).layers]
    assert read == [11 + WINDOW, 11 + 71]


def test_a_padded_chat_begun_in_inference_mode_goes_on_outside_it(exact):
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    answers = []
    for model in (make(), make(patched=False)):
        cache = SparseCache.for_model(model) if not answers else DynamicCache(config=model.config)
        with torch.inference_mode():
            ids = model.generate(IDS, attention_mask=mask, past_key_values=cache, max_new_tokens=4, **GREEDY)
        whole = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
        with torch.enable_grad():
            answers.append(
                model.generate(ids.clone(), attention_mask=whole, past_key_values=cache, max_new_tokens=4, **GREEDY)
            )
    assert torch.equal(*answers)
