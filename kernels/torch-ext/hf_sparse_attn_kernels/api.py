"""The public ops: they check their arguments, then call the implementation asked for."""

import torch

from . import _validate as validate
from ._runtime import resolve_impl, run_op


def page_bounds(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    num_new: int,
    impl: str | None = None,
) -> None:
    """Update, in place, the elementwise minimum and maximum of the keys of every page with new tokens.

    Quest, arXiv 2406.10774, section 3. Page p of row b holds the buffer positions seq_start[b] + p * page_size and
    the page_size - 1 after it, cut at seq_end[b]. A page is recomputed, from all of its valid tokens, if it holds
    one of the row's last `num_new` valid tokens; other pages, and rows without valid tokens, stay as they are.

    Parameters
    ----------
    keys : torch.Tensor
        Key buffer [batch, kv_heads, capacity, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
        Strides are free but for the last, which is 1. What lies outside a row's valid tokens is never used.
    page_min, page_max : torch.Tensor
        Bounds to update [batch, kv_heads, max_pages, head_dim], of the dtype of `keys`;
        max_pages * page_size >= capacity.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `keys`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    page_size : int
        Tokens per page, a power of two.
    num_new : int
        How many tokens at the end of each row are new; more than the row holds means the whole row.
    impl : {"triton", "reference"} or None
        None: what `use_impl` set, else Triton for CUDA tensors and the reference for others.

    Raises
    ------
    TypeError
        A dtype is not one of the above.
    ValueError
        A shape, stride, device or number is not as above, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    impl = resolve_impl(impl, keys)
    validate.check_dims("keys", keys, "batch, kv_heads, capacity, head_dim")
    batch, kv_heads, capacity, head_dim = keys.shape
    validate.check_float("keys", keys, impl, head_dim)
    validate.check_last_stride("keys", keys)
    validate.check_page_size(page_size)
    validate.check_at_least("num_new", num_new, 0)
    for name, bound in (("page_min", page_min), ("page_max", page_max)):
        validate.check_dims(name, bound, "batch, kv_heads, max_pages, head_dim")
        validate.check_shape(
            name, bound, "batch, kv_heads, max_pages, head_dim", (batch, kv_heads, page_min.shape[2], head_dim)
        )
        validate.check_like(name, bound, "keys", keys)
        validate.check_last_stride(name, bound)
    if page_min.shape[2] * page_size < capacity:
        raise ValueError(
            f"max_pages={page_min.shape[2]} of page_min; allowed: at least {-(-capacity // page_size)}, "
            f"to hold capacity={capacity} in pages of page_size={page_size}"
        )
    validate.check_sequence(seq_start, seq_end, batch, "keys", keys)
    if num_new == 0:
        return
    run_op(
        "page_bounds", impl, keys, keys, page_min, page_max, seq_start, seq_end, page_size=page_size, num_new=num_new
    )


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
    impl: str | None = None,
) -> torch.Tensor:
    """Bound q.k over each page from above, and reduce the bound over the query heads that share a KV head.

    Quest, arXiv 2406.10774, section 3: s_h(p) = scale * sum_i max(q_i m_i, q_i M_i), with m and M the bounds of page
    p. Query head h reads KV head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    page_min, page_max : torch.Tensor
        Bounds [batch, kv_heads, max_pages, head_dim], of the dtype of `query`; the last stride is 1.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    page_size : int
        Tokens per page, a power of two.
    scale : float, optional
        Default: head_dim ** -0.5.
    group_reduce : {"softmax", "mean", "max"}
        "softmax": log sum_h exp(s_h(p) - log sum_p' exp s_h(p')), each head's scores normalised over the row's pages
        and then added; the logarithm keeps the order and neither underflows nor ties.
    num_pages : int, optional
        How many leading pages to score, a bound on the rows' lengths that the host knows. Default: max_pages.
    impl : {"triton", "reference"} or None
        None: what `use_impl` set, else Triton for CUDA tensors and the reference for others.

    Returns
    -------
    torch.Tensor
        float32 [batch, kv_heads, num_pages] (float64 for float64); -inf for pages without a valid token.

    Raises
    ------
    TypeError
        A dtype is not one of the above.
    ValueError
        A shape, stride, device, number or name is not as above, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    impl = resolve_impl(impl, query)
    validate.check_dims("query", query, "batch, q_heads, head_dim")
    batch, q_heads, head_dim = query.shape
    validate.check_float("query", query, impl, head_dim)
    validate.check_dims("page_min", page_min, "batch, kv_heads, max_pages, head_dim")
    kv_heads, max_pages = page_min.shape[1:3]
    for name, bound in (("page_min", page_min), ("page_max", page_max)):
        validate.check_shape(
            name, bound, "batch, kv_heads, max_pages, head_dim", (batch, kv_heads, max_pages, head_dim)
        )
        validate.check_like(name, bound, "query", query)
        validate.check_last_stride(name, bound)
    validate.check_group(q_heads, kv_heads)
    validate.check_sequence(seq_start, seq_end, batch, "query", query)
    validate.check_page_size(page_size)
    if group_reduce not in validate.GROUP_REDUCE:
        raise ValueError(f"group_reduce={group_reduce!r}; allowed: {', '.join(map(repr, validate.GROUP_REDUCE))}")
    if num_pages is not None and not 1 <= num_pages <= max_pages:
        raise ValueError(f"num_pages={num_pages}; allowed: None, or 1 to max_pages={max_pages}")
    options = {"page_size": page_size, "scale": scale, "group_reduce": group_reduce, "num_pages": num_pages}
    scores: torch.Tensor = run_op("page_scores", impl, query, query, page_min, page_max, seq_start, seq_end, **options)
    return scores


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
    n = ceil((seq_end[b] - seq_start[b]) / block_size) blocks, num_blocks at most. Both implementations choose the
    same blocks: of exactly equal scores the lower index wins, and NaN ranks with -inf.

    Parameters
    ----------
    scores : torch.Tensor
        float32 [batch, kv_heads, num_blocks] (also float64 in the reference).
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `scores`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1.
    max_blocks : int
        The most blocks to choose per row and KV head, at least 1.
    sink_blocks, recent_blocks : int
        How many blocks at the beginning and at the end of the row are always chosen; together at most `max_blocks`.
    impl : {"triton", "reference"} or None
        None: what `use_impl` set, else Triton for CUDA tensors and the reference for others.

    Returns
    -------
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_blocks], ascending, then -1. Index i is the block of the row's tokens
        i * block_size and the block_size - 1 after it, counted from seq_start.
    block_counts : torch.Tensor
        int32 [batch, kv_heads], min(max_blocks, n).

    Raises
    ------
    TypeError
        A dtype is not one of the above.
    ValueError
        A shape, device or number is not as above.
    RuntimeError
        impl="triton" cannot run here.
    """
    impl = resolve_impl(impl, scores)
    validate.check_dims("scores", scores, "batch, kv_heads, num_blocks")
    allowed = (torch.float32,) if impl == "triton" else (torch.float32, torch.float64)
    if scores.dtype not in allowed:
        raise TypeError(f"scores has dtype {scores.dtype}; allowed for impl={impl!r}: {', '.join(map(str, allowed))}")
    validate.check_sequence(seq_start, seq_end, scores.shape[0], "scores", scores)
    validate.check_at_least("block_size", block_size, 1)
    validate.check_at_least("max_blocks", max_blocks, 1)
    validate.check_at_least("sink_blocks", sink_blocks, 0)
    validate.check_at_least("recent_blocks", recent_blocks, 0)
    if sink_blocks + recent_blocks > max_blocks:
        raise ValueError(
            f"sink_blocks={sink_blocks} and recent_blocks={recent_blocks}; allowed: together at most "
            f"max_blocks={max_blocks}"
        )
    options = {
        "block_size": block_size,
        "max_blocks": max_blocks,
        "sink_blocks": sink_blocks,
        "recent_blocks": recent_blocks,
    }
    selection: tuple[torch.Tensor, torch.Tensor] = run_op(
        "select_blocks", impl, scores, scores, seq_start, seq_end, **options
    )
    return selection


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
    scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query token per row to the selected blocks of the KV cache, and to nothing else.

    The approximate attention of Quest (arXiv 2406.10774, section 3), with the split-KV decoding of Flash-Decoding.
    Query head h reads KV head h // group, group = q_heads // kv_heads.

    Parameters
    ----------
    query : torch.Tensor
        [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    keys, values : torch.Tensor
        Buffers [batch, kv_heads, capacity, head_dim], of the dtype of `query`; the last stride is 1. What lies
        outside a row's valid tokens is never used.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_blocks], without duplicates, as `select_blocks` returns them.
    block_counts : torch.Tensor
        int32 [batch, kv_heads]: how many leading entries of `block_indices` to read; may be 0.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1; 1 selects single tokens.
    scale : float, optional
        Factor on q.k. Default: head_dim ** -0.5.
    return_lse : bool
        Also return the log-sum-exp of the scaled scores.
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
    impl = resolve_impl(impl, query)
    validate.check_dims("query", query, "batch, q_heads, head_dim")
    batch, q_heads, head_dim = query.shape
    validate.check_float("query", query, impl, head_dim)
    validate.check_dims("keys", keys, "batch, kv_heads, capacity, head_dim")
    kv_heads, capacity = keys.shape[1:3]
    for name, buffer in (("keys", keys), ("values", values)):
        validate.check_shape(name, buffer, "batch, kv_heads, capacity, head_dim", (batch, kv_heads, capacity, head_dim))
        validate.check_like(name, buffer, "query", query)
        validate.check_last_stride(name, buffer)
    validate.check_group(q_heads, kv_heads)
    validate.check_dims("block_indices", block_indices, "batch, kv_heads, max_blocks")
    max_blocks = block_indices.shape[2]
    validate.check_shape("block_indices", block_indices, "batch, kv_heads, max_blocks", (batch, kv_heads, max_blocks))
    validate.check_shape("block_counts", block_counts, "batch, kv_heads", (batch, kv_heads))
    for name, tensor in (("block_indices", block_indices), ("block_counts", block_counts)):
        validate.check_int32(name, tensor)
        validate.check_device(name, tensor, "query", query)
    validate.check_sequence(seq_start, seq_end, batch, "query", query)
    validate.check_at_least("block_size", block_size, 1)
    tensors = (query, keys, values, block_indices, block_counts, seq_start, seq_end)
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = run_op(
        "sparse_decode", impl, query, *tensors, block_size=block_size, scale=scale, return_lse=return_lse
    )
    return result
