"""Models that read text and images: their text decoder is sparse, and the rest of them is the stock model's.

``python -m tests.families`` checks every image-text model of Transformers, and writes docs/families.json.
"""

import copy
import json
import re

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hf_sparse_attn import (
    METHODS,
    DecodeAhead,
    SelfSpeculation,
    SparseCache,
    patch_model,
    prepare_context,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.patch import generation
from hf_sparse_attn.patch.chunked import check_sliceable
from hf_sparse_attn.patch.families import DECODERS, FAMILIES, MULTIMODAL, REFUSED, refusal
from hf_sparse_attn.patch.generation import is_step_one_graph
from hf_sparse_attn.patch.patch import IMPLEMENTATIONS
from hf_sparse_attn.patched import is_patched, patched_method, text_model
from tests.compared import BUDGET, always_sparse, difference, greedy, method_of
from tests.families import RESULTS
from tests.graph_tape import use_tape
from tests.multimodal import (
    COVERING,
    IMAGE_TOKEN,
    compiled,
    covering,
    family_of,
    for_compilation,
    image_prompts,
    text_prompts,
    tiny_multimodal,
    without_windows,
)

HERE = [name for name in MULTIMODAL if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
"""Supported model types that this version of Transformers has."""
UNLIKE = ["gemma3", "llava", "qwen2_5_vl"]
"""An image whose tokens see each other, one like text, and one with three positions a token."""
OWN_ROPE = [name for name in HERE if family_of(name).other_rope]
"""Types whose RoPE no method can replace."""

models = pytest.mark.parametrize("model_type", UNLIKE)


def prompts_of(kind, model):
    return text_prompts() if kind == "text" else image_prompts(model)


@pytest.mark.parametrize("kind", ["text", "image"])
@pytest.mark.parametrize("method_name", ["quest", "keycodes"])
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.grid] * (name not in UNLIKE)) for name in HERE]
)
@torch.inference_mode()
def test_a_budget_that_covers_everything_equals_the_stock_model(model_type, method_name, kind):
    """In a batch with left padding, in the cache that ``generate()`` makes."""
    model = tiny_multimodal(model_type)
    assert covering(model, method_name, prompts_of(kind, model)) == "equal"
    assert not is_patched(model)


@pytest.mark.parametrize("kind", ["text", "image"])
@torch.inference_mode()
def test_keys_that_a_method_rotates(kind):
    model = without_windows("llava")
    assert covering(model, "tokenselect", prompts_of(kind, model)) == "equal"


@pytest.mark.parametrize("text_type", ["mistral", "qwen2"])
@torch.inference_mode()
def test_another_text_decoder(text_type):
    model = tiny_multimodal("llava", {"model_type": text_type})
    assert text_model(model).config.model_type == text_type
    assert covering(model, "quest", image_prompts(model)) == "equal"


@models
@torch.inference_mode()
def test_images_matter_to_these_prompts(model_type):
    """The comparisons above would not see a patch that loses the image, or the mask of its tokens, if they did not."""
    model = tiny_multimodal(model_type)
    prompts = image_prompts(model)
    expected = greedy(model, prompts)
    others = [{**prompts, "pixel_values": -prompts["pixel_values"]}]
    others += [{name: value for name, value in prompts.items() if "type_ids" not in name}] * (model_type == "gemma3")
    for other in others:
        assert difference(greedy(model, other), expected) != "equal"


