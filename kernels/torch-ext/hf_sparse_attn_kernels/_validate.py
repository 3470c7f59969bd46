"""Argument checks of the ops: from shapes, dtypes and devices alone, so that none waits for the device."""

import torch

MAX_HEAD_DIM = 256  # of the Triton kernels
GROUP_REDUCE = ("softmax", "mean", "max")
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*TRITON_DTYPES, torch.float64)


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
    """Check the number of dimensions against `axes`, as in "batch, kv_heads, n"; none may be empty."""
    count = axes.count(",") + 1
    if tensor.dim() != count or 0 in tensor.shape:
        raise ValueError(f"{name} has shape {_shape(tensor)}; allowed: [{axes}], none of them 0")


def check_shape(name: str, tensor: torch.Tensor, axes: str, shape: tuple[int, ...]) -> None:
    """Check the exact shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {_shape(tensor)}; allowed: [{axes}] = {list(shape)}")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Check that the last dimension, which the kernels read as vectors, is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; allowed: 1")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that the kernels may count through the tensor without strides."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; allowed: contiguous")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that `tensor` has the one dtype that is allowed."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}")


def check_sequence(
    seq_start: torch.Tensor, seq_end: torch.Tensor, batch: int, other_name: str, other: torch.Tensor
) -> None:
    """Check the bounds of the rows: int32 [batch] on the device of `other`."""
    for name, tensor in (("seq_start", seq_start), ("seq_end", seq_end)):
        check_dtype(name, tensor, torch.int32)
        check_shape(name, tensor, "batch", (batch,))
        check_device(name, tensor, other_name, other)


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Check a whole number of the host."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}={value!r}; allowed: an int of at least {minimum}")


def check_page_size(page_size: int) -> None:
    """Check for a power of two."""
    check_at_least("page_size", page_size, 1)
    if page_size & (page_size - 1):
        raise ValueError(f"page_size={page_size}; allowed: a power of two")


def check_group(q_heads: int, kv_heads: int) -> None:
    """Check that every KV head serves the same number of query heads."""
    if q_heads % kv_heads:
        raise ValueError(f"q_heads={q_heads} of query; allowed: a multiple of kv_heads={kv_heads}")
