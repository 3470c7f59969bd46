"""Scores of single tokens and the choice of the best, in plain torch, for baselines without an op of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hf_sparse_attn_kernels import select_blocks

from hf_sparse_attn.methods.base import Selection

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

GROUP_REDUCTIONS = ("softmax", "mean", "max")


def row_slots(layer: SparseLayer, first: int | torch.Tensor = 0, tokens: int | None = None) -> torch.Tensor:
    """Return where tokens of each row lie in the layer's buffers, int64 [batch, tokens].

    Parameters
    ----------
    layer
        Its row bounds are read on the device.
    first
        The first of them, counted from the row's first token: a number, or [batch].
    tokens
        How many, ``layer.longest_row`` by default. Tokens that a row does not have get the nearest slot of the buffers.
    """
    places = torch.arange(layer.longest_row if tokens is None else tokens, device=layer.keys.device)
    start = layer.seq_start.long() + first
    return (start[:, None] + places).clamp(0, layer.capacity - 1)


def take_tokens(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather from a buffer [batch, kv_heads, capacity, ...] by slots [batch, n], for [batch, kv_heads, n, ...]."""
    index = slots.view(len(slots), 1, -1, *(1,) * (tensor.dim() - 3))
    return tensor.gather(2, index.expand(-1, tensor.shape[1], -1, *tensor.shape[3:]))


def grouped(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return queries [batch, q_heads, ...] as [batch, kv_heads, group, ...], in at least float32."""
    heads = query.reshape(query.shape[0], kv_heads, -1, *query.shape[2:])
    return heads.to(torch.promote_types(query.dtype, torch.float32))


def token_scores(query: torch.Tensor, keys: torch.Tensor, layer: SparseLayer, scale: float) -> torch.Tensor:
    """Return q.k of every cached token for every query head.

    Parameters
    ----------
    query
        [batch, q_heads, channels].
    keys
        [batch, kv_heads, capacity, channels]: the layer's keys, or what stands for them.
    layer
        The row bounds; other positions never influence a result.
    scale
        Factor on q.k.

    Returns
    -------
    torch.Tensor
        float32, or float64 for float64, [batch, kv_heads, group, tokens]: column t is the row's token t; -inf for
        tokens that a row does not have.
    """
    heads = grouped(query, keys.shape[1]) * scale
    products = heads @ keys.to(heads.dtype).transpose(2, 3)  # of every slot
    slots = row_slots(layer)
    products = products.gather(3, slots[:, None, None].expand(*products.shape[:3], -1))
    tokens = torch.arange(slots.shape[1], device=slots.device)
    return products.masked_fill((tokens >= layer.row_lengths()[:, None])[:, None, None], float("-inf"))


def reduce_group(scores: torch.Tensor, group_reduce: str) -> torch.Tensor:
    """Reduce scores [batch, kv_heads, group, tokens] over the query heads of a group, to [batch, kv_heads, tokens].

    ``"softmax"`` is the logarithm of the sum of the heads' attention weights, which keeps the order of the sum.
    """
    if group_reduce == "mean":
        return scores.mean(2)
    if group_reduce == "max":
        return scores.amax(2)
    return scores.log_softmax(3).logsumexp(2)


def best_tokens(scores: torch.Tensor, layer: SparseLayer, max_tokens: int) -> Selection:
    """Choose the ``max_tokens`` tokens of each KV head with the highest scores, [batch, kv_heads, tokens].

    The lower index wins among equal scores. Nothing is read in any case: neither first tokens nor the newest.
    """
    indices, counts = select_blocks(scores, layer.seq_start, layer.seq_end, block_size=1, max_blocks=max_tokens)
    return Selection(indices, counts, block_size=1)
