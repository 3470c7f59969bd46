"""The ops that update page bounds, score pages and select blocks."""

import torch

from .._check import (
    BUFFER_AXES,
    check_at_least,
    check_budget,
    check_dims,
    check_float,
    check_last_stride,
    check_page_size,
    check_query,
    check_scores,
    check_sequence,
)
from .._op import op, output, selection_output
from .._reference import compute_dtype
from .checks import BOUNDS_AXES, check_bounds, check_capacity, check_scoring, check_statistic


@op(launcher="bounds", writes=("page_min", "page_max", "page_exponent", "channel_exponent"))
def page_bounds(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    num_new: int,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
    statistic: str = "minmax",
    impl: str | None = None,
) -> None:
    """Update, in place, the bounds of the keys of every page with new tokens: a lower and an upper vector each.

    Page p of row b holds the buffer positions seq_start[b] + p * page_size and the page_size - 1 after it, cut at
    seq_end[b]. A page that holds one of the row's last `num_new` valid tokens is recomputed from all of its valid
    tokens. Other pages, and rows without valid tokens, do not change. Bounds thus do not depend on how a text is split
    into calls.

    `statistic` names what the bounds hold, elementwise over the page's n tokens:

    - "minmax": the minimum m and the maximum M (Quest, arXiv 2406.10774, section 3). They bound every key of the page,
      and a page's score bounds q.k of each. The scores of the other two are estimates.
    - "cuboid_mean": c - delta and c + delta, where c = (M + m) / 2 and delta = sum_t |c - k_t| / n (ArkVale, NeurIPS
      2024). This box lies within that of "minmax", and is half as wide if the keys are spread evenly.
    - "representative": the mean of the page's representative keys, twice: the lower vector equals the upper one. They
      are the 4 keys with the greatest k.mu, where mu is the mean of the page's keys; the lower index wins among equals,
      and a page of fewer tokens has only those. InfLLM (arXiv 2402.04617) adds q.k of its representatives, which is 4
      times q.k of their mean, and chooses the keys with the greatest mean q.k over the queries of a local window. A
      rebuilt or cropped cache has no queries, so here the keys of the page stand in for them.

    Means are computed in float32 (float64 for float64), each in one order of additions, the same in both
    implementations and for every number of tokens per call.

    Bounds in 8 bits are levels between -127 and 127, rounded outwards, so that they contain the exact bounds. Bound i
    of page p is its level times 2 ** (channel_exponent[i] + page_exponent[p]). Channel exponents come from the keys,
    whatever the statistic.

    - A row whose valid tokens are all new sets its channel exponents: c_i is the least with a_i <= 90 * 2 ** c_i, where
      a_i is the largest magnitude in the row of channel i and of its RoPE partner, (i + head_dim // 2) % head_dim.
      A key of that range fits 127 * 2 ** c_i after any rotation.
    - Other rows with more than one new token raise their channel exponents as far as these tokens need. If any rises,
      all pages of the row and KV head are recomputed. The bounds thus do not depend on how a text is split into calls.
      A single new token, as in a decode step, changes no channel exponent.
    - The page exponent is the least, from 0 up, that fits the page's bounds. It makes room for keys beyond that range.

    Parameters
    ----------
    keys : torch.Tensor
        Key buffer [batch, kv_heads, capacity, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
        The last stride is 1, the others are free. Positions outside a row's valid tokens are never used.
    page_min, page_max : torch.Tensor
        Bounds to update [batch, kv_heads, max_pages, head_dim], of the dtype of `keys` or int8;
        max_pages * page_size >= capacity.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `keys`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    page_size : int
        Tokens per page, a power of two.
    num_new : int
        Number of new tokens at the end of each row; more than the row holds means the whole row.
    page_exponent : torch.Tensor, optional
        Only with int8 bounds: int8 [batch, kv_heads, max_pages], updated in place; 0 to 60.
    channel_exponent : torch.Tensor, optional
        Only with int8 bounds: int8 [batch, kv_heads, head_dim], set or raised in place; -60 to 60.
    statistic : {"minmax", "cuboid_mean", "representative"}
        What the bounds hold. Bounds in the dtype of `keys` are exact for "minmax", else rounded to nearest.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("keys", keys, BUFFER_AXES)
    batch, kv_heads, capacity, head_dim = keys.shape
    check_float("keys", keys)
    check_last_stride("keys", keys)
    check_page_size(page_size)
    check_at_least("num_new", num_new, 0)
    check_dims("page_min", page_min, BOUNDS_AXES)
    shape = (batch, kv_heads, page_min.shape[2], head_dim)
    check_bounds(page_min, page_max, page_exponent, channel_exponent, shape, "keys", keys)
    check_capacity(page_min, capacity, page_size)
    check_sequence(seq_start, seq_end, batch, "keys", keys)
    check_statistic(statistic)


@op(launcher="scores")
def page_scores(
    query: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Compute an upper bound of q.k over each page, reduced over the query heads that share a KV head.

    Quest, arXiv 2406.10774, section 3: s_h(p) = scale * sum_i max(q_i m_i, q_i M_i), with m and M the bounds of page
    p. Query head h reads KV head h // group, group = q_heads // kv_heads. If `page_bounds` wrote another statistic
    than minimum and maximum, the same formula gives an estimate, not an upper bound.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    page_min, page_max : torch.Tensor
        Bounds [batch, kv_heads, max_pages, head_dim], of the dtype of `query` or int8; the last stride is 1.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    page_size : int
        Tokens per page, a power of two.
    scale : float, optional
        Default: head_dim ** -0.5.
    group_reduce : {"softmax", "mean", "max"}
        "softmax": log sum_h exp(s_h(p) - log sum_p' exp s_h(p')): each head's scores are normalised over the row's
        pages, then added. The logarithm keeps the order and avoids underflow and ties.
    num_pages : int, optional
        Number of leading pages to score, known to the host. Ops that append a token need an upper bound on the pages of
        every row. Default: max_pages.
    page_exponent, channel_exponent : torch.Tensor, optional
        Only with int8 bounds: as written by `page_bounds`, int8 [batch, kv_heads, max_pages] and
        [batch, kv_heads, head_dim].
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    torch.Tensor
        float32 [batch, kv_heads, num_pages] (float64 for float64); -inf for pages without a valid token.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("page_min", page_min, BOUNDS_AXES)
    kv_heads, max_pages = page_min.shape[1:3]
    check_query(query, kv_heads)
    batch, _, head_dim = query.shape
    shape = (batch, kv_heads, max_pages, head_dim)
    check_bounds(page_min, page_max, page_exponent, channel_exponent, shape, "query", query)
    check_sequence(seq_start, seq_end, batch, "query", query)
    check_page_size(page_size)
    check_scoring(group_reduce, num_pages, max_pages, scale)
    num_pages = max_pages if num_pages is None else num_pages
    return output(query, (batch, kv_heads, num_pages), compute_dtype(query.dtype))


@op(launcher="select")
def select_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
    sink_blocks: int = 0,
    recent_blocks: int = 0,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the blocks to read: the first and last of the row, then those with the highest scores.

    The top-K of Quest (arXiv 2406.10774, section 3), with always-read first and last blocks. Row b has
    n = ceil((seq_end[b] - seq_start[b]) / block_size) blocks, at most num_blocks. Both implementations choose the same
    blocks: the lower index wins among equal scores, and NaN ranks with -inf.

    Parameters
    ----------
    scores : torch.Tensor
        float32 [batch, kv_heads, num_blocks] (also float64 in the reference).
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `scores`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1.
    max_blocks : int
        Maximum number of blocks to choose per row and KV head, at least 1.
    sink_blocks, recent_blocks : int
        Number of first and last blocks of the row that are always chosen; together at most `max_blocks`.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_blocks], ascending, then -1. Block i holds the row's token i * block_size and the
        block_size - 1 after it, counted from seq_start.
    block_counts : torch.Tensor
        int32 [batch, kv_heads], min(max_blocks, n).

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, device or number.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_scores(scores)
    check_sequence(seq_start, seq_end, scores.shape[0], "scores", scores)
    check_at_least("block_size", block_size, 1)
    check_budget(max_blocks, sink_blocks, recent_blocks)
    return selection_output(scores, scores.shape[0], scores.shape[1], max_blocks)
