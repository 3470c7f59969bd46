"""Torch references of the ops on clusters."""

import torch

from .._reference import compute_dtype

SCORES_AT_ONCE = 1 << 24
"""Scores that `centroid_weights` holds at a time, about."""


def centroid_weights(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_sizes: torch.Tensor,
    *,
    num_queries: torch.Tensor | None,
    parents: torch.Tensor | None,
    parent_weights: torch.Tensor | None,
    parent_threshold: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.centroid_weights`."""
    batch, q_heads, queries, head_dim = query.shape
    kv_heads, clusters = centroids.shape[1:3]
    dtype = compute_dtype(query.dtype)
    scale = head_dim**-0.5 if scale is None else scale
    takes_part = cluster_sizes > 0
    if parents is not None and parent_weights is not None and parent_threshold is not None:
        of_parents = parent_weights.gather(2, parents.masked_fill(~takes_part, 0).long())
        takes_part &= of_parents > parent_threshold[:, None, None]
    log_sizes = cluster_sizes.to(dtype).log().masked_fill_(~takes_part, float("-inf"))[:, :, None]
    keys = centroids.to(dtype).masked_fill(~takes_part[..., None], 0.0).transpose(2, 3)
    first = query.new_zeros(batch, dtype=torch.long) if num_queries is None else queries - num_queries.long()

    sums = torch.zeros((batch, kv_heads, clusters), dtype=dtype, device=query.device)
    at_once = max(1, SCORES_AT_ONCE // (batch * q_heads * clusters))
    for begin in range(0, queries, at_once):
        part = query[:, :, begin : begin + at_once].to(dtype)
        grouped = part.reshape(batch, kv_heads, -1, head_dim)  # [batch, kv_heads, group * part, head_dim]
        scores = grouped @ keys * scale
        lse = (scores + log_sizes).logsumexp(dim=-1, keepdim=True)
        weights = (scores - lse).exp_().view(batch, kv_heads, -1, part.shape[2], clusters)
        counts = torch.arange(begin, begin + part.shape[2], device=query.device) >= first[:, None]
        sums += weights.masked_fill_(~counts[:, None, None, :, None], 0.0).sum(dim=(2, 3))
    num_counted = (queries - first.clamp(0, queries)).clamp_(min=1) * (q_heads // kv_heads)
    return sums.div_(num_counted[:, None, None]).masked_fill_(~takes_part, 0.0)


def select_runs(
    weights: torch.Tensor,
    cluster_sizes: torch.Tensor,
    run_starts: torch.Tensor,
    run_clusters: torch.Tensor,
    threshold: torch.Tensor,
    *,
    max_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.select_runs`."""
    lengths = run_starts.diff(dim=2)
    is_always_read = run_clusters < 0
    bounds = threshold[:, None].expand(weights.shape[:2])
    if max_tokens is not None:
        always_read = (lengths * is_always_read).sum(dim=2)
        bounds = _raise_bounds(weights, cluster_sizes, bounds.to(weights.dtype), max_tokens - always_read)
    chosen_clusters = weights > bounds[:, :, None]
    clusters = run_clusters.masked_fill(is_always_read | (lengths <= 0), 0).long()
    chosen = (lengths > 0) & (is_always_read | chosen_clusters.gather(2, clusters))
    runs = torch.arange(run_clusters.shape[2], dtype=torch.int32, device=weights.device)
    counts = chosen.sum(dim=2, dtype=torch.int32)
    indices = runs.masked_fill(~chosen, len(runs)).sort(dim=2)[0]
    return indices.masked_fill_(runs >= counts[:, :, None], -1), counts


def _raise_bounds(
    weights: torch.Tensor, cluster_sizes: torch.Tensor, bounds: torch.Tensor, room: torch.Tensor
) -> torch.Tensor:
    """Raise the bounds [batch, kv_heads] of heads whose clusters have more tokens than `room` [batch, kv_heads].

    The new bound is the head's smallest weight above which clusters fit, or infinity.
    """
    tokens = (cluster_sizes * (weights > bounds[:, :, None])).sum(dim=2)
    ranked, order = weights.masked_fill(weights.isnan(), float("-inf")).sort(dim=2, descending=True, stable=True)
    sizes = cluster_sizes.gather(2, order).long()
    before = sizes.cumsum(dim=2) - sizes
    # Tokens above a weight are those before the first cluster of this weight.
    before[:, :, 1:].masked_fill_(ranked[:, :, 1:] == ranked[:, :, :-1], 0)
    above = before.cummax(dim=2)[0]
    least = ranked.masked_fill(above > room[:, :, None], float("inf")).amin(dim=2)
    return torch.where(tokens > room, least, bounds)
