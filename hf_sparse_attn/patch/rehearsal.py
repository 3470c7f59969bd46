"""Rehearsal of a layer's attention with the input of the layer before it, for methods that speculate."""

from __future__ import annotations

from typing import Any

import torch

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.rope import rotated_by


def rehearse(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give a decode step's cache layer the query of the previous attention's input, as a hook before each attention.

    The inputs of neighbouring layers differ little, so a system can know most of a layer's query one layer ahead, and
    fetch keys and values meanwhile. The module's own projection, norm and rotation make the query, as they make its
    real one. An input waits in the cache for the next attention.
    """
    cache = kwargs.get("sparse_cache")
    hidden = args[0] if args else kwargs["hidden_states"]
    if not isinstance(cache, SparseCache) or hidden.shape[1] != 1:
        return
    layer_idx: Any = module.layer_idx
    previous, cache.attention_input = cache.attention_input, None
    layer = cache.layers[layer_idx]
    if layer_idx and previous is not None and isinstance(layer, SparseLayer) and layer.method.rehearses:
        layer.rehearsed_query = query_of(module, previous.to(hidden.device), kwargs["position_embeddings"])
    if layer_idx + 1 < len(cache.layers):
        cache.attention_input = hidden


def query_of(module: Any, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return an attention module's query of a decode step's input, [batch, q_heads, head_dim], after RoPE."""
    query = module.q_proj(hidden).unflatten(2, (-1, module.head_dim))
    if hasattr(module, "q_norm"):  # Qwen3, and others that normalize each head
        query = module.q_norm(query)
    return rotated_by(query.transpose(1, 2), *rotation)[:, :, 0]