@models
@torch.inference_mode()
def test_a_static_cache(model_type):
    """Its steps are not compiled on a CPU."""
    model = tiny_multimodal(model_type)
    prompts = image_prompts(model)
    expected = greedy(model, prompts)
    with always_sparse("quest"), sparse_attention(model, method_of("quest", COVERING)):
        assert difference(greedy(model, prompts, cache_implementation="static"), expected) == "equal"
        cache = SparseCache.for_model(model, max_cache_len=96)
        assert difference(greedy(model, prompts, past_key_values=cache), expected) == "equal"


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.grid] * (name not in UNLIKE)) for name in HERE]
)
@torch.inference_mode()
def test_compiled_steps(model_type, dynamo):
    """If those of the stock model are: some types say that their code cannot be compiled as one graph.

    Prompts with images have one more graph at most, since the model then has more arguments.
    """
    model, graphs = for_compilation(model_type), []
    with sparse_attention(model, method_of("quest", COVERING)):
        one = int(is_step_one_graph(model))
    for prompts in [text_prompts(), image_prompts(model)] * 2:
        assert compiled(model, prompts) == ("equal" if one else "not one graph")
        graphs.append(dynamo["stats"]["unique_graphs"])
    assert graphs[0] == one
    assert graphs[1] in (one, 2 * one)
    assert graphs[2:] == [graphs[1]] * 2
    assert not dynamo["graph_break"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a tape of a CPU's ops stands in for the graph")
@pytest.mark.parametrize("fuse", [False, True], ids=["as it is", "fused"])
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.grid] * (name not in UNLIKE)) for name in HERE]
)
@torch.inference_mode()
def test_recorded_steps(model_type, fuse, monkeypatch, dynamo):
    tapes, model = use_tape(monkeypatch), for_compilation(model_type)
    prompts, recorded = image_prompts(model), {"cache_implementation": "static"}
    with sparse_attention(model, method_of("keycodes", BUDGET)):
        expected = greedy(model, prompts)
        recorded["custom_generate"] = DecodeAhead(cuda_graph=True, fuse=fuse)
        if not is_step_one_graph(model):
            with pytest.raises(ValueError, match=r"cuda_graph=True is not supported by this .*needs the host"):
                greedy(model, prompts, **recorded)
            return
        assert difference(greedy(model, prompts, **recorded), expected) == "equal"
    assert len(tapes) == 1
    assert (dynamo["stats"]["unique_graphs"] > 0) == fuse


@models
@torch.inference_mode()
def test_which_steps_are_one_graph(model_type, monkeypatch):
    with sparse_attention(tiny_multimodal(model_type), "quest") as model:
        for version, expected in (("5.22.1", False), ("5.23.0", True), ("5.24.0.dev0", True)):
            monkeypatch.setattr(generation.transformers, "__version__", version)
            assert is_step_one_graph(model) == expected


@models
@torch.inference_mode()
def test_a_small_budget_reads_less(model_type):
    model = tiny_multimodal(model_type)
    prompts = image_prompts(model)
    expected = greedy(model, prompts)
    with sparse_attention(model, method_of("keycodes", BUDGET)):
        sparse = greedy(model, prompts)
        stats = sparse_attention_stats(model)
    assert 0 < stats.kv_fraction < 1
    assert difference(sparse, expected) != "equal"


@models
@torch.inference_mode()
def test_loops_of_the_packages_own(model_type):
    model = tiny_multimodal(model_type)
    prompts = image_prompts(model)
    dense = greedy(model, prompts)
    with sparse_attention(model, method_of("quest", BUDGET)):
        sparse = greedy(model, prompts)
        assert difference(greedy(model, prompts, custom_generate=DecodeAhead()), sparse) == "equal"
        assert difference(greedy(model, prompts, custom_generate=SelfSpeculation()), dense) == "equal"


@models
@torch.inference_mode()
def test_beams_and_another_turn(model_type):
    model = tiny_multimodal(model_type)
    prompts = image_prompts(model)

    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def turns():
        first = model.generate(**prompts, **settings, max_new_tokens=4, return_dict_in_generate=True)
        more = torch.randint(2, IMAGE_TOKEN, (2, 20), generator=torch.Generator().manual_seed(6))
        ids = torch.cat([first.sequences, more], dim=1)
        new = ids.shape[1] - prompts["input_ids"].shape[1]
        mask = torch.cat([prompts["attention_mask"], torch.ones(2, new, dtype=torch.long)], dim=1)
        return greedy(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=first.past_key_values)

    def beams():
        return model.generate(**prompts, **settings, num_beams=3, max_new_tokens=5)

    answers, found = turns(), beams()
    with always_sparse("quest"), sparse_attention(model, method_of("quest", COVERING)):
        assert difference(turns(), answers) == "equal"
        assert torch.equal(beams(), found)


