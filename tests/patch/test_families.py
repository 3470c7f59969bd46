"""Every supported model type keeps the contract, and docs/families.json agrees with the code.

``python -m tests.families`` checks more methods than this file does, and writes docs/families.json.
"""

import json

import pytest
import torch
import transformers
from packaging.version import Version
from torch._dynamo.utils import counters
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_sparse_attn import METHODS, DecodeAhead, SparseCache, calibrate_channels, patch_model, sparse_attention
from hf_sparse_attn.methods import NTK
from hf_sparse_attn.patch import fused as fusing
from hf_sparse_attn.patch.families import ABSOLUTE, FAMILIES, REFUSED, UNKNOWN, Family, refusal
from hf_sparse_attn.patch.fused import fused
from hf_sparse_attn.patch.generation import is_step_one_graph
from hf_sparse_attn.patched import is_patched, layer_devices
from tests import real_weights
from tests.compared import ROUNDING
from tests.families import (
    BUDGET,
    IN_FLOAT32,
    RANDOM,
    RESULTS,
    always_sparse,
    covering,
    decode,
    decode_patched,
    difference,
    method_of,
    rehearsal,
    tiny_model,
    top_k,
    without_windows,
)
from tests.graph_tape import use_tape
from tests.models import COVERING
from tests.patch.test_patch import snapshot

HERE = [name for name in FAMILIES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
"""Supported model types that this version of Transformers has."""
ROTATING = [name for name in HERE if FAMILIES[name].rotation is None]
REHEARSING = [name for name in HERE if FAMILIES[name].rehearsal is None]
LIKE_LLAMA = [name for name in HERE if FAMILIES[name] == Family()]
UNLIKE = ["gemma3_text", "glm", "exaone4", "gpt_oss"]
"""RoPE by kind of layer, partial and interleaved RoPE, layers without it, and sinks, beside a sliding window."""


@pytest.mark.parametrize("model_type", sorted({"gpt2", "ctrl", "gpt_bigcode", "llama"} & set(HERE)))
def test_host_memory_and_saved_caches_whatever_the_decoder_calls_its_layers(model_type, tmp_path):
    model = tiny_model(model_type)
    layers = torch.device("cpu"), model.config.num_hidden_layers
    assert layer_devices(model) == [layers[0]] * layers[1]
    ids = torch.arange(2, 62)[None]
    arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for kv_storage in ("device", "host"):
        patch_model(model, "quest", token_budget=24, page_size=4, dense_layers=0, kv_storage=kv_storage)
        answer = model.generate(ids, **arguments, return_dict_in_generate=True)
        answer.past_key_values.save(tmp_path / kv_storage, model)
        loaded = SparseCache.load(tmp_path / kv_storage, model)
        assert loaded.get_seq_length() == 63
        found.append(model.generate(answer.sequences, **arguments, past_key_values=loaded))
    assert torch.equal(*found)


@pytest.mark.parametrize("model_type", HERE)
@torch.inference_mode()
def test_sparse_steps_equal_plain_attention_to_the_same_tokens(model_type):
    """In static and in growing buffers, behind left padding and a dense prefill."""
    model = tiny_model(model_type)
    assert top_k(model) == "equal"
    assert not is_patched(model)


@pytest.mark.parametrize("method_name", ["quest", "keycodes"])
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.grid] * (name not in UNLIKE)) for name in HERE]
)
@torch.inference_mode()
def test_a_budget_that_covers_everything_equals_the_stock_model(model_type, method_name):
    assert covering(tiny_model(model_type), method_name) == "equal"


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.grid] * (name in LIKE_LLAMA[4:])) for name in ROTATING]
)
@torch.inference_mode()
def test_keys_that_a_method_rotates(model_type):
    assert covering(without_windows(model_type), "tokenselect") == "equal"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a tape of a CPU's ops stands in for the graph")
