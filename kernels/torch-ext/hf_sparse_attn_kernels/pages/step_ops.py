"""The ops of a decode step that append a token and choose pages."""

import torch

from .._check import check_budget, check_buffers, check_counters
from .._op import op, selection_output
from .checks import check_step


@op(
    launcher="step",
    writes=("keys", "values", "page_min", "page_max", "page_exponent", "channel_exponent", "counter", "finished"),
)
def append_and_select(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_blocks: int,
    sink_blocks: int = 0,
    recent_blocks: int = 0,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    statistic: str = "minmax",
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append one token to every row, update its page's bounds, and choose the pages to read.

    The selection step of Quest's decoding (arXiv 2406.10774, section 3) as one op: writes `new_key` and `new_value` to
    buffer position seq_end[b] - 1, then does `page_bounds` with num_new=1, `page_scores` and `select_blocks`. A row
    with seq_end <= seq_start appends and selects nothing.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    new_key, new_value : torch.Tensor
        The token to append [batch, kv_heads, head_dim], of the dtype of `query`.
    keys, values : torch.Tensor
        Buffers to write to [batch, kv_heads, capacity, head_dim], of the dtype of `query`. The last
        stride is 1, the others are free.
    page_min, page_max : torch.Tensor
        Bounds to update [batch, kv_heads, max_pages, head_dim], of the dtype of `query` or int8;
        max_pages * page_size >= capacity. On entry they are those of the row without the new token. The step may only
        widen the bounds of the newest page, so after shortening a row call `page_bounds` first.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens, the new one included, are at
        seq_start[b] .. seq_end[b] - 1.
    page_size : int
        Tokens per page and per selected block, a power of two.
    max_blocks : int
        Maximum number of pages to choose per row and KV head, at least 1.
    sink_blocks, recent_blocks : int
        Number of first and last pages of the row that are always chosen; together at most `max_blocks`.
        `recent_blocks` is at least 1: the page being filled is always read.
    scale : float, optional
        As for `page_scores`.
    group_reduce : str
        As for `page_scores`.
    num_pages : int, optional
        As for `page_scores`.
    page_exponent, channel_exponent : torch.Tensor, optional
        Only with int8 bounds: int8 [batch, kv_heads, max_pages] and [batch, kv_heads, head_dim], updated as
        `page_bounds` does.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [2] += the bytes of scored bounds and exponents.
    finished : torch.Tensor, optional
        Scratch counters, int32 [batch, kv_heads]; zero on entry and exit; shareable within a stream. None allocates
        them, which takes a launch.
    statistic : {"minmax", "cuboid_mean", "representative"}
        As for `page_bounds`. "minmax" widens the bounds of the new token's page; the others are not incremental, so
        they are computed again from all keys of that page.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_blocks], ascending, then -1.
    block_counts : torch.Tensor
        int32 [batch, kv_heads].

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_buffers(query, keys, values)
    check_step(
        query,
        (new_key, new_value),
        keys,
        (page_min, page_max),
        (page_exponent, channel_exponent),
        (seq_start, seq_end),
        page_size=page_size,
        scale=scale,
        group_reduce=group_reduce,
        num_pages=num_pages,
        statistic=statistic,
    )
    check_budget(max_blocks, sink_blocks, recent_blocks, least_recent=1)
    check_counters(counter, finished, query, keys.shape[1])
    return selection_output(query, keys.shape[0], keys.shape[1], max_blocks)


@op(
    launcher="step_rank",
    writes=("keys", "values", "page_min", "page_max", "page_exponent", "channel_exponent", "counter"),
)
def append_and_rank(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_blocks: int | None = None,
    sink_blocks: int = 0,
    recent_blocks: int = 1,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    statistic: str = "minmax",
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append one token to every row, update its page's bounds, and list the pages in the order in which to read them.

    The ranking step of Progressive Sparse Attention (arXiv 2503.00392, section 4) as one op: writes `new_key` and
    `new_value` to buffer position seq_end[b] - 1, then does `page_bounds` with num_new=1, `page_scores` and
    `rank_blocks`. A row with seq_end <= seq_start appends and lists nothing.

    Parameters
    ----------
    query, new_key, new_value, keys, values, page_min, page_max, seq_start, seq_end : torch.Tensor
        As for `append_and_select`: after shortening a row, call `page_bounds` first.
    page_size : int
        Tokens per page and per listed block, a power of two.
    max_blocks : int, optional
        Maximum number of pages to list per row and KV head, at least 1. Default: `num_pages`.
    sink_blocks, recent_blocks : int
        Number of first and last pages of the row that come before all others; together at most `max_blocks`.
        `recent_blocks` is at least 1: the page being filled is always read.
    scale, group_reduce, num_pages, page_exponent, channel_exponent, counter, statistic
        As for `append_and_select`.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_order : torch.Tensor
        int32 [batch, kv_heads, max_blocks], as `rank_blocks` returns it.
    block_counts : torch.Tensor
        int32 [batch, kv_heads].

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_buffers(query, keys, values)
    check_step(
        query,
        (new_key, new_value),
        keys,
        (page_min, page_max),
        (page_exponent, channel_exponent),
        (seq_start, seq_end),
        page_size=page_size,
        scale=scale,
        group_reduce=group_reduce,
        num_pages=num_pages,
        statistic=statistic,
    )
    num_pages = page_min.shape[2] if num_pages is None else num_pages
    max_blocks = num_pages if max_blocks is None else max_blocks
    check_budget(max_blocks, sink_blocks, recent_blocks, least_recent=1)
    check_counters(counter, None, query, keys.shape[1])
    return selection_output(query, keys.shape[0], keys.shape[1], max_blocks)
