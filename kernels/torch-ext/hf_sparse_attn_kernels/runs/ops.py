"""The ops that attend to chosen runs of a clustered context and to the tokens after it."""

import torch

from .._check import check_counters, check_int32, check_last_stride, check_scale
from .._op import op, output
from .._reference import compute_dtype
from .checks import check_attention


@op(launcher="decode", writes=("counter",))
def runs_decode(
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
    *,
    token_order: torch.Tensor | None = None,
    context_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    counter: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query token per row to the chosen runs of its context and to the tokens after the context.

    Sparse attention to the keys of the clusters that score above a threshold: Squeezed Attention (arXiv
    2411.09688). The keys of a context lie in slots 0 .. n - 1, those of a cluster side by side. A run is a range of at
    most 16 slots of one cluster. The *tail*, everything after the context, is always read. Heads choose
    very different numbers of tokens, so the work is split by tokens and not by heads. Query head h reads KV head
    h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    context_keys, context_values : torch.Tensor
        Buffers [batch, kv_heads, context capacity, head_dim] of the contexts, of the dtype of `query`; the last stride
        is 1, the batch's may be 0: one context for all rows. They may be `keys` and `values`. Positions of tokens that
        are not chosen are never used.
    context_start : torch.Tensor
        int32 [batch], on the device of `query`: position of the context's first token.
    run_starts : torch.Tensor
        int32 [batch, kv_heads, runs + 1], ascending; the last stride is 1, the batch's may be 0. Run r covers slots
        run_starts[r] .. run_starts[r + 1] - 1, at most 16 of them. The last entry is n.
    run_indices : torch.Tensor
        int32 [batch, kv_heads, runs], without duplicates, as `select_runs` returns them: the chosen runs.
    run_counts : torch.Tensor
        int32 [batch, kv_heads]: number of leading entries of `run_indices` to read; may be 0.
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim] that hold the tail, of the dtype of `query`; the last stride is 1.
        Positions outside the tail are never used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's tail is at seq_start[b] .. seq_end[b] - 1; may be empty.
    token_order : torch.Tensor, optional
        int32 [batch, kv_heads, slots]; the last stride is 1, the batch's may be 0. Slot s holds the token at
        position context_start + token_order[s]. Default: at context_start + s.
    context_lengths : torch.Tensor, optional
        int32 [batch]: tokens of the contexts, for `counter` alone. Default: the last entries of `run_starts`.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [0] += the tokens read, over rows and KV heads, [1] += those that dense attention
        reads, [3] += 1.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros where there is nothing to read.
    lse : torch.Tensor
        Log-sum-exp of the scaled scores, natural logarithm: float32 [batch, q_heads] (float64 for float64); -inf where
        there is nothing to read.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride or device, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_attention(
        query,
        context_keys,
        context_values,
        context_start,
        run_starts,
        run_indices,
        run_counts,
        keys,
        values,
        seq_start,
        seq_end,
        token_order,
        "batch, q_heads, head_dim",
    )
    if context_lengths is not None:
        check_int32("context_lengths", context_lengths, "batch", (query.shape[0],), "query", query)
    check_scale(scale)
    check_counters(counter, None, query, keys.shape[1])
    return output(query, query.shape, query.dtype), output(query, query.shape[:2], compute_dtype(query.dtype))


@op(launcher="prefill")
def runs_prefill(
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
    *,
    token_order: torch.Tensor | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the user's input to the chosen runs of the context and, causally, to the tokens after the context.

    The prefill of Squeezed Attention (arXiv 2411.09688): all queries of a row share the runs of each KV
    head. Contexts, runs and the tail are those of `runs_decode`. The buffers already hold the keys and values of the
    input, the end of the tail.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, queries, head_dim]: the last `queries` tokens of the rows, at positions
        seq_end - queries .. seq_end - 1; float32, bfloat16 or float16 (float64 in the reference), the last stride is 1.
    context_keys, context_values, context_start : torch.Tensor
        As for `runs_decode`.
    run_starts, run_indices, run_counts : torch.Tensor
        As for `runs_decode`.
    keys, values : torch.Tensor
        As for `runs_decode`.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's tail is at seq_start[b] .. seq_end[b] - 1. Queries before
        seq_start[b] are padding.
    token_order : torch.Tensor, optional
        As for `runs_decode`.
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
        Invalid shape, stride or device, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_attention(
        query,
        context_keys,
        context_values,
        context_start,
        run_starts,
        run_indices,
        run_counts,
        keys,
        values,
        seq_start,
        seq_end,
        token_order,
        "batch, q_heads, queries, head_dim",
    )
    check_last_stride("query", query)
    check_scale(scale)
    return output(query, query.shape, query.dtype), output(query, query.shape[:3], compute_dtype(query.dtype))
