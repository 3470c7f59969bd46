"""The attention function that every attention module of a patched model calls."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.rope import rotated_by


class Unpatched(Enum):
    """What stands for the cache where no patched decoder handed one on."""

    UNPATCHED = "unpatched"


UNPATCHED: Final = Unpatched.UNPATCHED


def sparse_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sparse_cache: SparseCache | Unpatched | None = UNPATCHED,
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Hand a decode step to the method's ``decode``, several tokens to its ``prefill``, anything else to SDPA.

    Parameters
    ----------
    module
        The attention module; its ``layer_idx`` says which cache layer is its own.
    query
        [batch, q_heads, query tokens, head_dim], after RoPE; before it where the method has ``rotates_keys``.
    key, value
        [batch, kv_heads, length, head_dim], the new tokens included: what the cache layer's ``update`` returned.
        Methods read the layer itself.
    attention_mask
        A mask as SDPA takes it, which broadcasts to [batch, q_heads, query tokens, length], or None.
    dropout
        0.0: patched models do not train.
    scaling
        Factor on q.k; ``head_dim ** -0.5`` if None.
    sparse_cache
        The cache that holds ``key`` and ``value``; None for a forward pass that is dense, with or without a cache.
        The hook of a patched decoder hands it on.
    rotation
        Of a dense pass with queries and keys before RoPE: cosine and sine, [batch or 1, length, head_dim] each.

    Returns
    -------
    tuple
        [batch, query tokens, q_heads, head_dim], and None in place of the attention weights.

    Raises
    ------
    ValueError
        The module is of a model that is not patched: its configuration is a copy of a patched model's.
    """
    if sparse_cache is UNPATCHED:
        raise ValueError(
            f"this {type(module).__name__} is of a model that is not patched, whose configuration is a copy of a "
            "patched model's: call patch_model(model), or model.set_attn_implementation('sdpa') for dense attention"
        )
    layer_idx: Any = module.layer_idx
    layer = None if sparse_cache is None else sparse_cache.layers[layer_idx]
    if not isinstance(layer, SparseLayer):
        if rotation is not None:
            query, key = rotated_by(query, *rotation), rotated_by(key, *rotation)
        if sparse_cache is not None and query.shape[2] == 1:
            _count_window(sparse_cache, layer_idx, key, value, attention_mask)
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    token = layer.take_token()
    if token is None:
        return layer.method.prefill(query, layer, scale, attention_mask).transpose(1, 2), None
    new_key, new_value = (states[:, :, 0] for states in token)
    step = layer.step_method.decode(query[:, :, 0], layer, new_key, new_value, scale)
    layer.mark_written()
    return step.unsqueeze(1), None


def _count_window(
    cache: SparseCache, layer_idx: int, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Count a decode step of a layer with a sliding window: the tokens that its mask leaves."""
    counter = cache.counters[layer_idx]
    batch, kv_heads, length, _ = key.shape
    counter.allocate(key.device, lambda tensor: tensor)
    counter.set_token_bytes(key, value)
    counter.count_dense(batch * kv_heads * length if mask is None else mask.sum() * kv_heads)