@models
@torch.inference_mode()
def test_a_forward_pass_of_the_whole_model_or_of_its_base(model_type):
    model = tiny_multimodal(model_type)
    prompts = image_prompts(model)
    expected = model(**prompts).logits
    with sparse_attention(model, "quest"):
        output = model(**prompts)
        assert isinstance(output.past_key_values, SparseCache)
        torch.testing.assert_close(output.logits, expected)
        torch.testing.assert_close(model(**prompts, use_cache=False).logits, expected)
        with pytest.raises(TypeError, match="must be a SparseCache for a patched model, got DynamicCache"):
            model(**prompts, past_key_values=DynamicCache(config=model.config))
    hidden = model.model(**prompts).last_hidden_state
    with sparse_attention(model.model, "quest"):
        torch.testing.assert_close(model.model(**prompts).last_hidden_state, hidden)


@models
def test_unpatching_restores_the_model_and_its_configurations(model_type):
    model = tiny_multimodal(model_type)
    sibling, held = copy.copy(model), model.config.get_text_config()
    configs = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    contents = {name: dict(vars(config)) for name, config in configs.items()}
    assert patch_model(model, "quest") is model
    assert is_patched(model)
    assert patched_method(model) == METHODS["quest"]()
    assert model.config.get_text_config()._attn_implementation in IMPLEMENTATIONS
    assert text_model(model).config is model.config.get_text_config() is not held
    assert held._attn_implementation == sibling.config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"
    patch_model(model, "keycodes")
    assert unpatch_model(model) is model
    assert not is_patched(model)
    assert not text_model(model)._forward_pre_hooks
    assert not text_model(model)._forward_hooks
    assert not {"_prepare_cache_for_generation", "init_continuous_batching"} & set(vars(model))
    after = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    assert all(after[name] is config for name, config in configs.items())
    assert {name: dict(vars(config)) for name, config in after.items()} == contents


@torch.inference_mode()
def test_a_change_of_the_attention_implementation_is_noticed_and_kept():
    model = patch_model(tiny_multimodal("llava"), "quest")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="of this patched LlavaForConditionalGeneration was set to 'eager'"):
        greedy(model, text_prompts())
    unpatch_model(model)
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "eager"


@torch.inference_mode()
def test_a_saved_cache(tmp_path):
    model, prompts = tiny_multimodal("llava"), text_prompts()
    with sparse_attention(model, method_of("quest", COVERING)):
        cache = SparseCache.for_model(model)
        expected = greedy(model, prompts, past_key_values=cache)
        cache.crop(-10)
        cache.save(tmp_path / "cache.safetensors", model)
        loaded = SparseCache.load(tmp_path / "cache.safetensors", model)
        assert difference(greedy(model, prompts, past_key_values=loaded), expected) == "equal"


@pytest.mark.parametrize("method_name", [name for name, method in METHODS.items() if method.rotates_keys] + ["ntk"])
@pytest.mark.parametrize("model_type", OWN_ROPE)
def test_methods_with_a_rope_of_their_own_are_refused(model_type, method_name):
    model, family = without_windows(model_type), family_of(model_type)
    why = re.escape(family.other_rope if METHODS[method_name].changes_rope else family.rotation)
    with pytest.raises(ValueError, match=rf"'{method_name}' .*\(model type '{model_type}', .*: {why}; use"):
        patch_model(model, method_name)
    assert not is_patched(model)


def test_three_positions_a_token_are_refused_by_rehearsal():
    with pytest.raises(ValueError, match=r"'infinigen' makes .*Qwen2_5_VLForConditionalGeneration .*three positions"):
        patch_model(tiny_multimodal("qwen2_5_vl"), "infinigen")


@pytest.mark.parametrize("method_name", ["h2o", "minference", "snapkv"])
@torch.inference_mode()
def test_tokens_that_see_later_ones_need_a_dense_prefill(method_name):
    model = tiny_multimodal("gemma3")
    with sparse_attention(model, method_name):
        greedy(model, text_prompts())
        with pytest.raises(ValueError, match=r"not causal .* a method whose prefill is dense"):
            greedy(model, image_prompts(model))


@torch.inference_mode()
def test_tokens_that_see_later_ones_need_a_mask():
    model = tiny_multimodal("gemma3", {"layer_types": ["full_attention"] * 3})
    with sparse_attention(model, "squeezed"):
        greedy(model, text_prompts())
        with pytest.raises(ValueError, match=r"attention to later tokens of an image.*use another method"):
            greedy(model, image_prompts(model))


