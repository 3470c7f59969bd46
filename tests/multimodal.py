"""Comparison of patched with stock models that read text and images.

``python -m tests.families`` runs it for every image-text model that Transformers has, and writes docs/families.json.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hf_sparse_attn import METHODS, sparse_attention, sparse_attention_stats
from hf_sparse_attn.patch.families import DECODERS, FAMILIES, Family, refusal
from hf_sparse_attn.patch.generation import is_step_one_graph
from hf_sparse_attn.patched import text_model
from tests.compared import (
    ALL_FULL,
    COVERED,
    OVERRIDES,
    PROMPTS,
    TINY,
    always_sparse,
    answer,
    compile_config,
    difference,
    greedy,
    method_of,
    random_model,
    taken,
)

COVERING = 256
"""A budget for every token of a prompt and its answer."""
IMAGE_TOKEN = 90
IMAGE_START = 91
"""Comes before the tokens of an image. Qwen-VL counts images by it when it repeats a prompt."""
NO_WINDOW = {"sliding_window": None, "use_sliding_window": False}

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "out_hidden_size": TINY["hidden_size"],
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
}
"""Settings of a tiny encoder of images; a configuration takes those that it has."""
_SAM = {
    "hidden_size": 32,
    "output_channels": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
    "global_attn_indexes": [1],
    "window_size": 2,
    "mlp_dim": 32,
    "downsample_channels": [32, 32],
}
_LAYERS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": TINY["hidden_size"]},
    "molmo2": {
        "vision_feature_layer": [-1, -2],
        "image_size": [28, 28],
        "head_dim": 16,
        "text_hidden_size": TINY["hidden_size"],
    },
    "deepseek_ocr2": {"sam_config": _SAM, "encoder_config": {**_LAYERS, "num_key_value_heads": 2, "vocab_size": 16}},
    "deepseek_vl_hybrid": _SAM,
    "granite_docling": {"scale_factor": 2, "deepstack_visual_indexes": [0]},
    "muse_spark": {"patch_sizes": [16, 6], "hidden_sizes": [16, 16], "depths": [1, 1]},
    "ovis2": {"vocab_size": 16},
    "apertus1p5": {
        "codebook_size": 16,
        "codebook_dim": 32,
        "latent_channels": 32,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "resolution": 8,
        "num_filters": 4,
    },
    "janus": {
        "projection_dim": TINY["hidden_size"],
        "image_token_embed_dim": 32,
        "base_channels": 32,
        "num_image_tokens": 4,
        "latent_channels": 32,
        "num_embeddings": 16,
    },
}
"""Settings of encoders, where a model needs others."""


def _sections(*pairs: int) -> dict[str, Any]:
    """Return settings of a RoPE that rotates so many pairs of channels by time, by height and by width."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(pairs)}
    return {"rope_parameters": rope, "use_sliding_window": True}


