"""The attention function that every attention module of a patched model calls."""

from __future__ import annotations

from typing import Any

import torch
from hf_sparse_attn_kernels import dense_decode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_sparse_attn.cache import SparseCache, SparseLayer
from hf_sparse_attn.rope import rotated_as_model


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
    """Attend sparsely in decode steps, densely in dense layers, within the budget and, mostly, in prefill.

    Parameters
    ----------
    module
        The attention module; its ``layer_idx`` says which cache layer is its own.
    query
        [batch, q_heads, query tokens, head_dim], after RoPE; before it where the method has ``rotates_keys``.
    key, value
        [batch, kv_heads, length, head_dim], the new tokens included: what the cache layer's ``update`` returned. A
        single token is read from the layer itself.
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
    if isinstance(layer, SparseLayer):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        new_token = layer.take_pending()
        if new_token is not None:
            return _sparse_step(query[:, :, 0], layer, *new_token, scale).unsqueeze(1), None
        if layer.method.rotates_keys and layer.method.covers(layer.length - layer.least_padding):
            if query.shape[2] == 1:
                layer.counter.count_dense(layer)
            query, key, attention_mask = _by_position(query, layer)
            value = layer.values[:, :, : layer.length]
        elif layer.method.prefills and not layer.is_dense:
            return layer.method.prefill(query, layer, scale).transpose(1, 2), None
        elif query.shape[2] == 1:
            if layer.is_static or query.is_cuda:
                return _dense_step(query[:, :, 0], layer, scale).unsqueeze(1), None
            layer.counter.count_dense(layer)
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output


def _by_position(query: torch.Tensor, layer: SparseLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What dense attention takes where the keys are cached before RoPE: queries and keys rotated, and a mask."""
    queries, length = query.shape[2], layer.length
    at = torch.arange(length, device=query.device)[None]
    seq_start = layer.seq_start[:, None] if layer.rows.has_padding else torch.zeros_like(at[:, :1])
    positions = (at - seq_start).clamp_min(0)
    mask = None
    if layer.rows.has_padding or 1 < queries < length:
        causal = at[0] <= at[0, -queries:, None]
        mask = (causal & (at >= seq_start)[:, None])[:, None]
    keys = rotated_as_model(layer.keys[:, :, :length], layer.rope, positions)
    return rotated_as_model(query, layer.rope, positions[:, -queries:]), keys, mask


def _sparse_step(
    query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
) -> torch.Tensor:
    selection = layer.method.append_and_select(query, layer, new_key[:, :, 0], new_value[:, :, 0], scale)
    return layer.method.attend(query, layer, selection, scale)


def _dense_step(query: torch.Tensor, layer: SparseLayer, scale: float) -> torch.Tensor:
    output, _ = dense_decode(
        query,
        layer.keys,
        layer.values,
        layer.seq_start,
        layer.seq_end,
        scale=scale,
        counter=layer.counter.totals,
        finished=layer.finished,
    )
    return output
