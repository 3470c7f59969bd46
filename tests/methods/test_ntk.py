"""NTK-aware RoPE against models that have it in their configuration, and what patching leaves behind."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_sparse_attn import (
    NTK,
    SparseCache,
    patch_model,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.rope import decoder_rotary, max_positions
from tests.models import DEVICE, FAMILIES, POSITIONS, make_model, random_ids

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
TRAINED, THETA, HEAD_DIM = 64, 10_000.0, 16
# On CUDA the stock model's kernels round otherwise than the package's, so that tokens are compared in float64 alone.
DTYPES = [torch.float64] if DEVICE == "cuda" else [torch.float64, torch.bfloat16]


def padded(longest):
    ids = random_ids(2, longest)
    mask = torch.ones_like(ids)
    mask[1, : longest // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def stock_twin(family, dynamic, factor, dtype):
    """A stock model of the same weights whose configuration has the setting."""
    if dynamic:
        rope, positions = {"rope_type": "dynamic", "factor": factor, "rope_theta": THETA}, TRAINED
    else:
        theta = THETA * factor ** (HEAD_DIM / (HEAD_DIM - 2))
        rope, positions = {"rope_type": "default", "rope_theta": theta}, int(TRAINED * factor)
    return make_model(family, dtype=dtype, rope_parameters=rope, max_position_embeddings=positions)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.grid) for family in FAMILIES if family != "llama")]
)
@torch.inference_mode()
def test_it_is_the_stock_model_with_the_setting(family, dynamic, dtype):
    """Within the trained length and beyond it, with padding; a short text after a long one too."""
    rope = {"rope_type": "default", "rope_theta": THETA}
    model = make_model(family, dtype=dtype, rope_parameters=rope, max_position_embeddings=TRAINED)
    before, own = dict(model.state_dict()), copy.deepcopy(model.config.rope_parameters)
    tokens = [model.generate(**padded(length), **GREEDY) for length in (40, 52)]
    patch_model(model, "ntk", factor=3, dynamic=dynamic)
    for length in (150, 40, 90):
        # A new twin for each text: the stock module of dynamic NTK never returns to a shorter text's frequencies.
        twin, inputs = stock_twin(family, dynamic, 3.0, dtype), padded(length)
        assert torch.equal(model.generate(**inputs, **GREEDY), twin.generate(**inputs, **GREEDY))
        expected = stock_twin(family, dynamic, 3.0, dtype)(**inputs).logits
        is_token = inputs["attention_mask"] == 1
        for use_cache in (True, False):
            actual = model(**inputs, use_cache=use_cache).logits
            torch.testing.assert_close(actual[is_token], expected[is_token])
    stats = sparse_attention_stats(model)
    assert stats.kv_bytes == stats.dense_bytes
    unpatch_model(model)
    assert model.config.rope_parameters == own
    assert model.config.max_position_embeddings == TRAINED
    for name, tensor in model.state_dict().items():
        assert tensor is before[name] or torch.equal(tensor, before[name])
    for length, expected in zip((40, 52), tokens, strict=True):
        assert torch.equal(model.generate(**padded(length), **GREEDY), expected)


@torch.inference_mode()
def test_the_models_rotary_module_keeps_its_buffers_and_follows_the_model():
    model, ids = make_model("llama", max_position_embeddings=TRAINED), random_ids(1, 100)
    rotary = decoder_rotary(model)
    buffers = {name: (buffer.data_ptr(), buffer.clone()) for name, buffer in rotary.named_buffers()}
    patch_model(model, "ntk", factor=2)
    model(ids)
    assert decoder_rotary(model) is rotary
    for name, buffer in rotary.named_buffers():
        address, values = buffers[name]
        assert buffer.data_ptr() == address
        assert torch.equal(buffer, values)
    assert not [name for name in model.state_dict() if "rope" in name or "inv_freq" in name]
    model.to(torch.bfloat16)  # rounds the frequencies, as it does those of a stock model
    rope = {"rope_type": "default", "rope_theta": THETA * 2 ** (HEAD_DIM / (HEAD_DIM - 2))}
    twin = make_model("llama", dtype=torch.bfloat16, rope_parameters=rope)
    assert torch.equal(model(ids).logits, twin(ids).logits)


@torch.inference_mode()
def test_two_models_that_share_a_configuration_do_not_share_the_setting():
    first = make_model("llama")
    second = LlamaForCausalLM(first.config).to(DEVICE).eval()
    ids = random_ids(1, 90)
    expected = second(ids).logits
    with sparse_attention(first, "ntk", factor=2):
        assert torch.equal(second(ids).logits, expected)
        with sparse_attention(second, "full"):
            torch.testing.assert_close(second(ids).logits, expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@torch.inference_mode()
def test_prompts_may_be_longer_by_the_factor(dynamic):
    model = make_model("llama", max_position_embeddings=TRAINED)
    method = NTK(factor=2.5, dynamic=dynamic)
    assert method.prompt_limit(model.config) == max_positions(method.rope_config(model.config)) == 160
    with sparse_attention(model, method):
        model(random_ids(1, 160))
        for use_cache in (True, False):
            with pytest.raises(ValueError, match=r"has 161 tokens, .* 64 positions .*extends them to 160 tokens"):
                model(random_ids(1, 161), use_cache=use_cache)


@torch.inference_mode()
def test_a_cache_of_other_rotations_cannot_be_forked():
    model = make_model("llama")
    dense = model(random_ids(1, 20), past_key_values=SparseCache(model.config, "full")).past_key_values
    with pytest.raises(ValueError, match=r"NTK\(.*\) rotates keys in another way than the cache of Full"):
        dense.fork("ntk")
    with sparse_attention(model, "ntk", factor=2):
        cache = model(random_ids(1, 20)).past_key_values
    with pytest.raises(ValueError, match=r"Quest.* rotates keys in another way"):
        cache.fork("quest")
    with pytest.raises(ValueError, match="rotates keys in another way"):
        cache.fork(NTK(factor=3))
    assert cache.fork(NTK(factor=2)).get_seq_length() == 20


@pytest.mark.parametrize("factor", [0.5, 0, -1, float("inf"), float("nan")])
def test_bad_factors_are_refused(factor):
    with pytest.raises(ValueError, match="factor must be a finite number, at least 1, got"):
        NTK(factor=factor)


def test_bad_types_and_scaled_models_are_refused():
    with pytest.raises(TypeError, match="factor must be a number, got '2'"):
        NTK(factor="2")
    with pytest.raises(TypeError, match="dynamic must be True or False, got 1"):
        NTK(dynamic=1)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": THETA, "original_max_position_embeddings": POSITIONS // 4}
    with pytest.raises(ValueError, match="the model's is scaled already: rope_type='yarn'; supported: 'default'"):
        patch_model(make_model("llama", rope_parameters=rope), "ntk")
