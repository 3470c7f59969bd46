"""The public ops that attend to the KV cache."""

from typing import Any

import torch

from ._runtime import call_op


def _attend(
    op: str, impl: str | None, *tensors: torch.Tensor, return_lse: bool, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    result = call_op(op, impl, *tensors, return_lse=return_lse, **options)
    if return_lse or isinstance(result, torch.Tensor):
        return result
    return result[0]  # under torch.compile the op always returns both


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
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query token per row to the selected blocks of the KV cache, and to nothing else.

    The approximate attention of Quest (arXiv 2406.10774, section 3), with the split-KV decoding of Flash-Decoding.
    With `rope_cos` and `rope_sin` that of TokenSelect (arXiv 2411.02886): keys are cached before RoPE, and the selected
    tokens are rotated as if they followed one another. Query head h reads KV head h // group,
    group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. What lies
        outside a row's valid tokens is never used.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_blocks], without duplicates, as `select_blocks` returns them; or
        [batch, 1, max_blocks]: one selection for all KV heads.
    block_counts : torch.Tensor
        int32 [batch, kv_heads] or [batch, 1]: how many leading entries of `block_indices` to read; may be 0.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1; 1 selects single tokens.
    rope_cos, rope_sin : torch.Tensor, optional
        float32 [slots, head_dim // 2], slots >= max_blocks, contiguous: cosines and sines of RoPE's angles. Both or
        none; with them `query` and `keys` are those before RoPE, and block_size is 1. The token of entry i of
        `block_indices` is rotated to slot i, the query to that of the last entry, which is its own token.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    return_lse : bool
        Also return the log-sum-exp of the scaled scores.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [0] += the tokens read, over rows and KV heads, [1] += those that dense attention
        reads, [3] += 1.
    finished : torch.Tensor, optional
        int32 [batch, kv_heads], zeros before and after: Triton programs count in it those that have finished. One may
        serve all ops of a stream. None makes one, which takes a launch.
    impl : {"triton", "reference"} or None
        None: what `use_impl` set, else Triton for CUDA tensors and the reference for others.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros where nothing is selected.
    lse : torch.Tensor
        Only with `return_lse`: float32 [batch, q_heads] (float64 for float64), natural logarithm; -inf where nothing
        is selected.

    Raises
    ------
    TypeError
        A dtype is not one of the above.
    ValueError
        A shape, stride, device or number is not as above, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    tensors = (query, keys, values, block_indices, block_counts, seq_start, seq_end)
    return _attend(
        "sparse_decode",
        impl,
        *tensors,
        block_size=block_size,
        rope_cos=rope_cos,
        rope_sin=rope_sin,
        scale=scale,
        return_lse=return_lse,
        counter=counter,
        finished=finished,
    )


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
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query token per row to all of the row's valid tokens.

    Softmax attention over a preallocated KV cache without a mask: each row's range is read on the device. Query head h
    reads KV head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`. Strides are free but for the last,
        which is 1. What lies outside a row's valid tokens is never used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    return_lse : bool
        Also return the log-sum-exp of the scaled scores.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [0] += the tokens read, over rows and KV heads, [1] += those that dense attention
        reads, [3] += 1.
    finished : torch.Tensor, optional
        int32 [batch, kv_heads], zeros before and after: Triton programs count in it those that have finished. One may
        serve all ops of a stream. None makes one, which takes a launch.
    impl : {"triton", "reference"} or None
        None: what `use_impl` set, else Triton for CUDA tensors and the reference for others.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros for a row without tokens.
    lse : torch.Tensor
        Only with `return_lse`: float32 [batch, q_heads] (float64 for float64), natural logarithm; -inf for a row
        without tokens.

    Raises
    ------
    TypeError
        A dtype is not one of the above.
    ValueError
        A shape, stride, device or number is not as above, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    tensors = (query, keys, values, seq_start, seq_end)
    return _attend(
        "dense_decode", impl, *tensors, scale=scale, return_lse=return_lse, counter=counter, finished=finished
    )


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
) -> torch.Tensor:
    """Attend from a chunk of the prompt to tokens selected before it and, causally, to the chunk itself.

    The chunked prefill of TokenSelect (arXiv 2411.02886): the chunk's keys and values are in the buffers already, and
    with `rope_cos` and `rope_sin` the selected tokens and the chunk are rotated as if they followed one another. Query
    head h reads KV head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, queries, head_dim]: the last `queries` tokens of the buffers' rows, at positions
        seq_end - queries .. seq_end - 1; float32, bfloat16 or float16 (float64 in the reference), the last stride is 1.
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. What lies
        outside a row's valid tokens is never used.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, n], or [batch, 1, n] for all KV heads: single tokens, counted from the row's first,
        all of them before the chunk, without duplicates.
    block_counts : torch.Tensor
        int32 [batch, kv_heads] or [batch, 1]: how many leading entries of `block_indices` to read; may be 0.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1. Queries
        before seq_start[b] are padding; such a row has no tokens before the chunk, and its block_counts are 0.
    rope_cos, rope_sin : torch.Tensor, optional
        float32 [slots, head_dim // 2], slots >= n + queries, contiguous: cosines and sines of RoPE's angles. Both or
        none; with them `query` and `keys` are those before RoPE. The token of entry i of `block_indices` is rotated to
        slot i, the chunk's valid tokens and their queries to the slots from block_counts on.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    impl : {"triton", "reference"} or None
        None: what `use_impl` set, else Triton for CUDA tensors and the reference for others.

    Returns
    -------
    torch.Tensor
        [batch, q_heads, queries, head_dim], of the dtype of `query`; zeros for padding.

    Raises
    ------
    TypeError
        A dtype is not one of the above.
    ValueError
        A shape, stride, device or number is not as above, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    tensors = (query, keys, values, block_indices, block_counts, seq_start, seq_end)
    result: torch.Tensor
    result = call_op("sparse_prefill", impl, *tensors, rope_cos=rope_cos, rope_sin=rope_sin, scale=scale)
    return result
