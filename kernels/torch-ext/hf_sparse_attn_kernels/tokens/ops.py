"""The ops that choose single tokens, one set for all heads."""

import torch

from .._check import (
    check_at_least,
    check_contiguous,
    check_counters,
    check_device,
    check_dims,
    check_dtype,
    check_float,
    check_is_tensor,
    check_last_stride,
    check_rope,
    check_sequence,
    check_shape,
)
from .._op import op, output, selection_output
from .._reference import compute_dtype
from .checks import check_budget, check_cache, check_scoring


@op(launcher="votes")
def token_votes(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    vote: str = "soft",
    max_tokens: int | None = None,
    num_tokens: int | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Sum the query heads' votes for the tokens of each row's KV cache.

    TokenSelect (arXiv 2411.02886): its head soft vote and the two alternatives that it compares. The candidates of a
    row of n tokens are its tokens sink_tokens to n - recent_tokens - 1. Query head h reads KV head h // group,
    group = q_heads // kv_heads. Its score for a token is q_h.k, without a factor.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys : torch.Tensor
        Buffer [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. Tokens that are no
        candidates are never used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    sink_tokens, recent_tokens : int
        Number of first and last tokens of the row that are no candidates.
    vote : {"soft", "logits", "head"}
        "soft": the softmax of a head's scores over the candidates, summed over heads. "logits": the scores, summed over
        heads. "head": the number of heads that have the token among their max_tokens - sink_tokens - recent_tokens
        highest-scoring candidates; the lower index wins among equal scores.
    max_tokens : int, optional
        Required for "head": more than sink_tokens + recent_tokens.
    num_tokens : int, optional
        Upper bound on the row lengths, known to the host; tokens beyond it are ignored. Default: capacity.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    torch.Tensor
        float32 [batch, num_tokens] (float64 for float64): column t is the row's token t, counted from seq_start; -inf
        for tokens that are no candidates.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_scoring(query, keys, vote, num_tokens)
    check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_at_least("sink_tokens", sink_tokens, 0)
    check_at_least("recent_tokens", recent_tokens, 0)
    if max_tokens is not None:
        check_budget(max_tokens, sink_tokens, recent_tokens)
    elif vote == "head":
        raise ValueError("max_tokens=None; allowed with vote='head': an int, the number of tokens a head votes for")
    num_tokens = keys.shape[2] if num_tokens is None else num_tokens
    return output(query, (query.shape[0], num_tokens), compute_dtype(query.dtype))


@op(
    launcher="select",
    writes=("cached_query", "cached_tokens", "cached_valid", "counter", "reuse_counter", "finished"),
)
def select_tokens(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    vote: str = "soft",
    pool_size: int = 0,
    num_tokens: int | None = None,
    cached_query: torch.Tensor | None = None,
    cached_tokens: torch.Tensor | None = None,
    cached_valid: torch.Tensor | None = None,
    threshold: float = 1.0,
    counter: torch.Tensor | None = None,
    reuse_counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the tokens to read, one set for all heads: the first and last of the row, then those with most votes.

    TokenSelect (arXiv 2411.02886): token-level selection by the head soft vote, and its Selection Cache. A row of at
    most `max_tokens` tokens chooses all of them without reading a key. Longer rows choose
    num_voted = max_tokens - sink_tokens - recent_tokens candidates by `token_votes`; the lower index wins among equal
    votes, and NaN ranks with -inf.

    Selection cache: with `threshold` below 1 and the three cached tensors, a row whose query points almost in the
    direction of its last selecting query reuses the voted tokens of that selection, without reading a key. First and
    last tokens are always the current ones. The device decides all of this.

    Keys are read once. Votes are known only after the last key, so the kernels store a float32 for each query head and
    token of the capacity (or `num_tokens`), and one vote for each token.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys : torch.Tensor
        Buffer [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. Tokens that are no
        candidates are never used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    max_tokens : int
        Maximum number of tokens to choose per row, more than sink_tokens + recent_tokens.
    sink_tokens, recent_tokens : int
        Number of first and last tokens of the row that are always chosen.
    vote : {"soft", "logits", "head"}
        As for `token_votes`.
    pool_size : int
        0, or an odd number: width of a max-pooling of the votes. A candidate then counts with the highest vote within
        pool_size // 2 tokens.
    num_tokens : int, optional
        Upper bound on the row lengths, known to the host; tokens beyond it are ignored. Default: capacity.
    cached_query, cached_tokens, cached_valid : torch.Tensor, optional
        The selection cache, all or none, written in place: shape and dtype of `query`; int32 [batch, num_voted]; int32
        [batch], 0 for rows without a selection to reuse. Set `cached_valid` to 0 for a row that does not continue the
        previous one.
    threshold : float
        Minimum cosine between `query` and `cached_query`, over all heads, for a selection to be reused. 1 or more never
        reuses one and does not touch the cache. A query of norm 0 never reuses one either.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [2] += the bytes of keys read.
    reuse_counter : torch.Tensor, optional
        int64 [2], added to in place: [0] += the rows that reused a selection, [1] += the rows with more than
        `max_tokens` tokens.
    finished : torch.Tensor, optional
        Scratch counters, int32 [batch, kv_heads]; zero on entry and exit; shareable within a stream. None allocates
        them, which takes a launch.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_indices : torch.Tensor
        int32 [batch, 1, max_tokens], ascending, then -1: the chosen tokens, counted from seq_start, for all KV heads.
    block_counts : torch.Tensor
        int32 [batch, 1], min(max_tokens, the row's length).

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_scoring(query, keys, vote, num_tokens)
    check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    check_at_least("sink_tokens", sink_tokens, 0)
    check_at_least("recent_tokens", recent_tokens, 0)
    check_budget(max_tokens, sink_tokens, recent_tokens)
    check_at_least("pool_size", pool_size, 0)
    if pool_size > 0 and pool_size % 2 == 0:
        raise ValueError(f"pool_size={pool_size}; allowed: 0, or an odd number")
    check_cache(query, cached_query, cached_tokens, cached_valid, max_tokens - sink_tokens - recent_tokens)
    check_counters(counter, finished, query, keys.shape[1])
    if reuse_counter is not None:
        check_dtype("reuse_counter", reuse_counter, torch.int64)
        check_shape("reuse_counter", reuse_counter, "2", (2,))
        check_device("reuse_counter", reuse_counter, "query", query)
        check_contiguous("reuse_counter", reuse_counter)
    return selection_output(query, query.shape[0], 1, max_tokens)


@op(launcher="mean_query")
def mean_query(
    query: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    *,
    first_slot: int,
    impl: str | None = None,
) -> torch.Tensor:
    """Average a chunk's queries, rotated to consecutive slots, into the query that selects for the chunk.

    TokenSelect (arXiv 2411.02886), selection for a chunk of the prefill. Query i is rotated to slot first_slot + i, or
    to the last slot of a shorter table.

    Parameters
    ----------
    query : torch.Tensor
        Before RoPE, [batch, q_heads, queries, head_dim]; float32, bfloat16 or float16 (float64 in the reference); the
        last stride is 1.
    rope_cos, rope_sin : torch.Tensor
        float32 [slots, head_dim // 2], contiguous: cosines and sines of RoPE's angles.
    first_slot : int
        The first query's slot.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`: rotated and summed in float32, rounded once.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("query", query, "batch, q_heads, queries, head_dim")
    check_float("query", query)
    check_last_stride("query", query)
    check_is_tensor("rope_cos", rope_cos)
    check_is_tensor("rope_sin", rope_sin)
    check_rope(rope_cos, rope_sin, query, "1", 1)
    check_at_least("first_slot", first_slot, 0)
    return output(query, (*query.shape[:2], query.shape[3]), query.dtype)
