"""Uncompiled decode steps that repeat what the ops have checked skip the checks; others do not."""

from collections import Counter

import hf_sparse_attn_kernels
import pytest
import torch

from hf_sparse_attn import SparseCache, patch_model
from tests.models import make_model, random_ids

LAYERS = 4


@pytest.fixture
def checks(monkeypatch):
    """Number of checks of arguments, by op."""
    seen = Counter()

    def watch(name, dispatch):
        def check(*arguments, **options):
            seen[name] += 1
            return stock(*arguments, **options)

        stock = dispatch.check
        monkeypatch.setattr(dispatch, "check", check)

    for name, op in vars(hf_sparse_attn_kernels).items():
        if hasattr(op, "dispatch"):
            watch(name, op.dispatch)
    return seen


@pytest.fixture
def model():
    return patch_model(make_model("llama", num_hidden_layers=LAYERS), "quest", token_budget=48, page_size=16)


@torch.no_grad()
def checked(model, cache, checks, token):
    """The ops that one step checks."""
    checks.clear()
    model(token, past_key_values=cache)
    return dict(checks)


@torch.no_grad()
@pytest.mark.parametrize("capacity", [None, 400], ids=["growing", "static"])
def test_the_first_step_of_a_cache_is_checked(model, checks, capacity):
    cache = SparseCache.for_model(model, max_cache_len=capacity)
    model(random_ids(2, 100), past_key_values=cache)
    first = checked(model, cache, checks, random_ids(2, 1))
    assert first["append_and_attend"] == LAYERS - 2  # the first two layers are dense
    for _ in range(40):  # buffers grow
        assert checked(model, cache, checks, random_ids(2, 1)) == {}
    cache.crop(-3)
    cache.batch_select_indices(torch.tensor([1]))
    assert checked(model, cache, checks, random_ids(1, 1))["append_and_attend"] == LAYERS - 2  # another batch size
    assert checked(model, cache, checks, random_ids(1, 1)) == {}
    fork = cache.fork(cache.method)
    assert checked(model, fork, checks, random_ids(1, 1))["append_and_attend"] == LAYERS - 2


@torch.no_grad()
def test_the_first_sparse_step_after_dense_ones_is_checked(model, checks):
    cache = SparseCache.for_model(model)
    model(random_ids(1, 45), past_key_values=cache)
    dense = [checked(model, cache, checks, random_ids(1, 1)) for _ in range(3)]
    assert all("append_and_attend" not in ops for ops in dense)
    assert checked(model, cache, checks, random_ids(1, 1)) == {"append_and_attend": LAYERS - 2}


@torch.no_grad()
def test_a_step_whose_queries_have_another_dtype(model):
    """They are cast to the cache's, and what comes out is cast back."""
    cache = SparseCache.for_model(model)
    model(random_ids(1, 100), past_key_values=cache)
    for _ in range(2):
        model(random_ids(1, 1), past_key_values=cache)
    attention, token = model.model.layers[3].self_attn, random_ids(1, 1)
    expected = model(token, past_key_values=cache).logits
    cache.crop(-1)
    dtypes = []
    attention.q_proj.register_forward_hook(lambda module, args, output: output.double())
    attention.o_proj.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype) or (args[0].float(),))
    torch.testing.assert_close(model(token, past_key_values=cache).logits, expected)
    assert dtypes == [torch.float64]


@torch.no_grad()
def test_a_step_after_a_failed_one_is_checked(model, checks):
    cache = SparseCache.for_model(model)
    model(random_ids(1, 100), past_key_values=cache)
    checked(model, cache, checks, random_ids(1, 1))
    stop = model.model.layers[3].mlp.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(random_ids(1, 1), past_key_values=cache)
    stop.remove()
    assert checked(model, cache, checks, random_ids(1, 1)) == {"append_and_attend": LAYERS - 2}
