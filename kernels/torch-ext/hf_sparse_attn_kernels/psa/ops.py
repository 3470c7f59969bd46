"""The op of a whole decode step of Progressive Sparse Attention."""

import torch

from .._check import check_at_least, check_budget, check_buffers, check_counters
from .._op import op, output
from .._reference import compute_dtype
from ..pages.checks import check_step
from ..progressive.checks import check_rest, check_threshold


@op(
    launcher="step",
    writes=("keys", "values", "page_min", "page_max", "page_exponent", "channel_exponent", "counter", "finished"),
    cluster="cluster",
)
def append_and_attend_progressively(
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
    microbatch: int,
    threshold: float,
    max_blocks: int | None = None,
    sink_blocks: int = 0,
    recent_blocks: int = 1,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
    rest: str = "least",
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    statistic: str = "minmax",
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append one token to every row, update its page's bounds, and attend to pages, best first, until enough is read.

    A decode step of Progressive Sparse Attention (arXiv 2503.00392, section 4) as one op: `append_and_rank`, then
    `progressive_decode` with blocks of `page_size` tokens, of which the first `sink_blocks` + `recent_blocks` of the
    order are forced. It can be one launch on thread-block clusters, which compute capability 9.0 and later have.

    Parameters
    ----------
    query, new_key, new_value, keys, values, page_min, page_max, seq_start, seq_end : torch.Tensor
        As for `append_and_rank`: after shortening a row, call `page_bounds` first.
    page_size, max_blocks, sink_blocks, recent_blocks, group_reduce, num_pages, page_exponent, channel_exponent
        As for `append_and_rank`, like `statistic`.
    microbatch, threshold, rest
        As for `progressive_decode`.
    scale : float, optional
        Factor on q.k, of scores and attention. Default: head_dim ** -0.5.
    counter : torch.Tensor, optional
        int64 [4], added to in place, as `append_and_rank` and `progressive_decode` do.
    finished : torch.Tensor, optional
        As for `progressive_decode`.
    impl : str, optional
        "triton", "reference" or "cluster". Defaults to `use_impl`, then Triton on CUDA, else the reference. Clusters
        serve bfloat16 with bounds in int8, of "cuboid_mean" or "minmax", head_dim 128, page_size 32, at most 8 query
        heads per KV head, a microbatch of at most 32 and num_pages of at most 65,536, all strides multiples of 16
        bytes.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros for a row without tokens.
    lse : torch.Tensor
        As of `progressive_decode`.
    block_order : torch.Tensor
        int32 [batch, kv_heads, max_blocks]: the first `read_counts` entries are the pages read, in order. Those after
        them may hold anything.
    read_counts : torch.Tensor
        int32 [batch, kv_heads], as of `progressive_decode`.

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
    num_pages = page_min.shape[2] if num_pages is None else num_pages
    max_blocks = num_pages if max_blocks is None else max_blocks
    check_budget(max_blocks, sink_blocks, recent_blocks, least_recent=1)
    check_at_least("microbatch", microbatch, 1)
    check_threshold(threshold)
    check_rest(rest)
    batch, kv_heads = keys.shape[:2]
    check_counters(counter, finished, query, kv_heads)
    return (
        output(query, query.shape, query.dtype),
        output(query, query.shape[:2], compute_dtype(query.dtype)),
        output(query, (batch, kv_heads, max_blocks), torch.int32),
        output(query, (batch, kv_heads), torch.int32),
    )
