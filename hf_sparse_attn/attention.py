"""The attention function that every attention module of a patched model calls."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch
from hf_sparse_attn_kernels import skip_checks

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.padding import chunk_ends, shared_padding
from hf_sparse_attn.gradients import asks_gradient, without_gradient
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.precision import uncast
from hf_sparse_attn.rope import rotated_by
from hf_sparse_attn.sinks import sdpa_attention


class Unpatched(Enum):
    """Default of ``sparse_cache``, which the hook of a patched decoder always replaces."""

    UNPATCHED = "unpatched"


UNPATCHED: Final = Unpatched.UNPATCHED
CHANGE_WEIGHTS = ("sinks", "softcap", "position_bias")
"""Arguments of attention functions that change the softmax, and that methods and SDPA would leave out."""


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
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run a decode step by the method's ``decode``, a prompt by its ``prefill``, anything else by SDPA.

    Parameters
    ----------
    module
        The attention module; ``layer_idx`` is the index of its cache layer.
    query
        [batch, q_heads, query tokens, head_dim], after RoPE, or before it if the method sets ``rotates_keys``.
    key, value
        [batch, kv_heads, length, head_dim], as returned by the cache layer's ``update``, new tokens included. Methods
        read the layer instead.
    attention_mask
        SDPA's mask, broadcastable to [batch, q_heads, query tokens, length], or None.
    dropout
        Always 0.0: patched models do not train.
    scaling
        Factor on q.k; ``head_dim ** -0.5`` if None.
    sparse_cache
        The cache that holds ``key`` and ``value``, passed on by the hook of a patched decoder; None for a dense pass,
        with or without a cache.
    rotation
        Cosine and sine, [batch or 1, length, head_dim] each, for a dense pass over queries and keys before RoPE.
    s_aux
        [q_heads]: logits of learned attention sinks, of a model that has them.

    Returns
    -------
    tuple
        [batch, query tokens, q_heads, head_dim], and None in place of the attention weights.

    Raises
    ------
    ValueError
        The module belongs to a model that is not patched; its configuration was copied from a patched one. Or it
        passes sinks of each token, a cap of the scores or a bias. Or the method leaves the attention sinks out.
    """
    if sparse_cache is UNPATCHED:
        raise ValueError(
            f"this {type(module).__name__} belongs to a model that is not patched; its configuration was copied from a "
            "patched model: call patch_model(model), or model.set_attn_implementation('sdpa') for dense attention"
        )
    for name in CHANGE_WEIGHTS:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name!r} to its attention, which is not supported")
    if s_aux is not None and hasattr(s_aux, "to_local"):  # 5.17 leaves those of divided heads a DTensor
        s_aux = s_aux.to_local()
    layer_idx: Any = module.layer_idx
    layer = None if sparse_cache is None else sparse_cache.layers[layer_idx]
    if not isinstance(layer, SparseLayer):
        if rotation is not None:
            query, key = rotated_by(query, *rotation), rotated_by(key, *rotation)
        if sparse_cache is not None and query.shape[2] == 1:
            _count_window(sparse_cache, layer_idx, key, value, attention_mask)
        output = sdpa_attention(module, query, key, value, attention_mask, s_aux, scaling, dropout=dropout, **kwargs)
        return output, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer.sinks = s_aux
    with uncast(query.device):
        # Under torch.autocast RoPE leaves queries in another dtype than the cache's, which SDPA would change too.
        if query.dtype != layer.dtype:
            return _sparse_attention(query.to(layer.dtype), layer, scale, attention_mask).to(query.dtype), None
        return _sparse_attention(query, layer, scale, attention_mask), None


def _sparse_attention(
    query: torch.Tensor, layer: SparseLayer, scale: float, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Run a decode step or a pass over tokens that the layer has; return [batch, tokens, q_heads, head_dim]."""
    token = layer.take_token()
    if token is None:
        layer.rehearsed_query = None
        layer.observe(query, scale)
        output = _prefill(query, layer, scale, attention_mask)
        if asks_gradient(query) and (not layer.method.prefills_densely or layer.length > query.shape[2]):
            output = without_gradient(output, query)
        if layer.sinks is not None:
            raise _without_sinks(layer.method)
        return output.transpose(1, 2)
    new_key, new_value = token
    # Not [:, :, 0], which a compiler turns into three nodes of its graph.
    states = (query.select(2, 0), new_key.select(2, 0), new_value.select(2, 0))
    if layer.rehearsed_query is not None:
        layer.rehearsed_query = layer.rehearsed_query.to(query.dtype)
    method = layer.step_method
    step = _decode(method, layer, states, scale)
    if layer.sinks is not None:
        raise _without_sinks(method)
    layer.rehearsed_query = None
    layer.mark_written()
    return (without_gradient(step, query) if asks_gradient(query) else step).unsqueeze(1)


def _prefill(query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend from the tokens of a pass, in chunks of the method; the layer has all of them already."""
    tokens, chunk, sinks = query.shape[2], layer.prefill_chunk, layer.sinks
    if chunk is None or tokens <= chunk or layer.lengths.is_traced:  # a compiled pass is a short draft, or one chunk
        return layer.method.prefill(query, layer, scale, mask)
    before, outputs = layer.length - tokens, []
    begin = padding = shared_padding(layer.least_padding, before, tokens)
    for end in chunk_ends(tokens, chunk, padding):
        layer.sinks = sinks
        with layer.ending_at(before + end):
            own = None if mask is None else mask[..., begin:end, : before + end]
            outputs.append(layer.method.prefill(query[:, :, begin:end], layer, scale, own))
        begin = end
    joined = torch.cat(outputs, dim=2)
    return torch.nn.functional.pad(joined, (0, 0, padding, 0)) if padding else joined


def _decode(
    method: SparseMethod, layer: SparseLayer, states: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scale: float
) -> torch.Tensor:
    """Run a decode step of a method, without the ops' checks if those of the last step hold for it."""
    query, new_key, new_value = states
    if not layer.is_like_last_step(method, *states):
        return method.decode(query, layer, new_key, new_value, scale)
    with skip_checks():
        return method.decode(query, layer, new_key, new_value, scale)


def _without_sinks(method: SparseMethod) -> ValueError:
    """Return the error of a method that has not taken the layer's attention sinks."""
    return ValueError(
        f"method {method.name!r} leaves the model's attention sinks out of its softmax: what its decode and prefill "
        "return must come from attend, dense_attention or layer.with_sinks(output, lse)"
    )


def _count_window(
    cache: SparseCache, layer_idx: int, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Count the tokens that a sliding-window layer reads in a decode step."""
    counter = cache.counters[layer_idx]
    batch, kv_heads, length, _ = key.shape
    counter.allocate(key.device, lambda tensor: tensor)
    counter.set_token_bytes(key, value)
    counter.count_dense(batch * kv_heads * length if mask is None else mask.sum() * kv_heads)
