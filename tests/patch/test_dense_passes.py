"""Dense passes over a few tokens of a long cache: by row bounds, with the logits of the unpatched model."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import SparseCache, dense, patch_model
from hf_sparse_attn.cache.storage import GrowingStorage
from tests.models import DEVICE, FAMILIES, ROUNDING, make_model, random_ids


@pytest.fixture
def passes(monkeypatch):
    """The shapes of the queries that attended by row bounds, one for each layer of a pass."""
    shapes, attend = [], dense.dense_prefill

    def noted(query, *arguments, **options):
        shapes.append(tuple(query.shape))
        return attend(query, *arguments, **options)

    monkeypatch.setattr(dense, "dense_prefill", noted)
    return shapes


def text(rows, length, padding=()):
    ids, mask = random_ids(rows, length, seed=3), torch.ones(rows, length, dtype=torch.long, device=DEVICE)
    for row, padded in enumerate(padding):
        ids[row, :padded] = mask[row, :padded] = 0
    return ids, mask


def logits_of_passes(model, ids, mask, parts, cache):
    """Feed a text part by part; return the logits of all but the first part, at tokens."""
    found, fed = [], 0
    for tokens in parts:
        end = fed + tokens
        inputs = {"input_ids": ids[:, fed:end], "attention_mask": mask[:, :end], "past_key_values": cache}
        positions = (mask[:, :end].cumsum(1) - 1).clamp_min(0)[:, fed:end]
        with torch.no_grad():
            found.append(model(**inputs, position_ids=positions).logits)
        fed = end
    return torch.cat(found[1:], dim=1)


@pytest.mark.parametrize("kind", ["static", "growing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_unpatched_model(family, kind, passes, monkeypatch, exact):
    if kind == "growing":  # on CUDA it is read by row bounds, elsewhere under a mask
        monkeypatch.setattr(GrowingStorage, "reads_by_bounds", lambda storage: True)
    model, (ids, mask) = make_model(family, dtype=torch.float64), text(3, 100, padding=(0, 40, 79))
    parts = (80, 2, 9, 9)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 80:]
    patch_model(model, "quest", token_budget=32)
    cache = SparseCache.for_model(model, max_cache_len=150 if kind == "static" else None)
    torch.testing.assert_close(logits_of_passes(model, ids, mask, parts, cache), expected, **ROUNDING)
    layers = model.config.num_hidden_layers
    assert [shape[2] for shape in passes] == [2] * layers + [9] * 2 * layers


def test_the_kernel_gives_the_same_logits(passes):
    model, (ids, mask) = make_model("llama", num_hidden_layers=2), text(2, 45, padding=(0, 7))
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 40:]
    patch_model(model, "oracle_topk", token_budget=16)
    cache = SparseCache.for_model(model, max_cache_len=64)
    with use_impl("triton"):
        found = logits_of_passes(model, ids, mask, (40, 5), cache)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(passes) == 2


@pytest.mark.parametrize(("parts", "used"), [((17, 6), False), ((18, 6), True), ((300, 65), False), ((1, 3), False)])
def test_a_few_tokens_of_a_long_row_attend_by_bounds(parts, used, passes):
    model, (ids, mask) = make_model("llama", num_hidden_layers=1), text(1, sum(parts))
    patch_model(model, "oracle_topk", token_budget=32, dense_layers=0)
    logits_of_passes(model, ids, mask, parts, SparseCache.for_model(model, max_cache_len=400))
    assert bool(passes) == used
