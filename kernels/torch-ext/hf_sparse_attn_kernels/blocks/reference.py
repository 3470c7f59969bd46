"""Torch reference of the op that attends from blocks of queries to blocks of keys."""

import torch

from .._reference import compute_dtype, row_lengths
from .members import members

MAX_SCORES = 1 << 24
"""Scores that are computed at once: 64 MiB in float32."""


def block_sparse_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    columns: torch.Tensor | None,
    column_counts: torch.Tensor | None,
    window: int | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.block_sparse_prefill`."""
    batch, q_heads, queries, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    group, device = q_heads // kv_heads, query.device
    wide = compute_dtype(query.dtype)
    scale = head_dim**-0.5 if scale is None else scale
    length = row_lengths(seq_start, seq_end)[:, None].long()
    # Places in the rows of queries and keys, [batch, queries] and [batch, capacity]; negative before a row.
    query_place = length - queries + torch.arange(queries, device=device)
    key_place = torch.arange(capacity, device=device) - seq_start[:, None]
    is_key = (key_place >= 0) & (key_place < length)
    first_block = (length - queries).clamp_min(0) // block_size
    query_block = (query_place.clamp_min(0) // block_size - first_block).clamp_max(block_indices.shape[2] - 1)
    in_blocks = members(block_indices, block_counts, -(-capacity // block_size))
    key_block = (key_place // block_size).clamp(0, in_blocks.shape[3] - 1)[:, None, None]
    is_column = None
    if columns is not None and column_counts is not None:
        is_column = members(columns, column_counts, capacity).gather(
            2, key_place.clamp(0, capacity - 1)[:, None].expand(-1, q_heads, -1)
        )

    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    at_once = max(1, MAX_SCORES // (batch * group * capacity))
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        for begin in range(0, queries, at_once):
            part = slice(begin, begin + at_once)
            place, block = query_place[:, part], query_block[:, None, part, None]
            distance = (place[:, :, None] - key_place[:, None])[:, None]  # [batch, 1, part, capacity]
            rows = in_blocks[:, heads].gather(2, block.expand(-1, group, -1, in_blocks.shape[3]))
            seen = rows.gather(3, key_block.expand(-1, group, rows.shape[2], -1))
            if window is not None:
                seen &= distance < window
            if is_column is not None:
                seen |= is_column[:, heads, None]
            seen &= (distance >= 0) & is_key[:, None, None] & (place >= 0)[:, None, :, None]
            out[:, heads, part], lse[:, heads, part] = _attend(
                query[:, heads, part].to(wide), keys[:, head].to(wide), values[:, head].to(wide), seen, scale
            )
    return out, lse


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from [batch, group, queries, head_dim] to keys [batch, capacity, head_dim] where `seen`."""
    unread = ~seen.any(dim=(1, 2))[..., None]  # such tokens may hold NaN
    keys, values = (states.masked_fill(unread, 0)[:, None] for states in (keys, values))
    nothing = ~seen.any(dim=3, keepdim=True)
    scores = (query.masked_fill(nothing, 0) * scale) @ keys.transpose(2, 3)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(dim=3).masked_fill(nothing, 0)
    return weights @ values, scores.logsumexp(dim=3)
