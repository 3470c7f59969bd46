"""Argument checks shared by the ops on runs."""

import torch

from .._check import (
    BUFFER_AXES,
    check_dims,
    check_float,
    check_group,
    check_int32,
    check_keys_and_values,
    check_last_stride,
    check_like,
    check_sequence,
    check_shape,
)


def check_attention(
    query: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    context_start: torch.Tensor,
    run_starts: torch.Tensor,
    run_indices: torch.Tensor,
    run_counts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    token_order: torch.Tensor | None,
    query_axes: str,
) -> None:
    """Check all tensors that both ops read; `query_axes` names the dimensions of the query."""
    check_dims("keys", keys, BUFFER_AXES)
    check_dims("query", query, query_axes)
    check_float("query", query)
    check_group(query.shape[1], keys.shape[1])
    check_keys_and_values(query, keys, values)
    batch, kv_heads, _, head_dim = keys.shape
    check_dims("context_keys", context_keys, BUFFER_AXES)
    for name, buffer in (("context_keys", context_keys), ("context_values", context_values)):
        check_shape(name, buffer, BUFFER_AXES, (batch, kv_heads, context_keys.shape[2], head_dim))
        check_like(name, buffer, "query", query)
        check_last_stride(name, buffer)
    _check_runs(query, kv_heads, run_starts, run_indices, run_counts)
    check_int32("context_start", context_start, "batch", (batch,), "query", query)
    check_sequence(seq_start, seq_end, batch, "query", query)
    if token_order is not None:
        check_dims("token_order", token_order, "batch, kv_heads, slots")
        shape = (batch, kv_heads, token_order.shape[2])
        check_int32("token_order", token_order, "batch, kv_heads, slots", shape, "query", query)
        check_last_stride("token_order", token_order)


def _check_runs(
    query: torch.Tensor,
    kv_heads: int,
    run_starts: torch.Tensor,
    run_indices: torch.Tensor,
    run_counts: torch.Tensor,
) -> None:
    """Check the runs of the context and the chosen ones among them."""
    batch = query.shape[0]
    check_dims("run_indices", run_indices, "batch, kv_heads, runs")
    runs = run_indices.shape[2]
    check_int32("run_indices", run_indices, "batch, kv_heads, runs", (batch, kv_heads, runs), "query", query)
    check_int32("run_starts", run_starts, "batch, kv_heads, runs + 1", (batch, kv_heads, runs + 1), "query", query)
    check_last_stride("run_starts", run_starts)
    check_int32("run_counts", run_counts, "batch, kv_heads", (batch, kv_heads), "query", query)
