"""Dense attention over a layer of the cache: by the stock model's function, or a kernel for a few tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from hf_sparse_attn_kernels import dense_prefill

from hf_sparse_attn.rope import rotated_as_model
from hf_sparse_attn.sinks import sdpa_attention

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

FEW_TOKENS = 64
"""Maximum number of tokens that attend by row bounds: SDPA copies K and V for every query head, but once for all."""
TIMES_AS_LONG = 4
"""How many times as long as these tokens their rows are at least."""


def dense_attention(query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    """Attend from the last tokens of every row to all tokens of the layer, as the unpatched model does.

    Rotates queries and keys by their positions in the rows if the method caches keys before RoPE. A few tokens over a
    long cache share one read of K and V if the storage is read by row bounds: a mask allows no kernel that does. The
    layer's attention sinks take part in the softmax.

    Parameters
    ----------
    query
        [batch, q_heads, tokens, head_dim], of the newest cached tokens.
    layer
        Holds K and V of these tokens too.
    scale
        Factor on q.k.
    mask
        bool, broadcastable to [batch, q_heads, tokens, length]; None for causal attention without padding. It hides
        what the row bounds do, and is ignored where these mask: for a method that needs no mask, and for a few tokens.

    Returns
    -------
    torch.Tensor
        Same shape as ``query``.
    """
    rows = layer.rows
    if _attends_by_bounds(layer, query.shape[2]):
        return layer.with_sinks(*dense_prefill(query, *rows, scale=scale))
    keys, values = rows.keys[:, :, : layer.length], rows.values[:, :, : layer.length]
    if not layer.method.needs_mask:
        seq_start = layer.seq_start if layer.lengths.has_padding else None
        mask = mask_by_bounds(query.shape[2], layer.length, seq_start, keys.device)
    if layer.method.rotates_keys:
        query, keys = _rotated_by_place(query, keys, layer)
    return stock_attention(query, keys, values, scale, mask, layer.take_sinks())


def _attends_by_bounds(layer: SparseLayer, tokens: int) -> bool:
    """Whether a pass over the last tokens of every row needs no mask. The verification of a draft never has one."""
    if layer.verifies_draft:
        return True
    length = layer.lengths.known_length
    is_few = length is not None and 1 < tokens <= FEW_TOKENS and TIMES_AS_LONG * tokens <= length
    return is_few and layer.storage.reads_by_bounds() and not layer.method.rotates_keys


def stock_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from queries to keys of the same tokens and of those before, as the unpatched model does.

    Arguments as of :func:`dense_attention`; ``keys`` and ``values`` are [batch, kv_heads, length, head_dim], ``sinks``
    [q_heads] are the logits of attention sinks.
    """
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1], is_causal=True)
    return sdpa_attention(module, query, keys, values, mask, sinks, scale).transpose(1, 2)


def padding_mask(layer: SparseLayer) -> torch.Tensor | None:
    """Return the mask of a decode step: bool [batch, 1, 1, length], or None without padding."""
    if not layer.lengths.has_padding:
        return None
    positions = torch.arange(layer.length, device=layer.keys.device)
    return (positions >= layer.seq_start[:, None])[:, None, None]


def mask_by_bounds(
    queries: int, length: int, seq_start: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Return the causal mask of the rows' last tokens, bool [batch or 1, 1, queries, length]; None if SDPA needs none.

    SDPA aligns a causal mask with the first key, so a part of a longer row needs one. A single query needs none.
    ``seq_start`` is int [batch], or None if no row has padding.
    """
    if seq_start is None and (queries == 1 or queries == length):
        return None
    at = torch.arange(length, device=device)
    causal = at <= at[-queries:, None]
    start = torch.zeros_like(at[:1, None]) if seq_start is None else seq_start[:, None]
    return (causal & (at >= start)[:, None])[:, None]


def _rotated_by_place(query: torch.Tensor, keys: torch.Tensor, layer: SparseLayer) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(layer.length, device=query.device)[None]
    seq_start = layer.seq_start[:, None] if layer.lengths.has_padding else torch.zeros_like(at[:, :1])
    positions = (at - seq_start).clamp_min(0)
    keys = rotated_as_model(keys, layer.rope, positions)
    return rotated_as_model(query, layer.rope, positions[:, -query.shape[2] :]), keys
