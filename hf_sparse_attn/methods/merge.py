"""Merge of attention to parts of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_attention(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention to disjoint sets of tokens by their log-sum-exp, as split-KV decoding does.

    Parameters
    ----------
    parts
        Outputs and log-sum-exps of the scaled scores, [batch, n, q_heads, head_dim] and [batch, n, q_heads] each: n
        sets of tokens, of which those without tokens have -inf.

    Returns
    -------
    tuple of torch.Tensor
        Output [batch, q_heads, head_dim], in the dtype of the log-sum-exps, and log-sum-exp [batch, q_heads]; zeros and
        -inf where no set has a token.
    """
    sums = torch.cat([lse for _, lse in parts], dim=1)
    outputs = torch.cat([out for out, _ in parts], dim=1)
    total = sums.logsumexp(dim=1)
    lowest = torch.finfo(total.dtype).min  # -inf minus -inf would be NaN
    weights = (sums - total.clamp_min(lowest).unsqueeze(1)).exp()
    return (weights.unsqueeze(3) * outputs).sum(dim=1), total
