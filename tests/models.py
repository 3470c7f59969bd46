"""Tiny random models of every supported family, and the methods that run through the contract tests."""

from __future__ import annotations

from functools import cache

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_sparse_attn import METHODS, SparseMethod
from tests.methods.toy import FirstHeadStreams, MassThreshold, TokenTopK

VOCABULARY = 97
POSITIONS = 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
"""Of logits in float64: the models' norms work in float32, and a GPU adds up in an order that depends on the shape."""

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_attention_heads": 7, "num_key_value_heads": 1}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "mistral": (MistralConfig, MistralForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 4}),
}
METHOD_CLASSES: dict[str, type[SparseMethod]] = {
    **METHODS,
    TokenTopK.name: TokenTopK,
    MassThreshold.name: MassThreshold,
    FirstHeadStreams.name: FirstHeadStreams,
}

SPARSE: dict[str, dict[str, float]] = {
    "arkvale": {"page_size": 16},
    "keycodes": {"page_size": 16},
    "rabitqcache": {"page_size": 16, "sink_tokens": 16, "top_p": 0.6},
    "double_sparsity": {"channels": 4},
    "infllm": {"n_init": 4, "n_local": 12, "block_size": 8, "representatives": 2},
    "infinigen": {"alpha": 2.0, "max_share": 0.5},
    "self_extend": {"group_size": 3, "window": 20, "chunk_size": 32},
    "toy-mass-threshold": {"threshold": 0.3},
    "psa": {"block_size": 8, "microbatch": 2},
    "squeezed": {"target_sparsity": 0.8, "clusters": 0.1, "window": 8},
    "snapkv": {"window": 8},
    "minference": {"block_size": 16},
    "duo_attention": {"sink_tokens": 4},
    "toy-first-head-streams": {"sink_tokens": 4},
}
"""Hyperparameters with which a method leaves tokens out of a short sequence, beside a small ``token_budget``."""
COVERING: dict[str, dict[str, float]] = {
    "infllm": {"n_init": 0, "n_local": 512},
    "infinigen": {"alpha": float("inf"), "max_share": 1.0},
    "ntk": {"factor": 1.0},
    "self_extend": {"window": 512},
    "rabitqcache": {"top_p": 1.0, "page_size": 16, "sink_tokens": 16},
    "psa": {"threshold": 1.0, "block_size": 8, "microbatch": 2},
    "squeezed": {"target_sparsity": 0.0, "clusters": 0.1, "window": 8},
}
"""Hyperparameters with which a method reads everything, beside a ``token_budget`` that covers everything."""


def make_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    """Create a random model, with weights large enough for sharp attention and sharp token probabilities."""
    config_class, model_class, heads = FAMILIES[family]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads["num_attention_heads"] * 16,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        **heads,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **overrides}))
    return model.to(DEVICE, dtype).eval()


@cache
def shared_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model shared by tests, which all leave it unpatched."""
    with torch.inference_mode(False):  # weights made in that mode could be used in no other
        return make_model(family, dtype=dtype)


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """[batch, length] token ids, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator).to(DEVICE)
