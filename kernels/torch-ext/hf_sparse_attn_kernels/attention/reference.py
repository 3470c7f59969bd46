"""Torch references of the attention ops."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .._reference import blank, compute_dtype, count_tokens, host_lengths, rotate, row_lengths, take_tokens


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
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    scale: float | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.sparse_decode`."""
    length = row_lengths(seq_start, seq_end)
    slots = torch.arange(block_indices.shape[2], device=query.device)
    # A slot without a block points past every row.
    first_tokens = (block_indices.long() * block_size).masked_fill_(slots >= block_counts[..., None], keys.shape[2])
    tokens = (first_tokens[..., None] + torch.arange(block_size, device=query.device)).flatten(2)
    invalid = tokens >= length[:, None, None]  # [batch, kv_heads or 1, tokens]
    # An absent token reads the first one listed instead; its score is masked, its value blank.
    positions = torch.where(invalid, tokens[..., :1], tokens) + seq_start[:, None, None]
    k, v = take_tokens((keys, values), positions)
    if counter is not None:
        kv_heads = keys.shape[1]
        count_tokens(counter, (~invalid).sum() * (kv_heads // invalid.shape[1]), length, kv_heads)
    if rope_cos is not None and rope_sin is not None:
        k = rotate(k, rope_cos[: k.shape[2]], rope_sin[: k.shape[2]])
        own_slot = (block_counts - 1).clamp_(min=0).long()[:, :, None]  # [batch, kv_heads or 1, 1]
        grouped = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[2])
        query = rotate(grouped, rope_cos[own_slot], rope_sin[own_slot]).flatten(1, 2)
    return _attend(query, k, blank(v, invalid), invalid, scale)


def dense_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.dense_decode`."""
    kv_heads, capacity = keys.shape[1:3]
    if counter is not None:
        total = row_lengths(seq_start, seq_end)
        count_tokens(counter, total.sum() * kv_heads, total, kv_heads)
    lengths = host_lengths(seq_start, seq_end)
    if lengths is None:
        positions = torch.arange(capacity, device=query.device)
        invalid = (positions < seq_start[:, None]) | (positions >= seq_end[:, None])
        values = values.masked_fill(invalid[:, None, :, None], 0.0)  # a weight of 0 times a NaN would still be NaN
        return _attend(query, keys, values, invalid[:, None], scale)
    # Each row is cut to its tokens, so it needs no mask and reads nothing else.
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = query.new_full(query.shape[:2], float("-inf"), dtype=compute_dtype(query.dtype))
    for row, (start, length) in enumerate(zip(seq_start.tolist(), lengths, strict=True)):
        if length == 0:
            continue
        # The query heads of a group are the query tokens of one KV head.
        grouped = query[row].reshape(1, kv_heads, -1, query.shape[2])
        k, v = (buffer[row : row + 1, :, start : start + length] for buffer in (keys, values))
        out[row] = scaled_dot_product_attention(grouped, k, v, scale=scale).view_as(out[row])
        lse[row] = _scores(grouped, k, scale).logsumexp(dim=3).view(-1)
    return out, lse


def dense_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.dense_prefill`."""
    kv_heads, capacity = keys.shape[1:3]
    queries = query.shape[2]
    if seq_end.device.type == "cpu":  # drops unused room, if that needs no wait for a device
        capacity = max(1, int(seq_end.max()))
        keys, values = keys[:, :, :capacity], values[:, :, :capacity]
    positions = torch.arange(capacity, device=query.device)
    own = seq_end[:, None].long() - queries + torch.arange(queries, device=query.device)  # [batch, queries]
    valid = (positions >= seq_start[:, None]) & (positions < seq_end[:, None])
    seen = valid[:, None] & (positions <= own[:, :, None])  # [batch, queries, capacity]
    # A weight of 0 times a NaN would still be NaN.
    values = values.masked_fill(~valid[:, None, :, None], 0.0).to(compute_dtype(query.dtype))
    grouped = query.reshape(query.shape[0], kv_heads, -1, queries, query.shape[3])
    scores = _scores(grouped, keys.unsqueeze(2), scale)
    scores.masked_fill_(~seen[:, None, None], float("-inf"))  # [batch, kv_heads, group, queries, capacity]
    nothing = ~seen.any(dim=2)[:, None, None, :, None]
    out = (scores.softmax(dim=4) @ values.unsqueeze(2)).masked_fill_(nothing, 0.0)
    return out.flatten(1, 2).to(query.dtype), scores.logsumexp(dim=4).flatten(1, 2)


def sparse_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.sparse_prefill`."""
    batch, _, queries, head_dim = query.shape
    kv_heads = keys.shape[1]
    if block_counts.device.type == "cpu":  # drops slots that no row uses, if that needs no wait for a device
        block_indices = block_indices[..., : int(block_counts.max())]
    chosen = torch.arange(block_indices.shape[2], device=query.device)
    chunk = torch.arange(queries, device=query.device)
    own = seq_end[:, None].long() - queries + chunk  # [batch, queries]: buffer positions
    is_query = own >= seq_start[:, None]
    # For every slot, first the chosen tokens, then the chunk: [batch, kv_heads or 1, n + queries]
    is_chosen = chosen < block_counts[..., None]
    heads = is_chosen.shape[1]
    exists = torch.cat((is_chosen, is_query[:, None].expand(-1, heads, -1)), dim=2)
    positions = block_indices.long() + seq_start[:, None, None]
    positions = torch.cat((positions, own[:, None].expand(-1, heads, -1)), dim=2)
    # An absent token reads the row's last one instead; its score is masked.
    positions = torch.where(exists, positions, seq_end[:, None, None] - 1)
    k, v = take_tokens((keys, values), positions)

    grouped = query.reshape(batch, kv_heads, -1, queries, head_dim)  # [batch, kv_heads, group, queries, head_dim]
    if rope_cos is not None and rope_sin is not None:
        chunk_start = torch.maximum(own[:, :1], seq_start[:, None])
        own_slots = block_counts[..., None] + (own - chunk_start).clamp_(min=0)[:, None]  # [batch, heads, queries]
        slots = torch.cat((chosen.expand_as(is_chosen), own_slots), dim=2)
        k = rotate(k, rope_cos[slots], rope_sin[slots])
        grouped = rotate(grouped, rope_cos[own_slots][:, :, None], rope_sin[own_slots][:, :, None])
    causal = (chunk[:, None] >= chunk) & is_query[:, None]  # [batch, queries, queries]
    mask = torch.cat(
        (
            is_chosen[:, :, None].expand(-1, -1, queries, -1),
            causal[:, None].expand(-1, heads, -1, -1),
        ),
        dim=3,
    )
    scores = _scores(grouped, k.unsqueeze(2), scale)  # [batch, kv_heads, group, queries, n + queries]
    scores.masked_fill_(~mask[:, :, None], float("-inf"))
    out = (scores.softmax(dim=4) @ v.unsqueeze(2).to(scores.dtype)).flatten(1, 2).to(query.dtype)
    # A row without tokens has read positions outside it, which may hold NaN.
    is_padding = ~is_query[:, None]
    return out.masked_fill(is_padding[..., None], 0.0), scores.logsumexp(dim=4).flatten(1, 2).masked_fill(
        is_padding, float("-inf")
    )


def _scores(grouped: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Return scaled q.k [.., group, n] of queries [.., group, head_dim] and keys [.., n, head_dim]."""
    dtype = compute_dtype(grouped.dtype)
    scale = grouped.shape[-1] ** -0.5 if scale is None else scale
    return (grouped.to(dtype) * scale) @ k.to(dtype).transpose(-1, -2)


def _attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    invalid: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to `k` and `v` [batch, kv_heads, n, head_dim] except where `invalid` [batch, 1 or kv_heads, n]."""
    batch, q_heads, head_dim = query.shape
    kv_heads = k.shape[1]
    grouped = query.reshape(batch * kv_heads, -1, head_dim)
    scores = _scores(grouped, k.flatten(0, 1), scale).view(batch, kv_heads, -1, k.shape[2])
    scores.masked_fill_(invalid[:, :, None], float("-inf"))  # [batch, kv_heads, group, n]
    weights = scores.softmax(dim=3).flatten(0, 1)
    # Without a valid token the softmax is NaN.
    nothing = invalid.all(dim=2)[:, :, None, None]
    out = weights.bmm(v.to(weights.dtype).flatten(0, 1)).view(batch, kv_heads, -1, head_dim).masked_fill_(nothing, 0.0)
    out = out.view(batch, q_heads, head_dim).to(query.dtype)
    return out, scores.logsumexp(dim=3).view(batch, q_heads)
