"""The ops that attend to the KV cache."""

import torch

from .._check import (
    BUFFER_AXES,
    check_at_least,
    check_buffers,
    check_counters,
    check_dims,
    check_float,
    check_group,
    check_keys_and_values,
    check_last_stride,
    check_rope,
    check_scale,
    check_selection,
    check_sequence,
)
from .._op import op, output
from .._reference import compute_dtype


@op(launcher="decode", writes=("counter", "finished"))
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
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query token per row to the selected blocks of the KV cache only.

    The approximate attention of Quest (arXiv 2406.10774, section 3), with the split-KV decoding of Flash-Decoding. With
    `rope_cos` and `rope_sin`, the attention of TokenSelect (arXiv 2411.02886): keys are cached before RoPE, and
    selected tokens are rotated to consecutive slots. Query head h reads KV head h // group,
    group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. Positions
        outside a row's valid tokens are never used.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_blocks], without duplicates, as `select_blocks` returns them; or
        [batch, 1, max_blocks]: one selection for all KV heads.
    block_counts : torch.Tensor
        int32 [batch, kv_heads] or [batch, 1]: number of leading entries of `block_indices` to read; may be 0.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1; 1 selects single tokens.
    rope_cos, rope_sin : torch.Tensor, optional
        float32 [slots, head_dim // 2], slots >= max_blocks, contiguous: cosines and sines of RoPE's angles. Both or
        neither; with them `query` and `keys` are those before RoPE, and block_size is 1. The token of entry i of
        `block_indices` is rotated to slot i, the query to the slot of the last entry, which is its own token.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [0] += the tokens read, over rows and KV heads, [1] += those that dense attention
        reads, [3] += 1.
    finished : torch.Tensor, optional
        Scratch counters, int32 [batch, kv_heads]; zero on entry and exit; shareable within a stream. None allocates
        them, which takes a launch.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros where nothing is selected.
    lse : torch.Tensor
        Log-sum-exp of the scaled scores, natural logarithm: float32 [batch, q_heads] (float64 for float64); -inf where
        nothing is selected.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_buffers(query, keys, values)
    check_selection(query, keys, block_indices, block_counts)
    check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_scale(scale)
    check_at_least("block_size", block_size, 1)
    check_rope(rope_cos, rope_sin, query, "max_blocks", block_indices.shape[2])
    if rope_cos is not None and block_size != 1:
        raise ValueError(f"block_size={block_size}; allowed with rope_cos: 1")
    check_counters(counter, finished, query, keys.shape[1])
    return output(query, query.shape, query.dtype), output(query, query.shape[:2], compute_dtype(query.dtype))


@op(launcher="decode", writes=("counter", "finished"))
def dense_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None = None,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query token per row to all of the row's valid tokens.

    Softmax attention over a preallocated KV cache without a mask: the kernel reads each row's range. Query head h reads
    KV head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`. The last stride
        is 1, the others are free. Positions outside a row's valid tokens are never used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [0] += the tokens read, over rows and KV heads, [1] += those that dense attention
        reads, [3] += 1.
    finished : torch.Tensor, optional
        Scratch counters, int32 [batch, kv_heads]; zero on entry and exit; shareable within a stream. None allocates
        them, which takes a launch.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros for a row without tokens.
    lse : torch.Tensor
        Log-sum-exp of the scaled scores, natural logarithm: float32 [batch, q_heads] (float64 for float64); -inf for a
        row without tokens.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_buffers(query, keys, values)
    check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_scale(scale)
    check_counters(counter, finished, query, keys.shape[1])
    return output(query, query.shape, query.dtype), output(query, query.shape[:2], compute_dtype(query.dtype))


@op(launcher="decode")
def dense_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last few tokens of each row to all of the row's valid tokens, causally.

    Made for few queries over a long cache, such as the verification of a draft. The query heads of a group and the
    tokens share one read of K and V, as the heads do in the split-KV decoding of Flash-Decoding: 64 at a time (32 with
    more than 128 channels; half as many in float32), and further ones in further launches. The buffers already hold the
    K and V of these tokens. Query head h reads KV head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, queries, head_dim]: the last `queries` tokens of the rows, at positions
        seq_end - queries .. seq_end - 1; float32, bfloat16 or float16 (float64 in the reference).
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. Positions
        outside a row's valid tokens are never used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1. Queries
        before seq_start[b] are padding.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, queries, head_dim], of the dtype of `query`; zeros for padding.
    lse : torch.Tensor
        Log-sum-exp of the scaled scores, natural logarithm: float32 [batch, q_heads, queries] (float64 for float64);
        -inf for padding.

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
    check_group(query.shape[1], keys.shape[1])
    check_keys_and_values(query, keys, values)
    check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_scale(scale)
    return output(query, query.shape, query.dtype), output(query, query.shape[:3], compute_dtype(query.dtype))


@op(launcher="prefill")
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
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from a chunk of the prompt to tokens selected before it and, causally, to the chunk itself.

    The chunked prefill of TokenSelect (arXiv 2411.02886). The buffers already hold the chunk's keys and values. With
    `rope_cos` and `rope_sin`, the selected tokens and the chunk are rotated to consecutive slots. Query head h reads KV
    head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, queries, head_dim]: the last `queries` tokens of the rows, at positions
        seq_end - queries .. seq_end - 1; float32, bfloat16 or float16 (float64 in the reference), the last stride is 1.
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. Positions
        outside a row's valid tokens are never used.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, n], or [batch, 1, n] for all KV heads: single tokens before the chunk, counted from the
        row's first, without duplicates.
    block_counts : torch.Tensor
        int32 [batch, kv_heads] or [batch, 1]: number of leading entries of `block_indices` to read; may be 0.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1. Queries
        before seq_start[b] are padding; such a row has no tokens before the chunk, and its block_counts are 0.
    rope_cos, rope_sin : torch.Tensor, optional
        float32 [slots, head_dim // 2], slots >= n + queries, contiguous: cosines and sines of RoPE's angles. Both or
        neither; with them `query` and `keys` are those before RoPE. The token of entry i of `block_indices` is rotated
        to slot i, the chunk's valid tokens and their queries to the slots from block_counts on.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, queries, head_dim], of the dtype of `query`; zeros for padding.
    lse : torch.Tensor
        Log-sum-exp of the scaled scores, natural logarithm: float32 [batch, q_heads, queries] (float64 for float64);
        -inf for padding.

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
    check_selection(query, keys, block_indices, block_counts)
    check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_scale(scale)
    check_rope(rope_cos, rope_sin, query, "n + queries", block_indices.shape[2] + query.shape[2])
    return output(query, query.shape, query.dtype), output(query, query.shape[:3], compute_dtype(query.dtype))
