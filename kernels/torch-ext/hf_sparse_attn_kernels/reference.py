"""Torch oracles: one per op, with the name and the signature of its Triton launcher.

They read only what the kernels read, never copy a length to the host, and compute in float32 (float64 for float64).
"""

import torch


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _take_tokens(buffer: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Gather `buffer` [batch, kv_heads, capacity, head_dim] at `positions` [batch, 1 or kv_heads, n]."""
    batch, kv_heads = buffer.shape[:2]
    rows = torch.arange(batch, device=buffer.device)[:, None, None]
    heads = torch.arange(kv_heads, device=buffer.device)[None, :, None]
    return buffer[rows, heads, positions]  # [batch, kv_heads, n, head_dim]


def page_bounds(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    num_new: int,
) -> None:
    """Reference of `hf_sparse_attn_kernels.page_bounds`."""
    batch, kv_heads, capacity, head_dim = keys.shape
    # The most pages that num_new consecutive tokens can touch.
    touched = min((min(num_new, capacity) + page_size - 2) // page_size + 1, page_min.shape[2])
    length = (seq_end - seq_start).long().clamp(min=0)[:, None]  # [batch, 1]
    first_page = (length - num_new).clamp(min=0) // page_size
    last_page = (length - 1).clamp(min=0) // page_size
    # A row that touches fewer pages recomputes its last one: writing the same value again is harmless.
    pages = torch.minimum(first_page + torch.arange(touched, device=keys.device), last_page)  # [batch, touched]

    offsets = pages[..., None] * page_size + torch.arange(page_size, device=keys.device)  # [batch, touched, page_size]
    valid = (offsets < length[..., None])[:, None, :, :, None]
    positions = (offsets + seq_start[:, None, None]).clamp(0, capacity - 1).flatten(1)[:, None]
    tokens = _take_tokens(keys, positions).view(batch, kv_heads, touched, page_size, head_dim)
    lower = tokens.masked_fill(~valid, float("inf")).amin(dim=3)  # [batch, kv_heads, touched, head_dim]
    upper = tokens.masked_fill(~valid, float("-inf")).amax(dim=3)

    index = pages[:, None, :, None].expand_as(lower)
    has_tokens = (length > 0)[:, :, None, None]
    page_min.scatter_(2, index, torch.where(has_tokens, lower, page_min.gather(2, index)))
    page_max.scatter_(2, index, torch.where(has_tokens, upper, page_max.gather(2, index)))


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
) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.page_scores`."""
    batch, q_heads, head_dim = query.shape
    kv_heads, max_pages = page_min.shape[1:3]
    num_pages = max_pages if num_pages is None else num_pages
    scale = head_dim**-0.5 if scale is None else scale
    dtype = _compute_dtype(query.dtype)

    grouped = query.to(dtype).view(batch, kv_heads, q_heads // kv_heads, head_dim)
    lower = page_min[:, :, :num_pages].to(dtype).transpose(2, 3)  # [batch, kv_heads, head_dim, num_pages]
    upper = page_max[:, :, :num_pages].to(dtype).transpose(2, 3)
    scores = (grouped.clamp(min=0) @ upper + grouped.clamp(max=0) @ lower) * scale
    pages = torch.arange(num_pages, device=query.device)
    empty = pages * page_size >= (seq_end - seq_start)[:, None]  # [batch, num_pages]
    scores = scores.masked_fill(empty[:, None, None], float("-inf"))  # [batch, kv_heads, group, num_pages]

    if group_reduce == "mean":
        return scores.mean(dim=2)
    if group_reduce == "max":
        return scores.amax(dim=2)
    total = scores.logsumexp(dim=3, keepdim=True)
    total = total.masked_fill(total == float("-inf"), 0.0)  # a row without tokens: -inf - 0, not -inf + inf
    return (scores - total).logsumexp(dim=2)


def select_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
    sink_blocks: int = 0,
    recent_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.select_blocks`."""
    batch, kv_heads, width = scores.shape
    length = (seq_end - seq_start).clamp(min=0)
    num_blocks = ((length + block_size - 1) // block_size).clamp(max=width)[:, None]  # [batch, 1]
    blocks = torch.arange(width, device=scores.device)
    exists = blocks < num_blocks
    forced = exists & ((blocks < sink_blocks) | (blocks >= num_blocks - recent_blocks))
    rank_class = (exists.int() + forced.int())[:, None].expand_as(scores)  # 2 forced, 1 scored, 0 not there

    # By class, then score, then index: stable sorts, the last criterion first.
    order = scores.nan_to_num(float("-inf"), float("inf"), float("-inf")).sort(dim=-1, descending=True, stable=True)[1]
    order = order.gather(2, rank_class.gather(2, order).sort(dim=-1, descending=True, stable=True)[1])

    counts = num_blocks.clamp(max=max_blocks).expand(batch, kv_heads)
    kept = order[..., :max_blocks]
    kept = kept.masked_fill(torch.arange(kept.shape[-1], device=scores.device) >= counts[..., None], width)
    kept = kept.sort(dim=-1)[0]
    indices = torch.full((batch, kv_heads, max_blocks), -1, dtype=torch.int32, device=scores.device)
    indices[..., : kept.shape[-1]] = kept.masked_fill(kept == width, -1).int()
    return indices, counts.int().contiguous()


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.sparse_decode`."""
    batch, q_heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    dtype = _compute_dtype(query.dtype)

    slots = torch.arange(block_indices.shape[2], device=query.device)
    listed = (slots < block_counts[..., None]) & (block_indices >= 0)  # [batch, kv_heads, max_blocks]
    offsets = block_indices.long()[..., None] * block_size + torch.arange(block_size, device=query.device)
    positions = offsets + seq_start[:, None, None, None]
    valid = (listed[..., None] & (positions < seq_end[:, None, None, None])).flatten(2)  # [batch, kv_heads, tokens]
    positions = positions.clamp(0, capacity - 1).flatten(2)

    # Zero what is not valid: a weight of 0 times a NaN of the buffer would still be NaN.
    k = _take_tokens(keys, positions).to(dtype).masked_fill(~valid[..., None], 0.0)
    v = _take_tokens(values, positions).to(dtype).masked_fill(~valid[..., None], 0.0)
    grouped = query.to(dtype).view(batch, kv_heads, q_heads // kv_heads, head_dim)
    scores = (grouped @ k.transpose(2, 3) * scale).masked_fill(~valid[:, :, None], float("-inf"))
    lse = scores.logsumexp(dim=3, keepdim=True)  # [batch, kv_heads, group, 1]
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    out = (weights @ v).reshape(batch, q_heads, head_dim).to(query.dtype)
    if not return_lse:
        return out
    return out, lse.reshape(batch, q_heads)
