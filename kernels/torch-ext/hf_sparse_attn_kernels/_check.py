"""Argument checks shared by several ops. They look at shapes, dtypes and devices only, so none waits for a device."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., None])

MAX_HEAD_DIM = 256  # of the Triton kernels
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*TRITON_DTYPES, torch.float64)
BUFFER_AXES = "batch, kv_heads, capacity, head_dim"


class _Skipping(threading.local):
    now = False


skipping = _Skipping()
"""``skipping.now``: whether the calling thread skips the checks of ops."""


@contextmanager
def skip_checks() -> Iterator[None]:
    """Skip the argument checks of ops called by this thread inside the `with` block.

    For arguments of which the same op has checked others of the same shapes, strides, dtypes and devices. Anything else
    reads or writes memory that it should not.
    """
    before, skipping.now = skipping.now, True
    try:
        yield
    finally:
        skipping.now = before


def skippable(check: F) -> F:
    """Turn a check that consists of many into one that `skip_checks` skips as a whole."""

    @wraps(check)
    def call(*arguments: Any, **options: Any) -> None:
        if not skipping.now:
            check(*arguments, **options)

    return cast(F, call)


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Check the dtype that decides the precision of the op."""
    if tensor.dtype not in REFERENCE_DTYPES:
        allowed = ", ".join(map(str, REFERENCE_DTYPES))
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {allowed}")


def check_like(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check that `tensor` has the dtype and the device of `other`."""
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {other.dtype}, the dtype of {other_name}")
    check_device(name, tensor, other_name, other)


def check_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check that `tensor` lies on the device of `other`."""
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}; allowed: {other.device}, the device of {other_name}")


def check_dims(name: str, tensor: torch.Tensor, axes: str) -> None:
    """Check that `tensor` has the dimensions named in `axes`, such as "batch, kv_heads, n", and that none is 0."""
    count = axes.count(",") + 1
    if tensor.dim() != count or 0 in tensor.shape:
        raise ValueError(f"{name} has shape {_shape(tensor)}; allowed: [{axes}], all at least 1")


def check_shape(name: str, tensor: torch.Tensor, axes: str, shape: tuple[int, ...]) -> None:
    """Check the exact shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {_shape(tensor)}; allowed: [{axes}] = {list(shape)}")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Check that the last dimension, which the kernels read as vectors, is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; allowed: 1")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that the tensor is contiguous, as kernels that take no strides assume."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; allowed: contiguous")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that `tensor` has the only dtype allowed."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}")


def check_int32(
    name: str, tensor: torch.Tensor, axes: str, shape: tuple[int, ...], other_name: str, other: torch.Tensor
) -> None:
    """Check an int32 tensor of a known shape on the device of `other`."""
    check_dtype(name, tensor, torch.int32)
    check_shape(name, tensor, axes, shape)
    check_device(name, tensor, other_name, other)


@skippable
def check_sequence(
    seq_start: torch.Tensor, seq_end: torch.Tensor, batch: int, other_name: str, other: torch.Tensor
) -> None:
    """Check the row bounds: int32 [batch] on the device of `other`."""
    for name, tensor in (("seq_start", seq_start), ("seq_end", seq_end)):
        check_int32(name, tensor, "batch", (batch,), other_name, other)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Check that `value` is a whole number of at least `minimum`."""
    if not _is_whole(value) or value < minimum:
        raise ValueError(f"{name}={value!r}; allowed: an int of at least {minimum}")


def check_up_to(name: str, value: int | None, maximum: int, allowed: str) -> None:
    """Check that `value` is None or a whole number from 1 to `maximum`, which `allowed` describes."""
    if value is not None and not (_is_whole(value) and 1 <= value <= maximum):
        raise ValueError(f"{name}={value!r}; allowed: None, or 1 to {allowed}")


def check_scale(scale: float | None) -> None:
    """Check the factor on q.k: a number, or None for the default."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat, type(None))):
        raise TypeError(f"scale={scale!r} has type {type(scale).__name__}; allowed: a number or None")


def check_is_tensor(name: str, value: object) -> None:
    """Check that a tensor is given."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} has type {type(value).__name__}; allowed: torch.Tensor")


def check_page_size(page_size: int) -> None:
    """Check that `page_size` is a power of two."""
    check_at_least("page_size", page_size, 1)
    if page_size & (page_size - 1):
        raise ValueError(f"page_size={page_size}; allowed: a power of two")


def check_scores(scores: torch.Tensor) -> None:
    """Check the scores of blocks."""
    check_dims("scores", scores, "batch, kv_heads, num_blocks")
    if scores.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scores has dtype {scores.dtype}; allowed: torch.float32, torch.float64")


