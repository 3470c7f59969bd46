"""Torch references of the ops on single tokens."""

import torch
from torch.nn.functional import max_pool1d

from .._reference import compute_dtype, host_lengths, rotate, row_lengths, take_tokens


def token_votes(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    sink_tokens: int,
    recent_tokens: int,
    vote: str,
    max_tokens: int | None,
    num_tokens: int | None,
) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.token_votes`."""
    num_tokens = keys.shape[2] if num_tokens is None else num_tokens
    num_voted = 0 if max_tokens is None else max_tokens - sink_tokens - recent_tokens
    lengths = host_lengths(seq_start, seq_end)
    if lengths is None:
        ends = row_lengths(seq_start, seq_end).clamp_(max=num_tokens)[:, None] - recent_tokens
        tokens = torch.arange(num_tokens, device=keys.device)
        is_candidate = (tokens >= sink_tokens) & (tokens < ends)  # [batch, num_tokens]
        (k,) = take_tokens((keys,), (tokens + seq_start[:, None])[:, None])
        scores = _scores(query, k).masked_fill_(~is_candidate[:, None], float("-inf"))
        return _votes(scores, vote, num_voted).masked_fill_(~is_candidate, float("-inf"))
    # Each row is cut to its candidates, so it needs no mask and reads nothing else.
    votes = keys.new_full((keys.shape[0], num_tokens), float("-inf"), dtype=compute_dtype(keys.dtype))
    for row, (start, length) in enumerate(zip(seq_start.tolist(), lengths, strict=True)):
        first, last = sink_tokens, min(length, num_tokens) - recent_tokens
        if first < last:
            scores = _scores(query[row : row + 1], keys[row : row + 1, :, start + first : start + last])
            votes[row, first:last] = _votes(scores, vote, num_voted)[0]
    return votes


def _scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return q.k [batch, q_heads, n] of queries [batch, q_heads, head_dim] and keys [batch, kv_heads, n, head_dim]."""
    dtype = compute_dtype(query.dtype)
    grouped = query.to(dtype).reshape(*keys.shape[:2], -1, query.shape[2])
    return (grouped @ keys.to(dtype).transpose(2, 3)).view(query.shape[0], query.shape[1], keys.shape[2])


def _votes(scores: torch.Tensor, vote: str, num_voted: int) -> torch.Tensor:
    """Reduce scores [batch, q_heads, n], -inf for tokens that are no candidates, to votes [batch, n]."""
    if vote == "soft":
        return scores.softmax(dim=2).sum(dim=1)
    if vote == "logits":
        return scores.sum(dim=1)
    return _is_among_top(scores, num_voted).sum(dim=1).to(scores.dtype)


def _is_among_top(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return whether each value is among the `count` largest of the last dimension; first among equals, NaN as -inf."""
    values = values.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    least = values.topk(min(count, values.shape[-1]), dim=-1)[0][..., -1:]
    above, tied = values > least, values == least
    return above | (tied & (tied.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))


def select_tokens(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    vote: str,
    pool_size: int,
    num_tokens: int | None,
    cached_query: torch.Tensor | None,
    cached_tokens: torch.Tensor | None,
    cached_valid: torch.Tensor | None,
    threshold: float,
    counter: torch.Tensor | None,
    reuse_counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.select_tokens`."""
    batch, kv_heads, capacity, head_dim = keys.shape
    num_tokens = capacity if num_tokens is None else num_tokens
    num_voted = max_tokens - sink_tokens - recent_tokens
    length = row_lengths(seq_start, seq_end).clamp_(max=num_tokens)
    is_long = length > max_tokens
    reuses = torch.zeros_like(is_long)
    if threshold < 1 and cached_query is not None and cached_valid is not None:
        reuses = is_long & (cached_valid != 0) & (_cosine(query, cached_query) >= threshold)
    votes_anew = is_long & ~reuses

    voted = torch.zeros((batch, num_voted), dtype=torch.int32, device=keys.device)
    if not _known_to_be_none(votes_anew):
        # Moving the end of a row to its start leaves it without candidates, so that it does not vote.
        votes = token_votes(
            query,
            keys,
            seq_start,
            torch.where(votes_anew, seq_end, seq_start),
            sink_tokens=sink_tokens,
            recent_tokens=recent_tokens,
            vote=vote,
            max_tokens=max_tokens,
            num_tokens=num_tokens,
        )
        if pool_size > 1:
            tokens = torch.arange(num_tokens, device=keys.device)
            outside = (tokens < sink_tokens) | (tokens >= (length - recent_tokens)[:, None])
            votes = max_pool1d(
                votes.nan_to_num(float("-inf"), float("inf"), float("-inf")), pool_size, 1, pool_size // 2
            )
            votes.masked_fill_(outside, float("-inf"))
        voted = _top_tokens(votes, num_voted, sink_tokens)
    if threshold < 1 and cached_query is not None and cached_tokens is not None and cached_valid is not None:
        voted = torch.where(reuses[:, None], cached_tokens, voted)
        cached_tokens.copy_(torch.where(votes_anew[:, None], voted, cached_tokens))
        cached_query.copy_(torch.where(votes_anew[:, None, None], query, cached_query))
        cached_valid.copy_(torch.where(votes_anew, 1, cached_valid * is_long))
    if counter is not None:
        candidates = ((length - sink_tokens - recent_tokens) * votes_anew).sum()
        counter[2] += candidates * (kv_heads * head_dim * keys.element_size())
    if reuse_counter is not None:
        reuse_counter[0] += reuses.sum()
        reuse_counter[1] += is_long.sum()

    every = torch.arange(max_tokens, device=keys.device).expand(batch, -1)
    recent = length[:, None] - recent_tokens + every[:, :recent_tokens]
    chosen = torch.cat((every[:, :sink_tokens], voted, recent), dim=1)
    everything = every.masked_fill(every >= length[:, None], -1)
    indices = torch.where(is_long[:, None], chosen, everything).int()
    return indices[:, None], length.clamp(max=max_tokens)[:, None]


def _known_to_be_none(flags: torch.Tensor) -> bool:
    """Return whether no flag is set; False for CUDA flags, since reading them would wait for the device."""
    return flags.device.type == "cpu" and not bool(flags.any())


def _cosine(query: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each row's queries [batch, q_heads, head_dim] over all heads; NaN if one of them is 0."""
    dtype = compute_dtype(query.dtype)
    a, b = query.flatten(1).to(dtype), cached.flatten(1).to(dtype)
    return (a * b).sum(dim=1) / (a.square().sum(dim=1).sqrt() * b.square().sum(dim=1).sqrt())


def _top_tokens(votes: torch.Tensor, count: int, sink_tokens: int) -> torch.Tensor:
    """Return the candidates with the most votes [batch, count], ascending; arbitrary in rows with fewer candidates."""
    tokens = torch.arange(votes.shape[1], device=votes.device)
    # Other tokens must not tie with a candidate whose vote is NaN or -inf: sinks would come first.
    taken = _is_among_top(votes[:, sink_tokens:], count)
    ranked = tokens[sink_tokens:].masked_fill(~taken, votes.shape[1])
    chosen = ranked.topk(min(count, ranked.shape[1]), dim=1, largest=False)[0].sort(dim=1)[0].int()
    missing = count - chosen.shape[1]
    return torch.nn.functional.pad(chosen, (0, missing)) if missing else chosen


def mean_query(query: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, *, first_slot: int) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.mean_query`."""
    slots = torch.arange(first_slot, first_slot + query.shape[2], device=query.device).clamp_(max=len(rope_cos) - 1)
    unrounded = query.to(compute_dtype(query.dtype))
    return rotate(unrounded, rope_cos[slots], rope_sin[slots]).mean(dim=2).to(query.dtype)
