"""Torch references of the ops on runs."""

import torch

from .._reference import blank, compute_dtype, row_lengths, take_tokens
from . import MAX_RUN

SCORES_AT_ONCE = 1 << 24  # elements of a prefill's scores in memory


def runs_decode(
    query: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    context_start: torch.Tensor,
    run_starts: torch.Tensor,
    run_indices: torch.Tensor,
    run_counts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    token_order: torch.Tensor | None,
    context_lengths: torch.Tensor | None,
    scale: float | None,
    counter: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.runs_decode`."""
    batch, q_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    dtype = compute_dtype(query.dtype)
    scale = head_dim**-0.5 if scale is None else scale
    positions, chosen = _chosen_positions(context_start, run_starts, run_indices, run_counts, token_order)
    tail, in_tail = _tail_positions(keys.shape[2], seq_start, seq_end)
    if counter is not None:
        dense = run_starts[..., -1] if context_lengths is None else context_lengths[:, None].expand(-1, kv_heads)
        _count(counter, chosen, dense, row_lengths(seq_start, seq_end))
    parts = [
        (*take_tokens((context_keys, context_values), positions), chosen),
        (*take_tokens((keys, values), tail[:, None]), in_tail[:, None]),
    ]
    grouped = query.reshape(batch, kv_heads, -1, head_dim).to(dtype) * scale
    # Only scores are concatenated: they are much smaller than keys and values.
    scores = torch.cat(
        [(grouped @ k.to(dtype).mT).masked_fill_(~valid[:, :, None], float("-inf")) for k, _, valid in parts], dim=3
    )
    lse = scores.logsumexp(dim=3)
    weights = torch.split(_weights(scores, lse), [part[0].shape[2] for part in parts], dim=3)
    context, rest = (weight @ blank(v, ~valid).to(dtype) for weight, (_, v, valid) in zip(weights, parts, strict=True))
    return (context + rest).view(batch, q_heads, head_dim).to(query.dtype), lse.view(batch, q_heads)


def runs_prefill(
    query: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    context_start: torch.Tensor,
    run_starts: torch.Tensor,
    run_indices: torch.Tensor,
    run_counts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    token_order: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.runs_prefill`."""
    batch, _, queries, head_dim = query.shape
    kv_heads = keys.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    positions, chosen = _chosen_positions(context_start, run_starts, run_indices, run_counts, token_order)
    positions = positions.clamp(max=context_keys.shape[2] - 1)
    tail, in_tail = _tail_positions(keys.shape[2], seq_start, seq_end)
    own = seq_end[:, None].long() - queries + torch.arange(queries, device=query.device)  # [batch, queries]
    # Padding sees nothing.
    visible = in_tail[:, None] & (tail[:, None] <= own[..., None]) & (own >= seq_start[:, None])[..., None]
    grouped = query.reshape(batch, kv_heads, -1, queries, head_dim)
    out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
    lse = grouped.new_empty(grouped.shape[:4], dtype=compute_dtype(query.dtype))
    for row in range(batch):
        for head in range(kv_heads):
            at, exists = positions[row, head], chosen[row, head]
            if at.device.type == "cpu":  # drops absent tokens, if that needs no wait for a device
                at, exists = at[exists], exists[exists]
            k, v = (
                torch.cat((context[row, head].index_select(0, at), buffer[row, head].index_select(0, tail[row])))
                for context, buffer in ((context_keys, keys), (context_values, values))
            )
            v = blank(v, ~torch.cat((exists, in_tail[row])))
            seen = torch.cat((exists & (own[row] >= seq_start[row])[:, None], visible[row]), dim=1)
            out[row, head], lse[row, head] = _attend(grouped[row, head], k, v, seen, scale)
    return out.view(query.shape), lse.view(query.shape[:3])


def _attend(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from `query` [group, queries, head_dim] to tokens [n, head_dim] where `seen` [queries, n], in blocks."""
    dtype = compute_dtype(query.dtype)
    k, v = k.to(dtype).T, v.to(dtype)
    outs, sums = [], []
    at_once = max(1, SCORES_AT_ONCE // (query.shape[0] * k.shape[1]))
    for block, mask in zip(torch.split(query, at_once, dim=1), torch.split(seen, at_once), strict=True):
        scores = ((block.to(dtype) * scale) @ k).masked_fill_(~mask, float("-inf"))
        sums.append(scores.logsumexp(dim=2))
        outs.append(_weights(scores, sums[-1]) @ v)
    return torch.cat(outs, dim=1).to(query.dtype), torch.cat(sums, dim=1)


def _chosen_positions(
    context_start: torch.Tensor,
    run_starts: torch.Tensor,
    run_indices: torch.Tensor,
    run_counts: torch.Tensor,
    token_order: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 positions [batch, kv_heads, n] of the chosen runs, MAX_RUN for each, and which of them exist."""
    listed = run_indices.shape[2]
    if run_counts.device.type == "cpu":  # drops places that no head uses, if that needs no wait for a device
        listed = max(1, int(run_counts.max()))
    places = torch.arange(listed, device=run_counts.device)
    runs = run_indices[:, :, :listed].long().masked_fill(places >= run_counts[..., None], -1)
    slots = run_starts.gather(2, runs.clamp(min=0))[..., None] + torch.arange(MAX_RUN, device=runs.device)
    chosen = (slots < run_starts.gather(2, runs.clamp(min=0) + 1)[..., None]) & (runs >= 0)[..., None]
    slots, chosen = slots.flatten(2).long(), chosen.flatten(2)
    if token_order is not None:
        slots = token_order.gather(2, slots.clamp(max=token_order.shape[2] - 1)).long()
    return slots + context_start[:, None, None], chosen


def _tail_positions(capacity: int, seq_start: torch.Tensor, seq_end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 positions [batch, n] of the rows' tails, and which of them exist."""
    longest = capacity
    if seq_end.device.type == "cpu":
        longest = max(1, int(row_lengths(seq_start, seq_end).max()))
    positions = torch.arange(longest, device=seq_end.device) + seq_start[:, None].long()
    return positions.clamp(max=capacity - 1), positions < seq_end[:, None]


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the softmax of `scores` with log-sum-exp `lse`; zeros where there is nothing to read."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp_()


def _count(counter: torch.Tensor, chosen: torch.Tensor, context: torch.Tensor, tail: torch.Tensor) -> None:
    """Add the tokens read, those that dense attention reads, of which [batch, kv_heads] in the context, and a call."""
    tails = tail.sum() * context.shape[1]
    counter[0] += chosen.sum() + tails
    counter[1] += context.sum() + tails
    counter[3] += 1
