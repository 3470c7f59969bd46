"""Oracles of TokenSelect's results: votes in float64, attention to the chosen tokens in float32."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from op_bench.oracle import ROUNDINGS, Mismatch, attention, check_output
from op_bench.squeezed_workload import SqueezedLayer
from op_bench.token_workload import TokenLayer, chunk_vote, rotated
from op_bench.workload import DTYPE

TOKENS_AT_ONCE = 1 << 17
"""Number of keys held in float64 at a time."""
ChunkLayer: TypeAlias = TokenLayer | SqueezedLayer
"""A layer in a chunk of the prefill, whose queries are the newest tokens'."""


def check_voting(found: torch.Tensor, layer: TokenLayer) -> None:
    """Raise unless ``found`` is the query rotated for the vote, or a chunk's mean rotated query, rounded once."""
    cos, sin, recent = layer.cos.double(), layer.sin.double(), layer.settings.recent_tokens
    if layer.shape.queries == 1:
        truth = rotated(layer.query, cos[recent], sin[recent])
    else:
        truth = chunk_vote(layer.query, cos, sin, recent)
    allowed = torch.finfo(DTYPE).eps * truth.abs() + 1e-5
    if not bool(((found.double() - truth).abs() <= allowed).all()):  # NaN is an error too
        raise Mismatch("voting query: not the rotated query's mean" if layer.shape.queries > 1 else "voting query")


def soft_votes(voting: torch.Tensor, layer: TokenLayer) -> tuple[torch.Tensor, float]:
    """Return the votes for the candidates, float64 [batch, candidates], and their largest absolute q.k."""
    settings = layer.settings
    candidates = slice(settings.sink_tokens, layer.choice_length - settings.recent_tokens)
    largest, rows = 0.0, []
    for row in range(layer.shape.batch):
        votes: torch.Tensor | float = 0.0
        for head, queries in enumerate(voting[row].double().split(layer.shape.group)):
            parts = layer.keys[row, head, candidates].split(TOKENS_AT_ONCE)
            scores = torch.cat([queries @ part.double().T for part in parts], dim=1)
            largest = max(largest, float(scores.abs().max()))
            votes = votes + scores.softmax(dim=1).sum(dim=0)
        rows.append(votes)
    return torch.stack(rows), largest


def check_choice(indices: torch.Tensor, counts: torch.Tensor, layer: TokenLayer) -> torch.Tensor:
    """Check the form of a selection and return its tokens chosen by vote.

    A selection has ``max_tokens`` tokens, ascending, including the first and last ones that are always read.
    """
    settings, batch = layer.settings, layer.shape.batch
    if indices.shape != (batch, 1, settings.max_tokens) or not bool((counts == settings.max_tokens).all()):
        raise Mismatch(f"selection: not {settings.max_tokens} tokens in every row")
    if not bool((indices[..., 1:] > indices[..., :-1]).all()):
        raise Mismatch("selection: not ascending")
    first, last = settings.sink_tokens, settings.recent_tokens
    every = torch.arange(layer.choice_length, device=indices.device)
    of_row = indices[:, 0].long()
    if not bool((of_row[:, :first] == every[:first]).all() and (of_row[:, -last:] == every[-last:]).all()):
        raise Mismatch(f"selection: not the first {first} and the last {last} tokens, which are always read")
    return of_row[:, first:-last]


def check_votes(indices: torch.Tensor, counts: torch.Tensor, voting: torch.Tensor, layer: TokenLayer) -> None:
    """Raise if a token left out has more votes than a chosen one.

    Votes tie if ``ROUNDINGS`` roundings of q.k in float32 could swap them.
    """
    chosen = check_choice(indices, counts, layer) - layer.settings.sink_tokens
    votes, largest = soft_votes(voting, layer)
    is_chosen = torch.zeros_like(votes, dtype=torch.bool).scatter_(1, chosen, True)
    least = votes.masked_fill(~is_chosen, float("inf")).min(dim=1)[0]
    most = votes.masked_fill(is_chosen, float("-inf")).max(dim=1)[0]
    tied = math.expm1(2 * ROUNDINGS * torch.finfo(torch.float32).eps * (1 + largest))
    if not bool((least * (1 + tied) >= most).all()):
        worst = float((most / least).max()) - 1
        raise Mismatch(f"selection: a token left out has {worst:.2e} more votes than one chosen, ties to {tied:.2e}")


def check_kept_choice(indices: torch.Tensor, counts: torch.Tensor, layer: TokenLayer) -> None:
    """Raise unless the selection cache's tokens were reused."""
    if not torch.equal(check_choice(indices, counts, layer), layer.cached_tokens.long()):
        raise Mismatch("selection: not the cached tokens")


def check_sparse_output(
    found: torch.Tensor, layer: TokenLayer, block_indices: torch.Tensor, block_counts: torch.Tensor
) -> None:
    """Raise unless ``found`` is attention to the chosen tokens and the chunk, all rotated to their slots."""
    count, queries, kv_heads = int(block_counts.min()), layer.shape.queries, layer.shape.kv_heads
    tokens = block_indices[:, 0, :count].long()
    if queries > 1:
        chunk = torch.arange(layer.choice_length, layer.shape.length, device=tokens.device)
        tokens = torch.cat([tokens, chunk.expand(len(tokens), -1)], dim=1)
    index = tokens[:, None, :, None].expand(-1, kv_heads, -1, layer.shape.head_dim)
    slots = slice(0, tokens.shape[1])
    keys = rotated(layer.keys.gather(2, index), layer.cos[slots], layer.sin[slots]).to(layer.keys.dtype)
    values = layer.values.gather(2, index)
    own = slice(tokens.shape[1] - queries, tokens.shape[1]) if queries > 1 else tokens.shape[1] - 1
    query = rotated(layer.query, layer.cos[own], layer.sin[own]).to(layer.keys.dtype)
    attend = attention if queries == 1 else chunk_attention
    check_output(found, *(attend(query, keys, values, dtype) for dtype in (torch.float32, DTYPE)))


def check_dense_chunk(found: torch.Tensor, layer: ChunkLayer, *, is_causal: bool = True) -> None:
    """Raise unless ``found`` is attention from the chunk to all tokens without rotation, causal or unmasked."""
    name = f"dense, {'causal' if is_causal else 'to the end'}"
    for dtype in (torch.float32, DTYPE):
        if f"{name}, {dtype}" not in layer.expected:
            computed = chunk_attention(layer.query, layer.keys, layer.values, dtype, is_causal=is_causal)
            layer.expected[f"{name}, {dtype}"] = computed
    check_output(found, *(layer.expected[f"{name}, {dtype}"] for dtype in (torch.float32, DTYPE)))


def chunk_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, *, is_causal: bool = True
) -> torch.Tensor:
    """Compute plain attention of the last tokens in a dtype; return float32 [batch, q_heads, queries, head_dim]."""
    group, queries = query.shape[1] // keys.shape[1], query.shape[2]
    later = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
    outputs = []
    for head in range(query.shape[1]):
        scores = query[:, head].to(dtype) @ keys[:, head // group].to(dtype).transpose(1, 2)
        scores *= query.shape[-1] ** -0.5
        if is_causal:
            scores[..., -queries:].masked_fill_(later, float("-inf"))
        outputs.append(scores.softmax(dim=-1) @ values[:, head // group].to(dtype))
    return torch.stack(outputs, dim=1).float()
