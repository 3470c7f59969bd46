"""The op that attends from blocks of queries to blocks of keys and to single columns."""

import torch

from .._check import (
    BUFFER_AXES,
    check_at_least,
    check_contiguous,
    check_device,
    check_dims,
    check_dtype,
    check_float,
    check_group,
    check_keys_and_values,
    check_last_stride,
    check_scale,
    check_sequence,
    check_shape,
)
from .._op import op, output
from .._reference import compute_dtype


@op(launcher="prefill")
def block_sparse_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    columns: torch.Tensor | None = None,
    column_counts: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally from the newest tokens to the key blocks of each block of queries, and to columns of all of them.

    The sparse prefill of MInference (arXiv 2407.02490, section 3.3), whose vertical lines are columns, and, with a
    `window`, that of a streaming head of DuoAttention (arXiv 2410.10819, section 3.1). The buffers already hold the
    queries' own keys and values. Tokens are counted from the first of their row, for queries and keys alike, and block
    i holds the tokens i * block_size to (i + 1) * block_size - 1. Query head h reads KV head h // group,
    group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, queries, head_dim]: the last `queries` tokens of the rows, at positions
        seq_end - queries .. seq_end - 1; float32, bfloat16 or float16 (float64 in the reference), the last stride is 1.
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. Positions
        outside a row's valid tokens are never used.
    block_indices : torch.Tensor
        int32 [batch, q_heads, query_blocks, n], contiguous: the key blocks that a block of queries attends to, without
        duplicates. Entry i of dimension 2 is for the i-th block that holds any of the row's queries. `query_blocks` is
        at least (queries + 2 * block_size - 2) // block_size, which serves queries that begin anywhere in a block.
    block_counts : torch.Tensor
        int32 [batch, q_heads, query_blocks], contiguous: number of leading entries of `block_indices` to read; may be
        0.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1. Queries
        before seq_start[b] are padding.
    block_size : int
        Tokens per block, a power of two of at least 16.
    columns : torch.Tensor, optional
        int32 [batch, q_heads, m], contiguous: single tokens that every query after them attends to as well, without
        duplicates. Those that a query attends to in its blocks anyway count once.
    column_counts : torch.Tensor, optional
        int32 [batch, q_heads], contiguous: number of leading entries of `columns` to read. With `columns`, or neither.
    window : int, optional
        Of the blocks, attend to the last `window` tokens only, the query's own included; at least 1. Default: no limit.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, queries, head_dim], of the dtype of `query`; zeros for padding, and for queries that attend to
        nothing.
    lse : torch.Tensor
        Log-sum-exp of the scaled scores, natural logarithm: float32 [batch, q_heads, queries] (float64 for float64);
        -inf for padding, and for queries that attend to nothing.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("keys", keys, BUFFER_AXES)
    check_dims("query", query, "batch, q_heads, queries, head_dim")
    check_float("query", query)
    check_last_stride("query", query)
    check_group(query.shape[1], keys.shape[1])
    check_keys_and_values(query, keys, values)
    check_at_least("block_size", block_size, 16)
    if block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size}; allowed: a power of two")
    check_dims("block_indices", block_indices, "batch, q_heads, query_blocks, n")
    least = (query.shape[2] + 2 * block_size - 2) // block_size
    check_at_least("query_blocks of block_indices", block_indices.shape[2], least)
    heads = query.shape[:2]
    lists = [("block_indices", block_indices, (*heads, *block_indices.shape[2:]), "batch, q_heads, query_blocks, n")]
    lists += [("block_counts", block_counts, (*heads, block_indices.shape[2]), "batch, q_heads, query_blocks")]
    if columns is not None and column_counts is not None:
        check_dims("columns", columns, "batch, q_heads, m")
        lists += [("columns", columns, (*heads, columns.shape[2]), "batch, q_heads, m")]
        lists += [("column_counts", column_counts, tuple(heads), "batch, q_heads")]
    elif columns is not None or column_counts is not None:
        name, other = ("columns", "column_counts") if columns is None else ("column_counts", "columns")
        raise ValueError(f"{name} is None; allowed: a tensor, because {other} is one")
    for name, tensor, shape, axes in lists:
        check_dtype(name, tensor, torch.int32)
        check_shape(name, tensor, axes, shape)
        check_device(name, tensor, "query", query)
        check_contiguous(name, tensor)
    if window is not None:
        check_at_least("window", window, 1)
    check_scale(scale)
    check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    return output(query, query.shape, query.dtype), output(query, query.shape[:3], compute_dtype(query.dtype))
