"""Tiny random models, and the comparison of patched with stock ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import CompileConfig, PreTrainedConfig, PreTrainedModel

from hf_sparse_attn import METHODS, SparseMethod

BUDGET = 24
"""Tokens that a step reads where the budget is sparse: under half of every row."""
COVERED = ("quest", "keycodes", "tokenselect")
PROMPTS = (57, 33)
"""Tokens of text in a batch of prompts, without those of an image."""
NEW_TOKENS = 6
MAX_PARAMETERS = 20e6
ROUNDING = 1e-5
"""Of logits, relative to the largest: norms work in float32 in a float64 model too."""

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "use_cache": True,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Settings of a tiny model; a configuration takes those that it has."""

ALL_FULL = {"layer_types": None, "sliding_window": None}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral3"], ALL_FULL),
    "qwen2": {"use_sliding_window": True},
    "qwen2_moe": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    "qwen3_moe": ALL_FULL,
    "gpt_bigcode": {"num_key_value_heads": 1},  # multi_query, its default
    "laguna": {"num_attention_heads_per_layer": [4, 6, 2]},
    "mimo_v2_flash": {"v_head_dim": 24},
    "smollm3": {"no_rope_layers": [1, 0, 1], **ALL_FULL},
}


def taken(default: PreTrainedConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the wanted settings that a configuration has."""
    return {name: value for name, value in wanted.items() if hasattr(default, name) and not _is_derived(default, name)}


def _is_derived(config: PreTrainedConfig, name: str) -> bool:
    attribute = getattr(type(config), config.attribute_map.get(name, name), None)
    return isinstance(attribute, property) and attribute.fset is None


def random_model(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Create a random model in float64, with weights large enough for sharp attention and no two norms alike.

    Raises
    ------
    ValueError
        The model would not be tiny.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"no tiny configuration: {parameters} parameters")
    model: PreTrainedModel = model_class(config).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others do not take float64
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data = 0.2 * noise if parameter.dim() > 1 else parameter.data + 0.1 * noise
    return model


def difference(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return "equal", or how two results of :func:`decode` differ."""
    logits = float((actual[1][0] - expected[1][0]).abs().max() / expected[1].abs().max())
    if not torch.equal(actual[0], expected[0]):
        return "tokens differ" + (", from the prefill on" if not logits < ROUNDING else "")
    logits = float((actual[1] - expected[1]).abs().max() / expected[1].abs().max())
    return "equal" if logits < ROUNDING else f"logits differ by {logits:.0e}"


def method_of(name: str, budget: int) -> SparseMethod:
    """Create a method that is sparse in every full-attention layer."""
    pages = {"page_size": 16} if name == "keycodes" else {}
    dense = {"dense_layers": 0} if name == "quest" else {}
    return METHODS[name](token_budget=budget, **pages, **dense)


@contextmanager
def always_sparse(name: str) -> Iterator[None]:
    """Keep a method from its dense shortcut, so that its steps run even if they select everything."""
    with patch.object(METHODS[name], "covers", lambda self, length: False):
        yield


def answer(check: Callable[..., str], *arguments: Any) -> str:
    """Return a check's result, or its error on one line."""
    try:
        with torch.inference_mode():
            return check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def greedy(model: PreTrainedModel, prompts: dict[str, torch.Tensor], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue prompts greedily; return tokens [rows, tokens] and logits [steps, rows, vocabulary]."""
    output = model.generate(
        **prompts,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )
    return output.sequences, torch.stack(output.logits)


def compile_config(*, backend: str = "eager", fullgraph: bool = True) -> CompileConfig:
    """Return the configuration by which ``generate()`` compiles steps, on a CPU too; a graph break is an error."""
    config = CompileConfig(backend=backend, mode=None, fullgraph=fullgraph)
    config._compile_all_devices = True
    return config
