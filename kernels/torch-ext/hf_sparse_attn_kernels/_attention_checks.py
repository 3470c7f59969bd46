"""What the ops that attend ask of their arguments; `_checks` gathers the checks of all ops."""

import torch

from . import _validate as validate

BUFFER_AXES = "batch, kv_heads, capacity, head_dim"


def check_query(query: torch.Tensor, kv_heads: int) -> None:
    """Check one query token per row against the KV heads."""
    validate.check_dims("query", query, "batch, q_heads, head_dim")
    validate.check_float("query", query)
    validate.check_group(query.shape[1], kv_heads)


def check_buffers(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Check one query token per row, and keys and values against it."""
    validate.check_dims("keys", keys, BUFFER_AXES)
    check_query(query, keys.shape[1])
    _keys_and_values(query, keys, values)


def check_counters(
    counter: torch.Tensor | None, finished: torch.Tensor | None, query: torch.Tensor, kv_heads: int
) -> None:
    """Check what an op adds to, and what its programs count in."""
    if counter is not None:
        validate.check_dtype("counter", counter, torch.int64)
        validate.check_shape("counter", counter, "4", (4,))
        validate.check_device("counter", counter, "query", query)
        validate.check_contiguous("counter", counter)
    if finished is not None:
        validate.check_dtype("finished", finished, torch.int32)
        validate.check_shape("finished", finished, "batch, kv_heads", (query.shape[0], kv_heads))
        validate.check_device("finished", finished, "query", query)
        validate.check_contiguous("finished", finished)


def _keys_and_values(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    shape = (query.shape[0], *keys.shape[1:3], query.shape[-1])
    for name, buffer in (("keys", keys), ("values", values)):
        validate.check_shape(name, buffer, BUFFER_AXES, shape)
        validate.check_like(name, buffer, "query", query)
        validate.check_last_stride(name, buffer)


def _selection(
    query: torch.Tensor, keys: torch.Tensor, block_indices: torch.Tensor, block_counts: torch.Tensor
) -> None:
    """Check a selection for every KV head, or one that all of them share."""
    batch, kv_heads = keys.shape[:2]
    validate.check_dims("block_indices", block_indices, "batch, kv_heads or 1, max_blocks")
    heads = 1 if block_indices.shape[1] == 1 else kv_heads
    shape = (batch, heads, block_indices.shape[2])
    validate.check_shape("block_indices", block_indices, "batch, kv_heads or 1, max_blocks", shape)
    validate.check_shape("block_counts", block_counts, "batch, heads of block_indices", (batch, heads))
    for name, tensor in (("block_indices", block_indices), ("block_counts", block_counts)):
        validate.check_dtype(name, tensor, torch.int32)
        validate.check_device(name, tensor, "query", query)


def check_rope(
    rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, query: torch.Tensor, slots_name: str, slots: int
) -> None:
    """Check a table of rotations with a row for each of the `slots` that may be taken."""
    if rope_cos is None or rope_sin is None:
        if rope_cos is not None or rope_sin is not None:
            name, other = ("rope_cos", "rope_sin") if rope_cos is None else ("rope_sin", "rope_cos")
            raise ValueError(f"{name} is None; allowed: a tensor, because {other} is one")
        return
    head_dim = query.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} of query; allowed with rope_cos: an even number")
    validate.check_dims("rope_cos", rope_cos, "slots, head_dim // 2")
    if rope_cos.shape[0] < slots:
        raise ValueError(f"slots={rope_cos.shape[0]} of rope_cos; allowed: at least {slots_name}={slots}")
    for name, table in (("rope_cos", rope_cos), ("rope_sin", rope_sin)):
        validate.check_dtype(name, table, torch.float32)
        validate.check_shape(name, table, "slots, head_dim // 2", (rope_cos.shape[0], head_dim // 2))
        validate.check_device(name, table, "query", query)
        validate.check_contiguous(name, table)


def sparse_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.sparse_decode`."""
    check_buffers(query, keys, values)
    _selection(query, keys, block_indices, block_counts)
    validate.check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    validate.check_at_least("block_size", block_size, 1)
    check_rope(rope_cos, rope_sin, query, "max_blocks", block_indices.shape[2])
    if rope_cos is not None and block_size != 1:
        raise ValueError(f"block_size={block_size}; allowed with rope_cos: 1")
    check_counters(counter, finished, query, keys.shape[1])


def dense_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.dense_decode`."""
    check_buffers(query, keys, values)
    validate.check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_counters(counter, finished, query, keys.shape[1])


def sparse_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.sparse_prefill`."""
    validate.check_dims("keys", keys, BUFFER_AXES)
    validate.check_dims("query", query, "batch, q_heads, queries, head_dim")
    validate.check_float("query", query)
    validate.check_last_stride("query", query)
    validate.check_group(query.shape[1], keys.shape[1])
    _keys_and_values(query, keys, values)
    _selection(query, keys, block_indices, block_counts)
    validate.check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_rope(rope_cos, rope_sin, query, "n + queries", block_indices.shape[2] + query.shape[2])
