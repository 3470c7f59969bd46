"""Argument checks shared by the ops on single tokens."""

import torch

from .._check import (
    BUFFER_AXES,
    check_at_least,
    check_contiguous,
    check_device,
    check_dims,
    check_dtype,
    check_last_stride,
    check_like,
    check_query,
    check_shape,
    check_up_to,
)

VOTES = ("soft", "logits", "head")


def check_scoring(query: torch.Tensor, keys: torch.Tensor, vote: str, num_tokens: int | None) -> None:
    """Check the query and the keys that it scores."""
    check_dims("keys", keys, BUFFER_AXES)
    kv_heads, capacity = keys.shape[1:3]
    check_query(query, kv_heads)
    check_shape("keys", keys, BUFFER_AXES, (query.shape[0], kv_heads, capacity, query.shape[2]))
    check_like("keys", keys, "query", query)
    check_last_stride("keys", keys)
    if vote not in VOTES:
        raise ValueError(f"vote={vote!r}; allowed: {', '.join(map(repr, VOTES))}")
    check_up_to("num_tokens", num_tokens, capacity, f"capacity={capacity}")


def check_budget(max_tokens: int, sink_tokens: int, recent_tokens: int) -> None:
    """Check that the budget leaves at least one token to vote for."""
    check_at_least("max_tokens", max_tokens, 1)
    if sink_tokens + recent_tokens >= max_tokens:
        raise ValueError(
            f"sink_tokens={sink_tokens} and recent_tokens={recent_tokens}; allowed: together less than "
            f"max_tokens={max_tokens}"
        )


def check_cache(
    query: torch.Tensor,
    cached_query: torch.Tensor | None,
    cached_tokens: torch.Tensor | None,
    cached_valid: torch.Tensor | None,
    num_voted: int,
) -> None:
    """Check the selection cache: all three of its tensors, or none."""
    batch = query.shape[0]
    cached = (
        ("cached_query", cached_query, query.dtype, "batch, q_heads, head_dim", tuple(query.shape)),
        ("cached_tokens", cached_tokens, torch.int32, "batch, num_voted", (batch, num_voted)),
        ("cached_valid", cached_valid, torch.int32, "batch", (batch,)),
    )
    given = [name for name, tensor, *_ in cached if tensor is not None]
    if given and len(given) < len(cached):
        raise ValueError(
            f"{', '.join(given)} given; allowed: all of cached_query, cached_tokens and cached_valid, or none"
        )
    for name, tensor, dtype, axes, shape in cached:
        if tensor is not None:
            check_dtype(name, tensor, dtype)
            check_shape(name, tensor, axes, shape)
            check_device(name, tensor, "query", query)
            check_contiguous(name, tensor)