@skippable
def check_budget(max_blocks: int, sink_blocks: int, recent_blocks: int, least_recent: int = 0) -> None:
    """Check that the always chosen blocks fit."""
    check_at_least("max_blocks", max_blocks, 1)
    check_at_least("sink_blocks", sink_blocks, 0)
    check_at_least("recent_blocks", recent_blocks, least_recent)
    if sink_blocks + recent_blocks > max_blocks:
        raise ValueError(
            f"sink_blocks={sink_blocks} and recent_blocks={recent_blocks}; allowed: together at most "
            f"max_blocks={max_blocks}"
        )


def check_group(q_heads: int, kv_heads: int) -> None:
    """Check that every KV head serves the same number of query heads."""
    if q_heads % kv_heads:
        raise ValueError(f"q_heads={q_heads} of query; allowed: a multiple of kv_heads={kv_heads}")


@skippable
def check_query(query: torch.Tensor, kv_heads: int) -> None:
    """Check one query token per row against the KV heads."""
    check_dims("query", query, "batch, q_heads, head_dim")
    check_float("query", query)
    check_group(query.shape[1], kv_heads)


@skippable
def check_buffers(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Check one query token per row, and keys and values against it."""
    check_dims("keys", keys, BUFFER_AXES)
    check_query(query, keys.shape[1])
    check_keys_and_values(query, keys, values)


@skippable
def check_keys_and_values(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Check 4-dimensional keys and values against the query."""
    shape = (query.shape[0], *keys.shape[1:3], query.shape[-1])
    for name, buffer in (("keys", keys), ("values", values)):
        check_shape(name, buffer, BUFFER_AXES, shape)
        check_like(name, buffer, "query", query)
        check_last_stride(name, buffer)


@skippable
def check_selection(
    query: torch.Tensor, keys: torch.Tensor, block_indices: torch.Tensor, block_counts: torch.Tensor
) -> None:
    """Check a selection, one per KV head or shared by all of them."""
    batch, kv_heads = keys.shape[:2]
    check_dims("block_indices", block_indices, "batch, kv_heads or 1, max_blocks")
    heads = 1 if block_indices.shape[1] == 1 else kv_heads
    shape = (batch, heads, block_indices.shape[2])
    check_shape("block_indices", block_indices, "batch, kv_heads or 1, max_blocks", shape)
    check_shape("block_counts", block_counts, "batch, heads of block_indices", (batch, heads))
    for name, tensor in (("block_indices", block_indices), ("block_counts", block_counts)):
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, "query", query)


@skippable
def check_rope(
    rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, query: torch.Tensor, slots_name: str, slots: int
) -> None:
    """Check that the tables of rotations cover `slots` slots."""
    if rope_cos is None or rope_sin is None:
        if rope_cos is not None or rope_sin is not None:
            name, other = ("rope_cos", "rope_sin") if rope_cos is None else ("rope_sin", "rope_cos")
            raise ValueError(f"{name} is None; allowed: a tensor, because {other} is one")
        return
    head_dim = query.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} of query; allowed with rope_cos: an even number")
    check_dims("rope_cos", rope_cos, "slots, head_dim // 2")
    if rope_cos.shape[0] < slots:
        raise ValueError(f"slots={rope_cos.shape[0]} of rope_cos; allowed: at least {slots_name}={slots}")
    for name, table in (("rope_cos", rope_cos), ("rope_sin", rope_sin)):
        check_dtype(name, table, torch.float32)
        check_shape(name, table, "slots, head_dim // 2", (rope_cos.shape[0], head_dim // 2))
        check_device(name, table, "query", query)
        check_contiguous(name, table)


@skippable
def check_counters(
    counter: torch.Tensor | None, finished: torch.Tensor | None, query: torch.Tensor, kv_heads: int
) -> None:
    """Check the counter of reads, and the scratch counters of an op's programs."""
    if counter is not None:
        check_dtype("counter", counter, torch.int64)
        check_shape("counter", counter, "4", (4,))
        check_device("counter", counter, "query", query)
        check_contiguous("counter", counter)
    if finished is not None:
        check_dtype("finished", finished, torch.int32)
        check_shape("finished", finished, "batch, kv_heads", (query.shape[0], kv_heads))
        check_device("finished", finished, "query", query)
        check_contiguous("finished", finished)


def check_triton_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...] = TRITON_DTYPES) -> None:
    """Check the dtype that decides the precision of an op against the kernels' dtypes."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed for impl='triton': {', '.join(map(str, dtypes))}")


def check_triton(name: str, tensor: torch.Tensor) -> None:
    """Check dtype and head_dim, the last dimension, against the limits of the kernels."""
    check_triton_dtype(name, tensor)
    if tensor.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"head_dim={tensor.shape[-1]} of {name}; allowed for impl='triton': at most {MAX_HEAD_DIM}")
