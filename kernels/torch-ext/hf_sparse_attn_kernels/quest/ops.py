"""The op of a whole decode step."""

import torch

from .._check import check_budget, check_buffers, check_counters
from .._op import op, output, selection_output
from .._reference import compute_dtype
from ..pages.checks import check_step


@op(
    launcher="step",
    writes=("keys", "values", "page_min", "page_max", "page_exponent", "channel_exponent", "counter", "finished"),
    cluster="cluster",
)
def append_and_attend(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append one token to every row, update its page's bounds, choose the pages to read, and attend to them.

    A decode step of Quest (arXiv 2406.10774, section 3) as one op: `append_and_select`, then `sparse_decode`. It can be
    one launch on thread-block clusters, which compute capability 9.0 and later have.

    Parameters
    ----------
    query, new_key, new_value, keys, values, page_min, page_max, seq_start, seq_end : torch.Tensor
        As for `append_and_select`: after shortening a row, call `page_bounds` first.
    page_size, max_blocks, sink_blocks, recent_blocks, group_reduce, num_pages, page_exponent, channel_exponent
        As for `append_and_select`, like `statistic`.
    scale : float, optional
        Factor on q.k, of scores and attention. Default: head_dim ** -0.5.
    counter : torch.Tensor, optional
        int64 [4], added to in place, as `append_and_select` and `sparse_decode` do.
    finished : torch.Tensor, optional
        As for `append_and_select`.
    impl : str, optional
        "triton", "reference" or "cluster". Defaults to `use_impl`; then, on CUDA, to clusters where they serve the call
        and were measured to be faster, else Triton; else the reference. Clusters serve bfloat16 with bounds in int8,
        head_dim 128, page_size 16, at most 8 query heads per KV head, max_blocks of at most 512 and num_pages of at
        most 65,536, all strides multiples of 16 bytes.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros for a row without tokens.
    lse : torch.Tensor
        As of `sparse_decode`.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_blocks], ascending, then -1.
    block_counts : torch.Tensor
        int32 [batch, kv_heads].

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, head_dim > 256 with Triton, or beyond the limits of clusters.
    RuntimeError
        impl="triton" or impl="cluster" cannot run here.
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
    out, lse = output(query, query.shape, query.dtype), output(query, query.shape[:2], compute_dtype(query.dtype))
    return out, lse, *selection_output(query, keys.shape[0], keys.shape[1], max_blocks)
