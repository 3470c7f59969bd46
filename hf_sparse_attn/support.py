"""What can be patched: checks that look at a model and change nothing."""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel

from hf_sparse_attn.cache import SparseCache
from hf_sparse_attn.generation import NO_ATTENTIONS
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.rope import head_dim_of, max_positions

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MAX_HEAD_DIM = 256
NO_TRAINING = "the model is in training mode; sparse attention is for inference: call model.eval() first"


def check_supported(model: PreTrainedModel, method: SparseMethod) -> None:
    """Raise where the model cannot be patched with the method; looks only, changes nothing."""
    supported = ", ".join(SUPPORTED_MODEL_TYPES)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a Transformers model ({supported}), got {type(model).__name__}")
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"{type(model).__name__} (model type {config.model_type!r}) is not supported; supported: {supported}"
        )
    if model.training:
        raise ValueError(NO_TRAINING)
    if config.output_attentions:
        raise ValueError(NO_ATTENTIONS)
    head_dim = head_dim_of(config)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{type(model).__name__} has head_dim {head_dim}; at most {MAX_HEAD_DIM} is supported")
    method.check_model(model)
    cache = SparseCache(config, method)
    full_attention = cache.sparse_layers
    if method.prefills and len(full_attention) < len(cache.layers):
        raise ValueError(
            f"{method.name} attends in the prefill, which does not go with sliding-window layers "
            f"(sliding_window={config.sliding_window}), and {len(cache.layers) - len(full_attention)} of this "
            f"{type(model).__name__}'s {len(cache.layers)} layers have one"
        )
    if not full_attention:
        raise ValueError(
            f"every layer of this {type(model).__name__} has sliding-window attention "
            f"(sliding_window={config.sliding_window}); there is nothing to make sparse"
        )
    if all(layer.is_dense for layer in full_attention):
        raise ValueError(
            f"dense_layers must leave a layer to make sparse: got {method.dense_layers}, "
            f"and the model has {config.num_hidden_layers} layers"
        )


def check_positions(config: PreTrainedConfig, method: SparseMethod, query_length: int, cached: int) -> None:
    """Raise where a prompt goes past the positions that the model knows; single decode steps are let through."""
    limit = max_positions(config)
    if query_length > 1 and cached + query_length > limit and not method.extends_positions:
        raise ValueError(
            f"the prompt has {cached + query_length} tokens, but the model has {limit} positions "
            f"(max_position_embeddings={config.max_position_embeddings}); {method.name} does not extend them"
        )
