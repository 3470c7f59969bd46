"""Attention to several sets of tokens, merged by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from hf_sparse_attn_kernels import sparse_decode

from hf_sparse_attn.dense import stock_attention

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer
    from hf_sparse_attn.methods.base import Selection


class Part(NamedTuple):
    """A set of tokens of a decode step, with the query as they meet it."""

    query: torch.Tensor
    """[batch, q_heads, head_dim]."""
    selection: Selection
    """The tokens; no other part has any of them."""
    rotations: dict[str, Any]
    """Rotations of the tokens and of the query, as ``sparse_decode`` takes them; empty for none."""


class ChunkPart(NamedTuple):
    """A set of tokens that a chunk of a prefill reads, with queries and keys as they meet."""

    query: torch.Tensor
    """[batch, q_heads, queries, head_dim], rotated."""
    keys: torch.Tensor
    """[batch, kv_heads, n, head_dim], rotated; finite, also where no query reads them."""
    values: torch.Tensor
    """[batch, kv_heads, n, head_dim]; finite, as the keys."""
    is_read: torch.Tensor
    """bool [batch, queries, n]: which query reads which token."""


def attend_from_chunk(parts: Sequence[ChunkPart], layer: SparseLayer, scale: float) -> torch.Tensor:
    """Attend from a chunk's queries to disjoint sets of tokens, each in its own rotation, in one softmax.

    The channels of the rotations stand side by side. A key has zeros in those of the other parts, so its product with
    the wide query is the one in its own rotation, and one attention serves all parts.

    Returns
    -------
    torch.Tensor
        [batch, q_heads, queries, head_dim], in the dtype of the layer's keys. Rows of queries that read nothing,
        padding, are finite and mean nothing.
    """
    dtype = layer.keys.dtype
    keys = []
    for own in parts:
        turned = own.keys.to(dtype)
        blank = torch.zeros_like(turned)
        keys.append(torch.cat([turned if part is own else blank for part in parts], dim=-1))
    is_read = torch.cat([part.is_read for part in parts], dim=2)
    return stock_attention(
        torch.cat([part.query.to(dtype) for part in parts], dim=-1),
        torch.cat(keys, dim=2),
        torch.cat([part.values for part in parts], dim=2),
        scale,
        (is_read | ~is_read.any(2, keepdim=True)).unsqueeze(1),  # a softmax over nothing would be NaN
        layer.take_sinks(),
    )


def attend_to_parts(parts: Sequence[Part], layer: SparseLayer, scale: float) -> torch.Tensor:
    """Attend to disjoint sets of a layer's tokens in one softmax, and count the step once in ``layer.counter``.

    Returns
    -------
    torch.Tensor
        [batch, q_heads, head_dim], in the dtype of the queries.
    """
    totals, merged = layer.counter.totals, []
    for number, (query, selection, rotations) in enumerate(parts):
        counter = torch.zeros_like(totals) if number else totals
        out, lse = sparse_decode(
            query,
            layer.keys,
            layer.values,
            selection.block_indices,
            selection.block_counts,
            layer.seq_start,
            layer.seq_end,
            block_size=selection.block_size,
            scale=scale,
            counter=counter,
            finished=layer.finished,
            **rotations,
        )
        if number:
            totals[0] += counter[0]
        merged.append((out.unsqueeze(1), lse.unsqueeze(1)))
    output, total = merge_attention(merged)
    return layer.with_sinks(output, total).to(parts[0].query.dtype)


def merge_attention(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention to disjoint sets of tokens by their log-sum-exp, as split-KV decoding does.

    Parameters
    ----------
    parts
        Outputs and log-sum-exps of the scaled scores, [batch, n, q_heads, head_dim] and [batch, n, q_heads] each: n
        sets of tokens, of which those without tokens have -inf.

    Returns
    -------
    tuple of torch.Tensor
        Output [batch, q_heads, head_dim], in the dtype of the log-sum-exps, and log-sum-exp [batch, q_heads]; zeros and
        -inf where no set has a token.
    """
    sums = torch.cat([lse for _, lse in parts], dim=1)
    outputs = torch.cat([out for out, _ in parts], dim=1)
    total = sums.logsumexp(dim=1)
    lowest = torch.finfo(total.dtype).min  # -inf minus -inf would be NaN
    weights = (sums - total.clamp_min(lowest).unsqueeze(1)).exp()
    return (weights.unsqueeze(3) * outputs).sum(dim=1), total
