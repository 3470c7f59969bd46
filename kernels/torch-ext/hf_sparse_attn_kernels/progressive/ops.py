"""The ops of Progressive Sparse Attention: blocks in order of rank, and attention to as many as the query needs."""

import torch

from .._check import (
    check_at_least,
    check_budget,
    check_buffers,
    check_counters,
    check_dims,
    check_int32,
    check_scale,
    check_scores,
    check_sequence,
)
from .._op import op, output, selection_output
from .._reference import compute_dtype
from .checks import check_rest, check_threshold


@op(launcher="rank")
def rank_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int | None = None,
    sink_blocks: int = 0,
    recent_blocks: int = 1,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the blocks of every row in the order in which to read them.

    The ranking of Progressive Sparse Attention (arXiv 2503.00392, section 4). The last `recent_blocks` blocks of the
    row come first, the newest before the older ones; then the first `sink_blocks`, ascending; then all others by
    descending score. Row b has n = ceil((seq_end[b] - seq_start[b]) / block_size) blocks, at most num_blocks. Both
    implementations return the same order: the lower index wins among equal scores, and NaN ranks with -inf.

    Parameters
    ----------
    scores : torch.Tensor
        float32 [batch, kv_heads, num_blocks] (also float64 in the reference), as `page_scores` returns them.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `scores`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1.
    max_blocks : int, optional
        Maximum number of blocks to list per row and KV head, at least 1. Default: num_blocks.
    sink_blocks, recent_blocks : int
        Number of first and last blocks of the row that come before all others; together at most `max_blocks`.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_order : torch.Tensor
        int32 [batch, kv_heads, max_blocks], best first, without duplicates, then -1. Block i holds the row's token
        i * block_size and the block_size - 1 after it, counted from seq_start.
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
    max_blocks = scores.shape[2] if max_blocks is None else max_blocks
    check_budget(max_blocks, sink_blocks, recent_blocks)
    return selection_output(scores, scores.shape[0], scores.shape[1], max_blocks)


@op(launcher="decode", writes=("counter", "finished"))
def progressive_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_order: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    microbatch: int,
    threshold: float,
    scale: float | None = None,
    rest: str = "least",
    forced_blocks: int = 0,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend from one query token per row to its best blocks, up to an estimated share of the attention weight.

    The attention of Progressive Sparse Attention (arXiv 2503.00392, section 4). The blocks of a row and KV head are
    read in the order of `block_order`, `microbatch` blocks at a time. After r blocks, with A_i the sum of exp(scale
    q.k) over the tokens of block i, each query head estimates the share of its attention weight that has been read:

        P = sum_i A_i / (sum_i A_i + R * blocks left)

    The sum is over the blocks read. All blocks of the row that have not been read are left, those that `block_order`
    leaves out included, and R estimates the A_i of each. With `rest="least"`, as in the paper, R is the least A_i of
    the complete blocks read: the newest block may have few tokens yet. With `rest="last"`, R is the least mean A_i of a
    microbatch read; its mean is over its complete blocks that are not among the first `forced_blocks` of the order. P
    is 0 while there is no such block. Reading stops after the first microbatch after which P exceeds
    `threshold` for all query heads of the group, or when all `block_counts` blocks are read. P never falls from one
    microbatch to the next. Query head h reads KV head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. Positions
        outside a row's valid tokens are never used.
    block_order : torch.Tensor
        int32 [batch, kv_heads, max_blocks], without duplicates, as `rank_blocks` returns it.
    block_counts : torch.Tensor
        int32 [batch, kv_heads]: number of leading entries of `block_order` that may be read; may be 0.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1.
    microbatch : int
        Blocks between two looks at P, at least 1.
    threshold : float
        Share of the attention weight to read, above 0 and at most 1. With 1, all `block_counts` blocks are read.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    rest : str, optional
        Estimate of what a block weighs that has not been read: "least" or "last", as above.
    forced_blocks : int, optional
        Leading entries of `block_order` that are there whatever they score, at least 0; for `rest="last"`.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [0] += the tokens attended to, over rows and KV heads, [1] += those that dense
        attention reads, [3] += 1.
    finished : torch.Tensor, optional
        Scratch counters, int32 [batch, kv_heads]; zero on entry and exit; shareable within a stream. None allocates
        them, which takes a launch.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`: attention to the blocks read and to nothing else; zeros
        where `block_counts` is 0.
    lse : torch.Tensor
        Log-sum-exp of the scaled scores of the blocks read, natural logarithm: float32 [batch, q_heads] (float64 for
        float64); -inf where `block_counts` is 0.
    read_counts : torch.Tensor
        int32 [batch, kv_heads]: number of leading entries of `block_order` that were read, a multiple of `microbatch`
        or all.

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
    batch, kv_heads = keys.shape[:2]
    check_dims("block_order", block_order, "batch, kv_heads, max_blocks")
    order_shape = (batch, kv_heads, block_order.shape[2])
    check_int32("block_order", block_order, "batch, kv_heads, max_blocks", order_shape, "query", query)
    check_int32("block_counts", block_counts, "batch, kv_heads", (batch, kv_heads), "query", query)
    check_sequence(seq_start, seq_end, batch, "query", query)
    check_at_least("block_size", block_size, 1)
    check_at_least("microbatch", microbatch, 1)
    check_threshold(threshold)
    check_scale(scale)
    check_rest(rest)
    check_at_least("forced_blocks", forced_blocks, 0)
    check_counters(counter, finished, query, kv_heads)
    return (
        output(query, query.shape, query.dtype),
        output(query, query.shape[:2], compute_dtype(query.dtype)),
        output(query, (batch, kv_heads), torch.int32),
    )
