"""Models that are cast, get other modules, or share a configuration while they are patched."""

import pytest
import torch

from hf_sparse_attn import patch_model, sparse_attention_stats, unpatch_model
from tests.models import COVERING, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")
ROTATING = pytest.mark.parametrize("method_name", ["tokenselect", "infllm", "self_extend"])
WITH_OWN_ROPE = pytest.mark.parametrize("method_name", ["tokenselect", "infllm", "self_extend", "ntk"])


def _options(method_name):
    own = {"window": 400} if method_name == "self_extend" else COVERING.get(method_name, {})
    budget = {} if method_name in ("self_extend", "ntk", "squeezed") else {"token_budget": 512}
    return {**budget, **own, **({"n_local": 400} if method_name == "infllm" else {})}


def _model(dtype=torch.float64):
    return make_model("llama", dtype=dtype)


def _answer(model, ids):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)


@ROTATING
@pytest.mark.parametrize("begins", ["anew", "with the cache of an answer"])
def test_frequencies_rounded_by_a_cast_are_those_of_the_rotations(method_name, begins):
    """A cast rounds the frequencies for good, also if the model is cast back."""
    ids = random_ids(1, 150)
    model, stock = patch_model(_model(), method_name, **_options(method_name)), _model()
    cache = model(ids, use_cache=True).past_key_values
    before = stock(ids).logits
    for each in (model, stock):
        each.bfloat16().double()
    expected = stock(ids).logits
    assert (expected - before).abs().max() > 1e-3
    cache.reset()
    given = {"past_key_values": cache} if begins != "anew" else {}
    torch.testing.assert_close(model(ids, **given).logits, expected)
    assert torch.equal(_answer(model, ids), _answer(stock, ids))


@WITH_OWN_ROPE
def test_a_rotary_module_put_in_later_is_an_error(method_name):
    ids = random_ids(1, 60)
    model = patch_model(_model(), method_name, **_options(method_name))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).double()
    for inputs in ({}, {"use_cache": False}):
        with pytest.raises(ValueError, match=f"the rotary module .* replaced after patch_model.*{method_name!r}"):
            model(ids, **inputs)
    patch_model(model, "quest", token_budget=512)  # which leaves the rotation to the model
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).double()
    assert torch.equal(_answer(model, ids), _answer(_model(), ids))


@pytest.mark.parametrize("method_name", ["quest", "tokenselect"])
def test_a_decoder_put_in_later_is_an_error(method_name):
    ids = random_ids(1, 60)
    model = patch_model(_model(), method_name, token_budget=32)
    other = _model().model
    own, model.model = model.model, other
    with pytest.raises(ValueError, match="the decoder of this patched LlamaForCausalLM was replaced after patch_model"):
        _answer(model, ids)
    model.model = own
    _answer(model, ids)
    assert sparse_attention_stats(model).kv_fraction < 1


@pytest.mark.parametrize("method_name", ["quest", "tokenselect", "infllm", "self_extend", "ntk", "squeezed", "psa"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_does_not_matter(method_name, default):
    ids = random_ids(1, 100)
    expected = _answer(_model(torch.float32), ids)
    former = torch.get_default_dtype()
    model = _model(torch.float32)
    torch.set_default_dtype(default)
    try:
        patch_model(model, method_name, **_options(method_name))
        assert torch.equal(_answer(model, ids), expected)
    finally:
        torch.set_default_dtype(former)


@pytest.mark.parametrize("patched", [1, 2])
def test_unpatching_leaves_what_another_model_set_on_a_shared_configuration(patched):
    first = _model()
    second = type(first)(first.config).eval()
    assert second.config is first.config
    for model in (first, second)[:patched]:
        patch_model(model, "quest")
    second.config.use_cache = False
    second.config.output_hidden_states = True
    first.config.pad_token_id = 5
    for model in (second, first)[2 - patched :]:
        unpatch_model(model)
    assert first.config is second.config
    assert (first.config.use_cache, first.config.output_hidden_states) == (False, True)
    assert first.config.pad_token_id == 5
