"""What each op asks of its arguments; every check has the name and, `impl` left out, the signature of its op."""

import torch

from . import _validate as validate
from ._attention_checks import BUFFER_AXES, check_buffers, check_counters, check_query
from ._attention_checks import dense_decode as dense_decode
from ._attention_checks import sparse_decode as sparse_decode
from ._attention_checks import sparse_prefill as sparse_prefill
from ._token_checks import mean_query as mean_query
from ._token_checks import select_tokens as select_tokens
from ._token_checks import token_votes as token_votes

BOUNDS_AXES = "batch, kv_heads, max_pages, head_dim"


def _bounds(
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    other_name: str,
    other: torch.Tensor,
) -> None:
    """Check page bounds: of the dtype of `other` without exponents, or int8 with both."""
    batch, kv_heads, max_pages, head_dim = shape
    for name, bound in (("page_min", page_min), ("page_max", page_max)):
        validate.check_shape(name, bound, BOUNDS_AXES, shape)
        validate.check_device(name, bound, other_name, other)
        validate.check_last_stride(name, bound)
        if bound.dtype not in (other.dtype, torch.int8):
            raise TypeError(
                f"{name} has dtype {bound.dtype}; allowed: {other.dtype}, the dtype of {other_name}, or torch.int8"
            )
    if page_max.dtype != page_min.dtype:
        raise TypeError(f"page_max has dtype {page_max.dtype}; allowed: {page_min.dtype}, the dtype of page_min")
    exponents = (
        ("page_exponent", page_exponent, "batch, kv_heads, max_pages", (batch, kv_heads, max_pages)),
        ("channel_exponent", channel_exponent, "batch, kv_heads, head_dim", (batch, kv_heads, head_dim)),
    )
    for name, exponent, axes, exponent_shape in exponents:
        if page_min.dtype != torch.int8:
            if exponent is not None:
                raise ValueError(f"{name} is given; allowed: None, because page_min has dtype {page_min.dtype}")
        elif exponent is None:
            raise ValueError(f"{name} is None; allowed: a tensor [{axes}], because page_min has dtype torch.int8")
        else:
            validate.check_dtype(name, exponent, torch.int8)
            validate.check_shape(name, exponent, axes, exponent_shape)
            validate.check_device(name, exponent, other_name, other)
            validate.check_contiguous(name, exponent)


def _capacity(page_min: torch.Tensor, capacity: int, page_size: int) -> None:
    """Check that the bounds have a page for every buffer position."""
    max_pages = page_min.shape[2]
    if max_pages * page_size < capacity:
        raise ValueError(
            f"max_pages={max_pages} of page_min; allowed: at least {-(-capacity // page_size)}, "
            f"to hold capacity={capacity} in pages of page_size={page_size}"
        )


def _scoring(group_reduce: str, num_pages: int | None, max_pages: int) -> None:
    if group_reduce not in validate.GROUP_REDUCE:
        raise ValueError(f"group_reduce={group_reduce!r}; allowed: {', '.join(map(repr, validate.GROUP_REDUCE))}")
    if num_pages is not None and not 1 <= num_pages <= max_pages:
        raise ValueError(f"num_pages={num_pages}; allowed: None, or 1 to max_pages={max_pages}")


def _budget(max_blocks: int, sink_blocks: int, recent_blocks: int, least_recent: int = 0) -> None:
    validate.check_at_least("max_blocks", max_blocks, 1)
    validate.check_at_least("sink_blocks", sink_blocks, 0)
    validate.check_at_least("recent_blocks", recent_blocks, least_recent)
    if sink_blocks + recent_blocks > max_blocks:
        raise ValueError(
            f"sink_blocks={sink_blocks} and recent_blocks={recent_blocks}; allowed: together at most "
            f"max_blocks={max_blocks}"
        )


def page_bounds(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    num_new: int,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.page_bounds`."""
    validate.check_dims("keys", keys, BUFFER_AXES)
    batch, kv_heads, capacity, head_dim = keys.shape
    validate.check_float("keys", keys)
    validate.check_last_stride("keys", keys)
    validate.check_page_size(page_size)
    validate.check_at_least("num_new", num_new, 0)
    validate.check_dims("page_min", page_min, BOUNDS_AXES)
    shape = (batch, kv_heads, page_min.shape[2], head_dim)
    _bounds(page_min, page_max, page_exponent, channel_exponent, shape, "keys", keys)
    _capacity(page_min, capacity, page_size)
    validate.check_sequence(seq_start, seq_end, batch, "keys", keys)


def page_scores(
    query: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.page_scores`."""
    validate.check_dims("page_min", page_min, BOUNDS_AXES)
    kv_heads, max_pages = page_min.shape[1:3]
    check_query(query, kv_heads)
    batch, _, head_dim = query.shape
    shape = (batch, kv_heads, max_pages, head_dim)
    _bounds(page_min, page_max, page_exponent, channel_exponent, shape, "query", query)
    validate.check_sequence(seq_start, seq_end, batch, "query", query)
    validate.check_page_size(page_size)
    _scoring(group_reduce, num_pages, max_pages)


def select_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
    sink_blocks: int = 0,
    recent_blocks: int = 0,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.select_blocks`."""
    validate.check_dims("scores", scores, "batch, kv_heads, num_blocks")
    if scores.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scores has dtype {scores.dtype}; allowed: torch.float32, torch.float64")
    validate.check_sequence(seq_start, seq_end, scores.shape[0], "scores", scores)
    validate.check_at_least("block_size", block_size, 1)
    _budget(max_blocks, sink_blocks, recent_blocks)


def append_and_select(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_blocks: int,
    sink_blocks: int = 0,
    recent_blocks: int = 0,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
    page_exponent: torch.Tensor | None = None,
    channel_exponent: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> None:
    """Check the arguments of `hf_sparse_attn_kernels.append_and_select`."""
    check_buffers(query, keys, values)
    batch, kv_heads, capacity, head_dim = keys.shape
    for name, token in (("new_key", new_key), ("new_value", new_value)):
        validate.check_shape(name, token, "batch, kv_heads, head_dim", (batch, kv_heads, head_dim))
        validate.check_like(name, token, "query", query)
        validate.check_last_stride(name, token)
    validate.check_page_size(page_size)
    validate.check_dims("page_min", page_min, BOUNDS_AXES)
    shape = (batch, kv_heads, page_min.shape[2], head_dim)
    _bounds(page_min, page_max, page_exponent, channel_exponent, shape, "query", query)
    _capacity(page_min, capacity, page_size)
    validate.check_sequence(seq_start, seq_end, batch, "query", query)
    _scoring(group_reduce, num_pages, page_min.shape[2])
    _budget(max_blocks, sink_blocks, recent_blocks, least_recent=1)
    check_counters(counter, finished, query, keys.shape[1])


def for_triton(op: str, tensor: torch.Tensor) -> None:
    """Check what only the Triton kernels ask of an op's first tensor: its dtype and, where they tile it, head_dim."""
    name = {"page_bounds": "keys", "select_blocks": "scores"}.get(op, "query")
    allowed = (torch.float32,) if name == "scores" else validate.TRITON_DTYPES
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed for impl='triton': {', '.join(map(str, allowed))}")
    if name != "scores" and tensor.shape[-1] > validate.MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim={tensor.shape[-1]} of {name}; allowed for impl='triton': at most {validate.MAX_HEAD_DIM}"
        )
