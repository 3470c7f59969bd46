"""PEFT adapters around patched models, and patching of models with adapters."""

import json

import peft
import pytest
import torch

from hf_sparse_attn import (
    DecodeAhead,
    SelfSpeculation,
    SparseCache,
    patch_model,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.patched import is_patched, patched_method
from tests.tools.checks import GREEDY, check_tool, covers_all, exact_model, padded_batch, small, sparse_methods

PEFT_CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "adaption": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=6, encoder_hidden_size=32),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
}
IN_THE_MODEL = ("lora", "ia3", "adaption")
IN_THE_PROMPT = ("prompt", "p-tuning", "prefix")


def wrap(peft_type, model=None):
    """Add a random adapter, the same for every model."""
    model = exact_model() if model is None else model
    torch.manual_seed(1)
    return peft.get_peft_model(model, PEFT_CONFIGS[peft_type]()).double().eval()


def one_prompt():
    return {name: tensor[1:] for name, tensor in padded_batch().items()}


@pytest.mark.parametrize(
    ("peft_type", "method_name"),
    [
        (peft_type, method_name)
        for peft_type in PEFT_CONFIGS
        for method_name in ("full", "quest", "tokenselect")
        if (peft_type, method_name) != ("prefix", "tokenselect")
    ],
)
def test_a_peft_model_is_patched_through_its_base_model(peft_type, method_name):
    model = wrap(peft_type)
    prompt = padded_batch() if peft_type in IN_THE_MODEL else one_prompt()
    expected = model.generate(**prompt, **GREEDY)
    assert patch_model(model, method_name, **covers_all(method_name)) is model
    assert is_patched(model)
    assert is_patched(model.get_base_model())
    assert torch.equal(model.generate(**prompt, **GREEDY), expected)
    assert sparse_attention_stats(model).decode_steps == 7
    assert SparseCache.for_model(model).method is patched_method(model)
    unpatch_model(model)
    assert torch.equal(model.generate(**prompt, **GREEDY), expected)


@sparse_methods
@pytest.mark.parametrize("peft_type", ["lora", "prompt"])
def test_a_peft_model_decodes_sparsely(peft_type, method_name):
    model, prompt = wrap(peft_type), one_prompt()
    check_tool(lambda: model.generate(**prompt, **GREEDY), model, method_name)


@sparse_methods
def test_a_patched_model_can_be_wrapped(method_name, tmp_path):
    prompt = padded_batch()
    dense = exact_model().generate(**prompt, **GREEDY)
    expected = wrap("lora").generate(**prompt, **GREEDY)
    assert not torch.equal(dense, expected)
    model = wrap("lora", patch_model(exact_model(), method_name, **covers_all(method_name)))
    assert torch.equal(model.generate(**prompt, **GREEDY), expected)
    with model.disable_adapter():
        assert torch.equal(model.generate(**prompt, **GREEDY), dense)
    assert sparse_attention_stats(model).decode_steps == 7
    model.save_pretrained(tmp_path)
    assert "hf_sparse_attn" not in json.dumps(json.loads((tmp_path / "adapter_config.json").read_text()))


@sparse_methods
@pytest.mark.parametrize("is_patched_first", [True, False])
def test_merging_adapters(is_patched_first, method_name):
    prompt, model = padded_batch(), wrap("lora")
    expected = model.generate(**prompt, **GREEDY)
    if is_patched_first:
        patch_model(model, method_name, **small(method_name))
    merged = model.merge_and_unload()
    assert is_patched(merged) is is_patched_first
    if is_patched_first:
        unpatch_model(merged)
    check_tool(lambda: merged.generate(**prompt, **GREEDY), merged, method_name)
    assert torch.equal(merged.generate(**prompt, **GREEDY), expected)


@sparse_methods
def test_transformers_own_adapters(method_name):
    model, prompt = exact_model(), padded_batch()
    dense = model.generate(**prompt, **GREEDY)
    torch.manual_seed(1)
    model.add_adapter(PEFT_CONFIGS["lora"]())
    model.eval()
    assert not torch.equal(model.generate(**prompt, **GREEDY), dense)
    check_tool(lambda: model.generate(**prompt, **GREEDY), model, method_name)


@pytest.mark.parametrize("peft_type", IN_THE_PROMPT)
def test_learned_tokens_stand_before_the_padding_of_a_batch(peft_type):
    model = wrap(peft_type)
    patch_model(model, "quest", **small("quest"))
    with pytest.raises(ValueError, match="if a PEFT model puts learned tokens before the padding, use prompts"):
        model.generate(**padded_batch(), **GREEDY)
    model.generate(**one_prompt(), **GREEDY)
    assert sparse_attention_stats(model).kv_fraction < 1


def test_a_learned_prefix_is_refused_where_keys_are_cached_before_rope():
    """RoPE has no positions for a learned prefix's keys."""
    model = wrap("prefix")
    with pytest.raises(ValueError, match=r"'tokenselect' caches keys before RoPE, .* with a learned prefix"):
        patch_model(model, "tokenselect", **small("tokenselect"))
    assert not is_patched(model)


@pytest.mark.parametrize("method_name", ["streaming_llm", "tova", "snapkv", "duo_attention"])
def test_a_learned_prefix_is_evicted_like_other_tokens(method_name):
    model, prompt = wrap("prefix"), one_prompt()
    check_tool(lambda: model.generate(**prompt, **GREEDY), model, method_name)


def test_a_learned_prefix_is_refused_where_weights_are_added_up():
    model = wrap("prefix")
    with pytest.raises(ValueError, match=r"'h2o' adds up the attention weights of every query, and a learned prefix"):
        patch_model(model, "h2o", **small("h2o"))
    assert not is_patched(model)


def test_a_learned_prefix_for_a_model_that_was_patched_before():
    model = wrap("prefix", patch_model(exact_model(), "quest", **covers_all("quest")))
    with pytest.raises(TypeError, match=r"got DynamicCache; .* prefix tuning, patch the PEFT model"):
        model.generate(**one_prompt(), **GREEDY)
    expected = unpatch_model(model).generate(**one_prompt(), **GREEDY)
    patch_model(model, "quest", **covers_all("quest"))
    assert torch.equal(model.generate(**one_prompt(), **GREEDY), expected)


@pytest.mark.parametrize("loop", [DecodeAhead(), SelfSpeculation(4)])
def test_a_learned_prefix_is_refused_by_loops_of_the_package(loop):
    model = patch_model(wrap("prefix"), "quest", **covers_all("quest"))
    with pytest.raises(ValueError, match=r"does not support PEFT's prefix tuning"):
        model.generate(**one_prompt(), max_new_tokens=3, custom_generate=loop)


@pytest.mark.parametrize("peft_type", IN_THE_PROMPT)
def test_learned_tokens_are_not_cut_into_chunks(peft_type):
    model = patch_model(wrap(peft_type), "quest", **covers_all("quest"))
    with pytest.raises(ValueError, match=r"prefill_chunk_size is not supported by PEFT's prompt learning"):
        model.generate(**one_prompt(), max_new_tokens=3, prefill_chunk_size=5)
