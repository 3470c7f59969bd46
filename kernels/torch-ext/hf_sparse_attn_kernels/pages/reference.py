"""Torch references of the ops on pages; see `_reference` for the rules of all references."""

from functools import reduce
from typing import Any

import torch
from torch.nn.functional import pad

from .._reference import append, compute_dtype, host_lengths, power_of_two, rank_blocks, row_lengths, score_order
from .reference_bounds import page_bounds

_FORCED = 1 << 33  # ranks above every score's order
_ABSENT = -(1 << 33)


def page_scores(
    query: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.page_scores`."""
    batch, _, head_dim = query.shape
    kv_heads, max_pages = page_min.shape[1:3]
    num_pages = max_pages if num_pages is None else num_pages
    scale = head_dim**-0.5 if scale is None else scale
    dtype = compute_dtype(query.dtype)
    scored, is_empty = num_pages, None
    lengths = host_lengths(seq_start, seq_end)
    if lengths is not None:
        scored = min(num_pages, max(1, -(-max(lengths) // page_size)))
    if lengths is None or min(lengths) <= (scored - 1) * page_size:
        first_tokens = torch.arange(0, scored * page_size, page_size, device=query.device)
        is_empty = (first_tokens >= row_lengths(seq_start, seq_end)[:, None])[:, None]  # [batch, 1, scored]

    grouped = query.to(dtype).reshape(batch * kv_heads, -1, head_dim)
    if channel_exponent is not None:
        grouped = grouped * power_of_two(channel_exponent, dtype).view(-1, 1, head_dim)
    lower = page_min[:, :, :scored].to(dtype).flatten(0, 1).transpose(1, 2)  # [batch * kv_heads, head_dim, scored]
    upper = page_max[:, :, :scored].to(dtype).flatten(0, 1).transpose(1, 2)
    # sum_i max(q_i m_i, q_i M_i) = max(q, 0).M + min(q, 0).m
    scores = grouped.clamp(min=0).bmm(upper)
    scores = scores.baddbmm_(grouped.clamp(max=0), lower, beta=scale, alpha=scale)
    scores = scores.view(batch, kv_heads, -1, scored)  # [batch, kv_heads, group, scored]
    if page_exponent is not None:
        scores.mul_(power_of_two(page_exponent[:, :, None, :scored], dtype))
    if is_empty is not None:
        scores.masked_fill_(is_empty[:, :, None], float("-inf"))

    if group_reduce == "mean":
        reduced = scores.mean(dim=2)
    elif group_reduce == "max":
        reduced = scores.amax(dim=2)
    else:
        reduced = reduce(torch.logaddexp, scores.log_softmax(dim=3).unbind(dim=2))
        if is_empty is not None:
            reduced.masked_fill_(is_empty, float("-inf"))  # NaN in a row without tokens
    return reduced if scored == num_pages else pad(reduced, (0, num_pages - scored), value=float("-inf"))


def select_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
    sink_blocks: int,
    recent_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.select_blocks`."""
    batch, kv_heads, width = scores.shape
    lengths = host_lengths(seq_start, seq_end)
    if lengths is not None and min(lengths) == max(lengths) > max_blocks * block_size and max_blocks < width:
        width = min(width, -(-lengths[0] // block_size))
        indices = _top_blocks(scores[..., :width], max_blocks, sink_blocks, recent_blocks)
        if indices is not None:
            return indices, indices.new_full((batch, kv_heads), max_blocks)
    num_blocks = ((row_lengths(seq_start, seq_end) + (block_size - 1)) // block_size).clamp_(max=width)[:, None]
    blocks = torch.arange(width, device=scores.device)
    is_forced = (blocks < sink_blocks) | (blocks >= num_blocks - recent_blocks)  # [batch, width]
    order = score_order(scores[..., :width]).masked_fill_(is_forced[:, None], _FORCED)
    order.masked_fill_((blocks >= num_blocks)[:, None], _ABSENT)
    # One integer to rank by: the order in the high bits, then the index, lower ones first.
    index_bits = width.bit_length()
    last = (1 << index_bits) - 1  # above every index
    rank = (order << index_bits) + (last - blocks)
    best = rank.topk(min(max_blocks, width), dim=-1, sorted=False)[0]
    indices = (last - (best & last)).masked_fill_(best < (_ABSENT // 2) << index_bits, last)
    indices = indices.sort(dim=-1)[0].int()  # [batch, kv_heads, min(max_blocks, width)]
    indices.masked_fill_(indices == last, -1)
    if width < max_blocks:
        indices = pad(indices, (0, max_blocks - width), value=-1)
    return indices, num_blocks.clamp(max=max_blocks).expand(batch, kv_heads).contiguous()


def _top_blocks(scores: torch.Tensor, max_blocks: int, sink_blocks: int, recent_blocks: int) -> torch.Tensor | None:
    """Choose among more than `max_blocks` valid scores; return None if ties or NaN need a full ranking."""
    recent = scores.shape[2] - recent_blocks
    num_scored = max_blocks - sink_blocks - recent_blocks
    if num_scored > 0:
        least = scores[..., sink_blocks:recent].topk(num_scored, dim=-1)[0][..., -1:]
        is_chosen = scores >= least
    else:
        is_chosen = torch.zeros_like(scores, dtype=torch.bool)
    is_chosen[..., :sink_blocks] = True
    is_chosen[..., recent:] = True
    if (is_chosen.sum(dim=-1) != max_blocks).any():
        return None
    return is_chosen.nonzero()[:, 2].int().view(*scores.shape[:2], max_blocks)


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
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
    statistic: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.append_and_select`."""
    scores = _append_and_score(
        query,
        (new_key, new_value),
        (keys, values),
        (page_min, page_max),
        (seq_start, seq_end),
        {"page_exponent": page_exponent, "channel_exponent": channel_exponent},
        page_size=page_size,
        scale=scale,
        group_reduce=group_reduce,
        num_pages=num_pages,
        counter=counter,
        statistic=statistic,
    )
    return select_blocks(
        scores,
        seq_start,
        seq_end,
        block_size=page_size,
        max_blocks=max_blocks,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
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
    max_blocks: int | None,
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    counter: torch.Tensor | None,
    statistic: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.append_and_rank`."""
    scores = _append_and_score(
        query,
        (new_key, new_value),
        (keys, values),
        (page_min, page_max),
        (seq_start, seq_end),
        {"page_exponent": page_exponent, "channel_exponent": channel_exponent},
        page_size=page_size,
        scale=scale,
        group_reduce=group_reduce,
        num_pages=num_pages,
        counter=counter,
        statistic=statistic,
    )
    return rank_blocks(
        scores,
        seq_start,
        seq_end,
        block_size=page_size,
        max_blocks=max_blocks,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
    )


def _append_and_score(
    query: torch.Tensor,
    token: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor],
    bounds: tuple[torch.Tensor, torch.Tensor],
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    exponents: dict[str, Any],
    *,
    page_size: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    counter: torch.Tensor | None,
    statistic: str,
) -> torch.Tensor:
    """Append a token to every row, and score all pages."""
    append(buffers, token, *row_bounds)
    page_bounds(buffers[0], *bounds, *row_bounds, page_size=page_size, num_new=1, statistic=statistic, **exponents)
    num_pages = bounds[0].shape[2] if num_pages is None else num_pages
    if counter is not None:
        _count_metadata(counter, bounds[0], *row_bounds, page_size, num_pages)
    return page_scores(
        query,
        *bounds,
        *row_bounds,
        page_size=page_size,
        scale=scale,
        group_reduce=group_reduce,
        num_pages=num_pages,
        **exponents,
    )


def _count_metadata(
    counter: torch.Tensor,
    page_min: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    page_size: int,
    num_pages: int,
) -> None:
    """Count the bytes of bounds and exponents of every page with a token."""
    kv_heads, _, head_dim = page_min.shape[1:]
    has_exponents = page_min.dtype == torch.int8
    page_bytes = 2 * head_dim * page_min.element_size() + has_exponents
    row_bytes = head_dim * has_exponents
    lengths = host_lengths(seq_start, seq_end)
    if lengths is not None:
        row_pages = [min(-(-length // page_size), num_pages) for length in lengths]
        counter[2] += kv_heads * sum(pages * page_bytes + row_bytes for pages in row_pages if pages > 0)
        return
    pages = ((row_lengths(seq_start, seq_end) + (page_size - 1)) // page_size).clamp_(max=num_pages)
    counter[2] += kv_heads * (pages * page_bytes + (pages > 0) * row_bytes).sum()
