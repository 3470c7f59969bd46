"""The attention function that every attention module of a patched model calls."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_sparse_attn.cache import SparseCache, SparseLayer


def sparse_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sparse_cache: SparseCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend sparsely in decode steps, densely in prefill, in dense layers and within the budget.

    Parameters
    ----------
    module
        The attention module; its ``layer_idx`` says which cache layer is its own.
    query
        [batch, q_heads, query tokens, head_dim], after RoPE.
    key, value
        [batch, kv_heads, length, head_dim], the new tokens included.
    attention_mask
        What SDPA gets: a mask that broadcasts to [batch, q_heads, query tokens, length], or None.
    dropout
        0.0: patched models do not train.
    scaling
        What q.k is multiplied with; ``head_dim ** -0.5`` if None.
    sparse_cache
        The cache that holds ``key`` and ``value``; None where the model runs without one, which is dense.

    Returns
    -------
    tuple
        [batch, query tokens, q_heads, head_dim], and None in place of the attention weights.
    """
    layer = None if sparse_cache is None else sparse_cache.layers[module.layer_idx]
    if isinstance(layer, SparseLayer) and query.shape[2] == 1:
        if not layer.is_dense and not layer.method.covers(layer.length - layer.least_padding):
            return _sparse_decode_step(query, layer, scaling), None
        layer.counter.count(layer, None)
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output


def _sparse_decode_step(query: torch.Tensor, layer: SparseLayer, scaling: float | None) -> torch.Tensor:
    method = layer.method
    token_query = query[:, :, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    selection = method.select(token_query, layer, scale)
    layer.counter.count(layer, selection)
    return method.attend(token_query, layer, selection, scale).unsqueeze(1)