@pytest.mark.parametrize("model_type", HERE)
@torch.inference_mode()
def test_steps_that_run_ahead_or_are_recorded(model_type, monkeypatch):
    tapes, model = use_tape(monkeypatch), without_windows(model_type)
    model.set_experts_implementation("batched_mm")  # as on a GPU: the tiny models' own makes the host wait
    results = []
    with sparse_attention(model, method_of("quest", BUDGET)):
        is_one_graph = is_step_one_graph(model)
        for custom in (None, DecodeAhead(), *[DecodeAhead(cuda_graph=True)] * is_one_graph):
            results.append(decode(model, SparseCache.for_model(model, RANDOM.max_cache_len), custom))
    assert [difference(result, results[0]) for result in results] == ["equal"] * len(results)
    assert len(tapes) == is_one_graph
    assert is_one_graph == (model_type not in ("aria_text", "ctrl"))


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.grid] * (name not in UNLIKE)) for name in HERE]
)
@torch.inference_mode()
def test_norms_and_rope_that_are_compiled_compute_the_same(model_type, monkeypatch):
    monkeypatch.setattr(fusing, "BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    model = tiny_model(model_type)
    with sparse_attention(model, method_of("quest", BUDGET)):
        expected = decode(model, SparseCache.for_model(model, RANDOM.max_cache_len))
        with fused(model):
            assert difference(decode(model, SparseCache.for_model(model, RANDOM.max_cache_len)), expected) == "equal"
    # Without RoPE nothing is left to compile: the norms of such families are torch's, one kernel each.
    assert (counters["stats"]["unique_graphs"] > 0) == (FAMILIES[model_type].other_rope != ABSOLUTE)
    assert not counters["graph_break"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a tape of a CPU's ops stands in for the graph")
@torch.inference_mode()
def test_a_step_that_makes_the_host_wait_is_not_recorded(monkeypatch):
    tapes, model = use_tape(monkeypatch), without_windows("mixtral")  # its experts' own implementation waits
    with sparse_attention(model, method_of("quest", BUDGET)):
        cache = SparseCache.for_model(model, RANDOM.max_cache_len)
        with pytest.raises(RuntimeError, match=r"cannot be recorded.*nonzero.*leave cuda_graph=True out"):
            decode(model, cache, DecodeAhead(cuda_graph=True))
        assert not tapes
        cache.reset()
        assert difference(decode(model, cache), decode(model)) == "equal"


@pytest.mark.parametrize("model_type", REHEARSING)
@torch.inference_mode()
def test_a_rehearsed_query_is_the_modules_own(model_type):
    assert rehearsal(tiny_model(model_type)) == "equal"


@pytest.mark.parametrize("method_name", [name for name, method in METHODS.items() if method.rotates_keys])
@pytest.mark.parametrize("model_type", ["cohere", "smollm3", "nanochat", "gpt2", "gpt_bigcode", "laguna"])
def test_methods_that_rotate_keys_are_refused(model_type, method_name):
    model = without_windows(model_type)
    with pytest.raises(ValueError, match=rf"'{method_name}' caches keys before RoPE .*'{model_type}'.*; use a method"):
        patch_model(model, method_name)
    assert not is_patched(model)


HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
"""A RoPE of the first half of each head's channels."""


WHOLE_HEADS = [name for name, method in METHODS.items() if method.rotates_keys or name == "ntk"]
"""Methods that have a RoPE of their own, which rotates whole heads."""


@pytest.mark.parametrize(
    "method_name", [name for name, method in METHODS.items() if name not in WHOLE_HEADS and not method.rehearses]
)
@torch.inference_mode()
def test_phi3_with_rope_of_half_of_each_head(method_name):
    model = tiny_model("phi3", **HALF)
    assert model.model.rotary_emb.inv_freq.shape == (4,)  # pairs of channels, of 16 channels
    check_covering(model, method_name)


@pytest.mark.parametrize(
    "method_name", [name for name, method in METHODS.items() if name not in WHOLE_HEADS and not method.rehearses]
)
@torch.inference_mode()
def test_laguna_whose_layers_have_different_numbers_of_query_heads(method_name):
    model = without_windows("laguna")
    assert [layer.self_attn.num_heads for layer in model.model.layers] == [4, 6, 2]
    check_covering(model, method_name)


@torch.inference_mode()
def test_a_file_of_channels_has_the_query_heads_of_each_layer(tmp_path):
    model, path = without_windows("laguna"), tmp_path / "channels.json"
    calibrate_channels(model, RANDOM.prompts["input_ids"][:1], path)
    method = METHODS["double_sparsity"](token_budget=256, channels=4, statistic="q", calibration=str(path))
    with always_sparse("double_sparsity"):
        assert difference(decode_patched(model, method, None), decode(model)) == "equal"


def check_covering(model, method_name):
    method = METHODS[method_name](**{"token_budget": 256, **COVERING.get(method_name, {})})
    rooms = (None,) if method.evicts or method_name == "squeezed" else (RANDOM.max_cache_len, None)
    expected = decode(model)
    with always_sparse(method_name):
        found = [difference(decode_patched(model, method, room), expected) for room in rooms]
    assert found == ["equal"] * len(found)


@pytest.mark.parametrize("method_name", WHOLE_HEADS)
def test_rope_of_half_of_each_head_is_refused_where_whole_heads_are_rotated(method_name):
    settings = {"self_extend": {"window": 128}, "ntk": {"factor": 2.0}}.get(method_name, {"token_budget": 128})
    model = tiny_model("phi3", **HALF)
    with pytest.raises(ValueError, match=rf"{method_name} rotates whole heads, .* covers 8 of head_dim=16"):
        patch_model(model, method_name, **settings)
    assert not is_patched(model)


@pytest.mark.parametrize("model_type", ["olmo2", "phi3", "phi"])
def test_rehearsal_is_refused(model_type):
    with pytest.raises(ValueError, match=rf"'infinigen' makes .*'{model_type}'\) does not allow: .*; use another"):
        patch_model(tiny_model(model_type), "infinigen")


@pytest.mark.parametrize("model_type", ["cohere", "smollm3", "nanochat"])
@torch.inference_mode()
def test_another_rope_where_keys_cannot_be_rotated_by_slot(model_type):
    model, method = tiny_model(model_type), NTK(factor=2.0)
    scaled = type(model)(method.rope_config(model.config)).double().eval()
    scaled.load_state_dict(model.state_dict())
    expected = decode(scaled)
    assert difference(decode_patched(model, method, None), expected) == "equal"
    assert difference(decode(model), expected) != "equal"


def test_another_rope_needs_one_of_whole_heads():
    with pytest.raises(ValueError, match=r"ntk scales one RoPE, but the layers of Gemma3ForCausalLM have different"):
        patch_model(tiny_model("gemma3_text"), "ntk")
    with pytest.raises(ValueError, match=r"ntk rotates whole heads, .* covers 8 of head_dim=16"):
        patch_model(tiny_model("phi"), "ntk")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_logit_softcapping": 30.0}, r"caps its attention scores \(attn_logit_softcapping=30.0\)"),
        ({"add_cross_attention": True}, r"attends to an encoder's output \(add_cross_attention=True\)"),
        ({"use_bidirectional_attention": True}, r"later tokens too \(use_bidirectional_attention=True\)"),
    ],
)
def test_settings_that_change_attention_are_refused(settings, message):
    model = tiny_model("gpt2" if "add_cross_attention" in settings else "gemma3_text", **settings)
    with pytest.raises(ValueError, match=message):
        patch_model(model)
    assert not is_patched(model)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "its latent attention has keys and values of different head dimensions"),
        ("gemma2", "its attention scores are capped"),
    ],
)
@torch.inference_mode()
def test_a_refused_model_is_told_why_and_stays_as_it_was(model_type, reason):
    model = tiny_model(model_type, head_dim=8)  # deepseek_v3's is that of its rotated channels
    ids = torch.arange(2, 42)[None]
    before, expected = snapshot(model), model(ids).logits
    message = rf"{type(model).__name__} \(model type '{model_type}'\) is not supported: {reason}.*; supported: llama"
    with pytest.raises(ValueError, match=message):
        patch_model(model, "quest")
    with pytest.raises(ValueError, match=message), sparse_attention(model, "keycodes"):
        pass
    assert not is_patched(model)
    assert snapshot(model) == before
    assert torch.equal(model(ids).logits, expected)


