"""What the ops that choose single tokens ask of their arguments; see `_checks`."""

import torch

from . import _validate as validate
from ._attention_checks import BUFFER_AXES, check_counters, check_query, check_rope

VOTES = ("soft", "logits", "head")


def _scoring(query: torch.Tensor, keys: torch.Tensor, vote: str, num_tokens: int | None) -> None:
    """Check the query and the keys that it scores."""
    validate.check_dims("keys", keys, BUFFER_AXES)
    kv_heads, capacity = keys.shape[1:3]
    check_query(query, kv_heads)
    validate.check_shape("keys", keys, BUFFER_AXES, (query.shape[0], kv_heads, capacity, query.shape[2]))
    validate.check_like("keys", keys, "query", query)
    validate.check_last_stride("keys", keys)
    if vote not in VOTES:
        raise ValueError(f"vote={vote!r}; allowed: {', '.join(map(repr, VOTES))}")
    if num_tokens is not None and not 1 <= num_tokens <= capacity:
        raise ValueError(f"num_tokens={num_tokens}; allowed: None, or 1 to capacity={capacity}")


def _budget(max_tokens: int, sink_tokens: int, recent_tokens: int) -> None:
    """Check that at least one token is left to vote for."""
    validate.check_at_least("max_tokens", max_tokens, 1)
    if sink_tokens + recent_tokens >= max_tokens:
        raise ValueError(
            f"sink_tokens={sink_tokens} and recent_tokens={recent_tokens}; allowed: together less than "
            f"max_tokens={max_tokens}"
        )


def _cache(
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
        raise ValueError(f"{', '.join(given)} given; allowed: cached_query, cached_tokens and cached_valid, or none")
    for name, tensor, dtype, axes, shape in cached:
        if tensor is not None:
            validate.check_dtype(name, tensor, dtype)
            validate.check_shape(name, tensor, axes, shape)
            validate.check_device(name, tensor, "query", query)
            validate.check_contiguous(name, tensor)


def token_votes(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
    vote: str = "soft",
    max_tokens: int | None = None,
    num_tokens: int | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.token_votes`."""
    _scoring(query, keys, vote, num_tokens)
    validate.check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    validate.check_at_least("sink_tokens", sink_tokens, 0)
    validate.check_at_least("recent_tokens", recent_tokens, 0)
    if max_tokens is not None:
        _budget(max_tokens, sink_tokens, recent_tokens)
    elif vote == "head":
        raise ValueError("max_tokens=None; allowed with vote='head': an int, as each head votes for so many tokens")


def select_tokens(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    vote: str = "soft",
    pool_size: int = 0,
    num_tokens: int | None = None,
    cached_query: torch.Tensor | None = None,
    cached_tokens: torch.Tensor | None = None,
    cached_valid: torch.Tensor | None = None,
    threshold: float = 1.0,
    counter: torch.Tensor | None = None,
    reuse_counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.select_tokens`."""
    _scoring(query, keys, vote, num_tokens)
    validate.check_sequence(seq_start, seq_end, query.shape[0], "query", query)
    validate.check_at_least("sink_tokens", sink_tokens, 0)
    validate.check_at_least("recent_tokens", recent_tokens, 0)
    _budget(max_tokens, sink_tokens, recent_tokens)
    validate.check_at_least("pool_size", pool_size, 0)
    if pool_size > 0 and pool_size % 2 == 0:
        raise ValueError(f"pool_size={pool_size}; allowed: 0, or an odd number")
    _cache(query, cached_query, cached_tokens, cached_valid, max_tokens - sink_tokens - recent_tokens)
    check_counters(counter, finished, query, keys.shape[1])
    if reuse_counter is not None:
        validate.check_dtype("reuse_counter", reuse_counter, torch.int64)
        validate.check_shape("reuse_counter", reuse_counter, "2", (2,))
        validate.check_device("reuse_counter", reuse_counter, "query", query)
        validate.check_contiguous("reuse_counter", reuse_counter)


def mean_query(query: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, *, first_slot: int) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.mean_query`."""
    validate.check_dims("query", query, "batch, q_heads, queries, head_dim")
    validate.check_float("query", query)
    validate.check_last_stride("query", query)
    check_rope(rope_cos, rope_sin, query, "1", 1)
    validate.check_at_least("first_slot", first_slot, 0)