_MROPE = (
    *("cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga", "hunyuan_vl", "paddleocr_vl"),
    *("qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
)
_MROPE_WITH_EXPERTS = ("qwen3_omni_moe_thinker", "qwen3_vl_moe")
TEXT: dict[str, dict[str, Any]] = {
    **{name: _sections(2, 3, 3) for name in _MROPE},
    **{name: {**_sections(2, 3, 3), **ALL_FULL} for name in _MROPE_WITH_EXPERTS},
    "ernie4_5_vl_moe": {
        **_sections(3, 3, 2),
        "moe_intermediate_size": [32, 32],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_experts_per_tok": 2},
    "step3p7": {"num_sliding_attention_heads": 6},
    "glm4v_moe": _sections(1, 1, 2),  # half of each head rotates
}
"""Settings of text decoders, beside those of their model types."""
OUTER: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 40, "audio_token_offset": 56},
    "ovis2": {
        "hidden_size": TINY["hidden_size"],
        "vocab_size": TINY["vocab_size"],
        "visual_indicator_token_ids": [92, 93, 94, 95, 96],
    },
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "muse_spark": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "llava_next": {"image_grid_pinpoints": [[28, 28]]},
    "llava_next_video": {"image_grid_pinpoints": [[28, 28]]},
    "llava_onevision": {"image_grid_pinpoints": [[28, 28]]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "llava": {"vision_feature_select_strategy": "default", "vision_feature_layer": -1},
    "qwen2_5_omni_thinker": {"vision_start_token_id": IMAGE_START},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": IMAGE_START},
}
"""Settings of the models themselves, beside those of their texts and images."""


def tiny_multimodal(model_type: str, text: dict[str, Any] | None = None) -> PreTrainedModel:
    """Create a random multimodal model in float64, as :func:`tests.compared.random_model` does.

    Parameters
    ----------
    model_type
        A model type of Transformers' list of image-text models.
    text
        Settings of the text decoder's configuration; ``model_type`` among them names another decoder.

    Raises
    ------
    ValueError
        The model would not be tiny.
    """
    config_class, text = CONFIG_MAPPING[model_type], dict(text or {})
    default, parts = config_class(), {}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is None:
            continue
        if part is default.get_text_config(decoder=True):
            part = CONFIG_MAPPING[text.pop("model_type")]() if "model_type" in text else part
            wanted = {**TINY, **OVERRIDES.get(part.model_type, {}), **TEXT.get(model_type, {}), **text}
            if not set(getattr(part, "layer_types", None) or []) <= set(TINY["layer_types"]):
                del wanted["layer_types"]  # it has layers of other kinds
        else:
            wanted = {**VISION, **ENCODERS.get(model_type, {})}
        parts[name] = type(part)(**taken(part, wanted))
    names = ("image_token_id", "image_token_index")
    tokens = {name: IMAGE_TOKEN for name in names if hasattr(default, name)}
    if hasattr(default, "vision_start_token_id"):
        tokens["vision_start_token_id"] = IMAGE_START
    config = config_class(**{**parts, **tokens, **OUTER.get(model_type, {})})
    return random_model(getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]), config)


def text_prompts() -> dict[str, torch.Tensor]:
    """Return a batch of left-padded prompts of text, int64 [rows, tokens], and their mask."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, IMAGE_TOKEN, (len(PROMPTS), max(PROMPTS)), generator=generator)
    mask = (torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def image_prompts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a batch of left-padded prompts, each with an image of random pixels among its text.

    Raises
    ------
    ValueError
        The model takes images in a form that is not written here.
    """
    generator, rows, config = torch.Generator().manual_seed(4), len(PROMPTS), model.config
    features = _features_of(model)
    if features is None:
        raise ValueError("no get_image_features")
    inputs = _pixels(config, list(inspect.signature(features).parameters), generator)
    found = features(**inputs)
    found = getattr(found, "pooler_output", found)
    width = text_model(model).config.hidden_size
    tokens: int = sum(part.numel() for part in found) // width // rows
    prompts = text_prompts()
    prompts["input_ids"][:, 39] = IMAGE_START
    ids, mask = (
        torch.cat([part[:, :40], torch.full((rows, tokens), new), part[:, 40:]], dim=1)
        for part, new in ((prompts["input_ids"], IMAGE_TOKEN), (prompts["attention_mask"], 1))
    )
    names = inspect.signature(model.forward).parameters
    types = {name: (ids == IMAGE_TOKEN).long() for name in ("token_type_ids", "mm_token_type_ids") if name in names}
    return {"input_ids": ids, "attention_mask": mask, **inputs, **types}


def _features_of(model: PreTrainedModel) -> Any:
    """Return the method that encodes images, of a model or of the model inside it; None if there is none."""
    return next(
        (part.get_image_features for part in (model, model.base_model) if hasattr(part, "get_image_features")), None
    )