def test_an_argument_that_changes_the_softmax_is_refused():
    """Even if the list of families were wrong, a cap of the scores would not be left out silently."""
    model = patch_model(tiny_model("llama"), "quest", dense_layers=0)
    with pytest.raises(ValueError, match=r"LlamaAttention passes 'softcap' to its attention, which is not supported"):
        model(torch.ones(1, 4, dtype=torch.long), softcap=30.0)


@pytest.mark.parametrize("model_type", [name for name in IN_FLOAT32 if name in HERE])
@torch.inference_mode()
def test_a_stock_model_that_rounds_to_float32_is_as_close_as_that(model_type):
    model = tiny_model(model_type)
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    expected = model(ids).logits
    with sparse_attention(model, "quest", token_budget=128):
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=ROUNDING * float(expected.abs().max()))


def test_the_results_are_those_of_the_code():
    results = json.loads(RESULTS.read_text())
    assert list(results["supported"]) == sorted(FAMILIES)
    for model_type, found in results["supported"].items():
        family = FAMILIES[model_type]
        assert found.pop("sliding_window_layers") in (0, 1)
        assert found.pop("tokenselect") == (f"refused: {family.rotation}" if family.rotation else "equal"), model_type
        assert found.pop("infinigen") == (f"refused: {family.rehearsal}" if family.rehearsal else "equal"), model_type
        assert set(found.values()) == {"equal"}, model_type
    for model_type, found in results["refused"].items():
        assert found["reason"] == refusal(model_type) != UNKNOWN, model_type


def test_every_model_type_is_listed_once():
    """A type that came to Transformers after the version of the results has not been checked."""
    refused = [name for names in REFUSED.values() for name in names.split()]
    assert len(refused) == len(set(refused))
    assert not set(refused) & set(FAMILIES)
    results = json.loads(RESULTS.read_text())
    version = results.pop("versions")["transformers"]
    reasons = [found["reason"] for found in results["multimodal_refused"].values()]
    inside = {reason.split("'")[1] for reason in reasons if reason.startswith("its text decoder is of type")}
    recorded = {name for found in results.values() for name in found}
    assert set(results["refused"]) | set(results["multimodal_refused"]) | inside >= set(refused)
    assert set(refused) >= set(results["refused"])
    here = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if Version(transformers.__version__) <= Version(version):
        assert here <= recorded
    if transformers.__version__ == version:
        assert here == recorded


def test_published_weights_pass():
    for weights, found in json.loads(real_weights.RESULTS.read_text()).items():
        rotation = FAMILIES[found["model_type"]].rotation
        assert found["tokenselect"] == (f"refused: {rotation}" if rotation else "equal"), weights
        assert {found[name] for name in ("oracle_topk", "quest", "keycodes")} == {"equal"}, weights
