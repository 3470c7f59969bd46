"""TokenSelect's vote when tensor parallelism has divided the heads: the ranks' votes are added before the choice.

One process votes and chooses in one op, ``hf_sparse_attn_kernels.select_tokens``. Here the votes leave the kernels in
between.
"""

from __future__ import annotations

import torch
from hf_sparse_attn_kernels import select_blocks, token_votes
from torch.nn.functional import max_pool1d

from hf_sparse_attn.head_shard import HeadShard


def select_tokens_together(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    shard: HeadShard,
    max_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    vote: str,
    pool_size: int,
    threshold: float = 1.0,
    cached_query: torch.Tensor | None = None,
    cached_tokens: torch.Tensor | None = None,
    cached_valid: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    reuse_counter: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens as ``hf_sparse_attn_kernels.select_tokens`` does, by the heads of all ranks.

    Adds up one vote for each token of the buffers, and with a selection cache three numbers for each row: the terms of
    the cosine. All ranks communicate in every call, whether a row votes or not, since the host does not know. The other
    parameters and the errors are those of the op.

    Parameters
    ----------
    query, keys
        Of this rank's heads, as for the op.
    shard
        This rank's part of the heads.
    counter
        Counts the bytes of this rank's keys that are read.

    Returns
    -------
    tuple of torch.Tensor
        ``block_indices`` int32 [batch, 1, max_tokens] and ``block_counts`` int32 [batch, 1]: the same on every rank.
    """
    length = (seq_end - seq_start).clamp_min(0)
    is_long = length > max_tokens
    reuses = torch.zeros_like(is_long)
    if threshold < 1 and cached_query is not None and cached_valid is not None:
        reuses = is_long & (cached_valid != 0) & (_cosine(query, cached_query, shard) >= threshold)
    votes_anew = is_long & ~reuses
    votes = token_votes(
        query,
        keys,
        seq_start,
        torch.where(votes_anew, seq_end, seq_start),  # other rows have no candidates, so that no key is read
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        vote=vote,
        max_tokens=max_tokens,
    )
    votes = shard.all_reduce(votes)
    if pool_size > 1:
        tokens = torch.arange(votes.shape[1], device=votes.device)
        outside = (tokens < sink_tokens) | (tokens >= (length - recent_tokens)[:, None])
        votes = max_pool1d(votes.nan_to_num(-torch.inf, torch.inf), pool_size, 1, pool_size // 2)
        votes = votes.masked_fill(outside, -torch.inf)
    indices, counts = select_blocks(
        votes[:, None],
        seq_start,
        seq_end,
        block_size=1,
        max_blocks=max_tokens,
        sink_blocks=sink_tokens,
        recent_blocks=recent_tokens,
    )
    if threshold < 1 and cached_query is not None and cached_tokens is not None and cached_valid is not None:
        voted = indices[:, 0, sink_tokens : max_tokens - recent_tokens]  # ascending, between the first and the last
        voted.copy_(torch.where(reuses[:, None], cached_tokens, voted))
        cached_tokens.copy_(torch.where(votes_anew[:, None], voted, cached_tokens))
        cached_query.copy_(torch.where(votes_anew[:, None, None], query, cached_query))
        cached_valid.copy_(torch.where(votes_anew, 1, cached_valid * is_long))
    if counter is not None:
        candidates = ((length - sink_tokens - recent_tokens) * votes_anew).sum()
        counter[2] += candidates * (keys.shape[1] * keys.shape[3] * keys.element_size())
    if reuse_counter is not None:
        reuse_counter += torch.stack((reuses.sum(), is_long.sum()))
    return indices, counts


def _cosine(query: torch.Tensor, cached: torch.Tensor, shard: HeadShard) -> torch.Tensor:
    """Return the cosine of each row's queries over the heads of all ranks; NaN if one of them is 0."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    own, former = query.flatten(1).to(dtype), cached.flatten(1).to(dtype)
    terms = torch.stack([(own * former).sum(1), own.square().sum(1), former.square().sum(1)])
    terms = shard.all_reduce(terms)
    return terms[0] / (terms[1].sqrt() * terms[2].sqrt())
