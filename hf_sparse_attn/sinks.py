"""Attention sinks: a learned logit for each query head, which takes part in its softmax and has no value.

With ``l`` the log-sum-exp of a head's scaled scores over the tokens that it reads, and ``z`` the logit of its sink, the
output with the sink is the output without it times ``exp(l) / (exp(l) + exp(z))``. So ops need not know of sinks, if
they return ``l``. SDPA does not: there the sink is one more token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SINK_CHANNELS = 8
"""Channels that hold the sinks' logits in :func:`sdpa_attention`: SDPA's kernels want a multiple of 8."""


def with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the output of a softmax that the sinks take part in.

    Parameters
    ----------
    output
        [batch, q_heads, head_dim] or [batch, q_heads, tokens, head_dim]: attention without sinks. Attention to several
        sets of tokens must be merged before.
    lse
        [batch, q_heads] or [batch, q_heads, tokens]: natural logarithm of the sum of exp(scaled score) over the tokens
        read.
    sinks
        [q_heads]: logits; None for a model without sinks.

    Returns
    -------
    torch.Tensor
        Same shape and dtype as ``output``; ``output`` itself without sinks.
    """
    if sinks is None:
        return output
    logits = sinks.to(lse.dtype).view(-1, *(1,) * (lse.dim() - 2))
    return (output * torch.sigmoid(lse - logits).unsqueeze(-1)).to(output.dtype)


def sdpa_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend by Transformers' SDPA function, with sinks if there are any.

    The sinks are one more key, before the others, with a value of zeros. It has ones in two channels where the other
    keys have zeros, and the queries have their sinks' logits there, in two parts that keep 16 bits of them in bfloat16.
    So any kernel of SDPA serves, under any mask, at the cost of a copy of the keys and values.

    Parameters
    ----------
    module
        The attention module, or what has its ``num_key_value_groups`` and ``is_causal``.
    query
        [batch, q_heads, query tokens, head_dim].
    key, value
        [batch, kv_heads, length, head_dim].
    attention_mask
        SDPA's mask, broadcastable to [batch, q_heads, query tokens, length]; None for causal attention from all tokens,
        and for a single query.
    sinks
        [q_heads]: logits, or None.
    scaling
        Factor on q.k; ``head_dim ** -0.5`` if None.
    kwargs
        Further arguments of the function.

    Returns
    -------
    torch.Tensor
        [batch, query tokens, q_heads, head_dim of the values].
    """
    output: torch.Tensor
    if sinks is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output
    head_dim, value_dim = query.shape[3], value.shape[3]
    scaling = head_dim**-0.5 if scaling is None else scaling
    # A causal mask lets the first query see the first key alone: one more query, for the sinks' key.
    is_causal = attention_mask is None and query.shape[2] > 1
    logits = sinks.to(torch.promote_types(query.dtype, torch.float32)) / scaling
    high = logits.to(query.dtype)
    low = (logits - high).to(query.dtype)
    query = pad(query, (0, SINK_CHANNELS, int(is_causal), 0))
    query[..., head_dim : head_dim + 2] = torch.stack([high, low], dim=-1).unsqueeze(1)
    key, value = pad(key, (0, SINK_CHANNELS, 1, 0)), pad(value, (0, SINK_CHANNELS, 1, 0))
    key[:, :, 0, head_dim : head_dim + 2] = 1
    if attention_mask is not None:
        sees_sinks = True if attention_mask.dtype == torch.bool else 0.0
        attention_mask = pad(attention_mask, (1, 0), value=sees_sinks)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return output[:, int(is_causal) :, :, :value_dim]