@torch.inference_mode()
def test_tokens_that_see_later_ones_come_first():
    model = tiny_multimodal("gemma3")
    prompts = image_prompts(model)
    ids = prompts["input_ids"]
    with sparse_attention(model, "quest"):
        cache = model(torch.ones_like(ids)).past_key_values
        both = {
            "attention_mask": torch.ones(2, 2 * ids.shape[1], dtype=torch.long),
            "token_type_ids": torch.cat([torch.zeros_like(ids), prompts["token_type_ids"]], dim=1),
        }
        with pytest.raises(ValueError, match=r"not causal .* in the first pass over a cache"):
            model(**{**prompts, **both}, past_key_values=cache)
        assert cache.length == ids.shape[1]


def test_a_decoder_is_patched_once():
    model = tiny_multimodal("llava")
    inner = patch_model(model, "quest").model.language_model
    with pytest.raises(ValueError, match=r"decoder of this LlamaModel is patched already, .*LlavaForConditional"):
        patch_model(inner)
    unpatch_model(model)
    patch_model(inner, "quest")
    with pytest.raises(ValueError, match=r"decoder of this LlavaForConditionalGeneration is patched already"):
        patch_model(model)
    assert not is_patched(model)
    unpatch_model(inner)


def test_what_multimodal_models_do_not_support_is_refused():
    model = tiny_multimodal("llava")
    with pytest.raises(ValueError, match=r"prepare_context does not support multimodal models, got LlavaForCond"):
        prepare_context(model, torch.ones(1, 100, dtype=torch.long))
    with pytest.raises(ValueError, match="in training mode"):
        patch_model(model.train())
    assert not is_patched(model)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("paligemma", r"PaliGemma\w+ \(model type 'paligemma'\) is not supported: its tokens attend to later ones"),
        ("qwen3_5", r"model type 'qwen3_5'\) is not supported: some of its layers keep a state"),
        ("lfm2_vl", r"model type 'lfm2_vl'\) is not supported: its text decoder is of type 'lfm2': some of its layers"),
        ("kosmos-2", r"model type 'kosmos-2'\) is not supported: its text decoder .*: it has not been checked"),
    ],
)
def test_a_refusal_names_the_model_and_the_reason(model_type, message):
    model = tiny_multimodal(model_type)
    with pytest.raises(ValueError, match=message):
        patch_model(model)
    assert not is_patched(model)


def test_a_refusal_names_images_that_were_not_checked(monkeypatch):
    model = tiny_multimodal("llava")
    monkeypatch.setattr(type(model.config), "model_type", "fast_vlm")  # a FastVLM itself needs another package
    with pytest.raises(
        ValueError, match=r"'fast_vlm'\) is not supported: its prompts with images have not been checked"
    ):
        patch_model(model)
    assert not is_patched(model)


def test_a_text_decoder_that_is_not_supported():
    with pytest.raises(ValueError, match=r"'llava'\) is not supported with a text decoder of model type 'gemma2': its"):
        patch_model(tiny_multimodal("llava", {"model_type": "gemma2"}))


def test_arguments_of_each_token_are_not_cut_silently():
    ids = torch.ones(2, 30, dtype=torch.long)
    check_sliceable({"input_ids": ids, "attention_mask": ids, "deepstack": [ids]}, 30, "a prompt in chunks")
    with pytest.raises(ValueError, match=r"a prompt in chunks does not support .*'visual_pos_masks'.*\(2, 30\)"):
        check_sliceable({"input_ids": ids, "visual_pos_masks": ids > 0}, 30, "a prompt in chunks")


def test_the_results_are_those_of_the_code():
    results = json.loads(RESULTS.read_text())
    assert list(results["multimodal"]) == sorted(MULTIMODAL)
    for model_type, found in results["multimodal"].items():
        family = (FAMILIES | DECODERS)[found.pop("text_decoder")]
        assert found.pop("compiled") in ("equal", "not one graph"), model_type
        assert found.pop("tokenselect") == (f"refused: {family.rotation}" if family.rotation else "equal"), model_type
        assert set(found.values()) == {"equal"}, model_type
    for model_type, found in results["multimodal_refused"].items():
        own = refusal(model_type)
        assert found["reason"].startswith("its text decoder is of type") or found["reason"] == own, model_type
    names = {name for names in REFUSED.values() for name in names.split()}
    assert not names & set(MULTIMODAL)
    assert not set(MULTIMODAL) & set(FAMILIES)