def _pixels(config: Any, parameters: list[str], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return an image for each prompt, in the form that the parameters of ``get_image_features`` tell."""
    rows, vision, kind = len(PROMPTS), config.vision_config, config.model_type

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if "image_grid_thw" in parameters:  # Qwen2-VL and others: patches of every image, and their grid
        grid = torch.tensor([[1, 4, 6]] * rows)
        channels = _first(vision, "in_channels", "in_chans", "num_channels", otherwise=3)
        frames = _first(vision, "temporal_patch_size", "patch_temporal", otherwise=1)
        patch = (frames, channels, vision.patch_size, vision.patch_size)
        patches = pixels(int(grid.prod(1).sum()), *patch)
        inputs = {
            "pixel_values": patches[:, 0] if kind == "paddleocr_vl" else patches.flatten(1),
            "image_grid_thw": grid,
        }
        return inputs | ({"image_merge_sizes": torch.tensor([2] * rows)} if kind == "video_llama_3" else {})
    if "image_grids" in parameters:  # Molmo 2: patches of every crop, those of each token, and a grid of tokens
        return {
            "pixel_values": pixels(rows, 4, 3 * vision.patch_size**2),
            "image_token_pooling": torch.arange(4 * rows).view(-1, 2),
            "image_grids": torch.tensor([[1, 2, 0, 0]] * rows),
            "image_num_crops": torch.ones(rows, dtype=torch.long),
        }
    size = _first(getattr(vision, "sam_config", vision), "image_size", "resolution", otherwise=28)
    size = size if isinstance(size, int) else size[0]
    if "image_sizes" in parameters:
        parts = (2,) if hasattr(config, "image_grid_pinpoints") else ()  # the whole image, and its only part
        return {"pixel_values": pixels(rows, *parts, 3, size, size), "image_sizes": torch.tensor([[size, size]] * rows)}
    images = (1,) if "pixel_attention_mask" in parameters else ()
    inputs = {"pixel_values": pixels(rows, *images, 3, size, size)}
    if kind == "deepseek_vl_hybrid":
        inputs["high_res_pixel_values"] = pixels(rows, 3, size, size)
    return inputs | ({"pixel_attention_mask": torch.ones(rows, 1).bool()} if kind == "granite_docling" else {})


def _first(config: Any, *names: str, otherwise: int) -> int:
    """Return the first of the settings that a configuration has."""
    found: int = next((getattr(config, name) for name in names if hasattr(config, name)), otherwise)
    return found


def covering(model: PreTrainedModel, name: str, prompts: dict[str, torch.Tensor]) -> str:
    """Compare a budget that covers everything, in the cache that ``generate()`` makes, with the stock model.

    Raises
    ------
    ValueError
        No decode step was counted.
    """
    expected = greedy(model, prompts)
    with always_sparse(name), sparse_attention(model, method_of(name, COVERING)):
        found = greedy(model, prompts)
        if sparse_attention_stats(model).decode_steps == 0:
            raise ValueError("no decode step ran")
    return difference(found, expected)


def for_compilation(model_type: str) -> PreTrainedModel:
    """Create a tiny model that has neither windows nor, among experts, a loop of the host's."""
    model = tiny_multimodal(model_type, {"layer_types": ["full_attention"] * TINY["num_hidden_layers"]})
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model


def compiled(model: PreTrainedModel, prompts: dict[str, torch.Tensor]) -> str:
    """Compare compiled steps of a budget that covers everything with the stock model.

    They are not compiled, or one graph, if the model's code is not.
    """
    expected = greedy(model, prompts)
    with always_sparse("quest"), sparse_attention(model, method_of("quest", COVERING)):
        if not is_step_one_graph(model):
            return "not one graph"
        found = greedy(model, prompts, compile_config=compile_config(), cache_implementation="static")
    return difference(found, expected)


def family_of(model_type: str) -> Family:
    """Return the family of the text decoder that a supported type has by default."""
    return (FAMILIES | DECODERS)[text_type(model_type)]


def text_type(model_type: str) -> str:
    """Return the model type of the text decoder that a multimodal model has by default."""
    kind: str = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type
    return kind


def without_windows(model_type: str) -> PreTrainedModel:
    """Create a tiny model whose text layers all have full attention."""
    return tiny_multimodal(model_type, {"layer_types": ["full_attention"] * TINY["num_hidden_layers"], **NO_WINDOW})


def results_of(model_type: str) -> dict[str, Any]:
    """Return the checks' results for a supported multimodal model, over prompts of text and prompts with an image."""
    results: dict[str, Any] = {"text_decoder": text_type(model_type)}
    family = family_of(model_type)
    for name in COVERED:
        rotates = METHODS[name].rotates_keys
        if rotates and family.rotation:
            results[name] = f"refused: {family.rotation}"
            continue
        model = without_windows(model_type) if rotates else tiny_multimodal(model_type)
        found = [answer(covering, model, name, prompts) for prompts in (text_prompts(), image_prompts(model))]
        results[name] = next((result for result in found if result != "equal"), "equal")
    torch._dynamo.reset()  # it compiles a function a few times only
    model = for_compilation(model_type)
    found = [answer(compiled, model, prompts) for prompts in (text_prompts(), image_prompts(model))]
    results["compiled"] = next((result for result in found if result != "equal"), "equal")
    return results


def reason_of(model_type: str) -> dict[str, Any]:
    """Return why a multimodal model is refused."""
    return {"reason": refusal(model_type, text_type(model_type))}
