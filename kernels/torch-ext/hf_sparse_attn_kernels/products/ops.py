"""The ops that multiply a single row with a matrix."""

import torch

from .._check import check_contiguous, check_dims, check_float, check_last_stride, check_like, check_shape
from .._op import op, output

OPERATIONS = ("add", "mul")


@op(launcher="linear")
def one_row_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    weight_is_ready: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Multiply a single row with the transpose of a matrix, as `torch.nn.functional.linear` does.

    A decode step of one text reads every weight for one row, so it is bound by memory. cuBLAS computes tiles of many
    rows, and may divide a sum between two launches. Here a program has a few outputs, and reads their weights once.

    Parameters
    ----------
    input : torch.Tensor
        One row [..., in_features]: all other dimensions are 1. float32, bfloat16, float16 or float64.
    weight : torch.Tensor
        [out_features, in_features], of the dtype and on the device of `input`; the last stride is 1.
    bias : torch.Tensor, optional
        [out_features], like `weight`. It is added before the sum is rounded.
    weight_is_ready : bool
        Whether `weight` was written earlier than by the kernel that precedes this one in the stream. Its first part is
        then read while that kernel still runs, on Hopper and later.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    torch.Tensor
        [..., out_features], of the dtype of `input`; accumulated in float32 (float64 for float64), in an order that
        depends on shape and dtype alone.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride or device.
    RuntimeError
        impl="triton" cannot run here.
    """
    shape = _check_product(input, weight, bias)
    return output(input, shape, input.dtype)


@op(launcher="linear")
def combined_one_row_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    other: torch.Tensor,
    *,
    by: str,
    bias: torch.Tensor | None = None,
    weight_is_ready: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply a single row with a matrix as `one_row_linear` does, and combine the result with another row.

    A residual connection adds such a row, and a gated activation multiplies with one. The kernel that has the numbers
    at hand saves a launch for them.

    Parameters
    ----------
    input, weight, bias, weight_is_ready, impl
        As for `one_row_linear`.
    other : torch.Tensor
        [..., out_features], contiguous, like `input`.
    by : str
        "add" or "mul".

    Returns
    -------
    tuple of torch.Tensor
        The result of `one_row_linear`, to the bit, and that + `other`, or * `other`, rounded again.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or operation.
    RuntimeError
        impl="triton" cannot run here.
    """
    shape = _check_product(input, weight, bias)
    check_shape("other", other, "..., out_features", shape)
    check_like("other", other, "input", input)
    check_contiguous("other", other)
    if by not in OPERATIONS:
        raise ValueError(f"by={by!r}; allowed: {', '.join(map(repr, OPERATIONS))}")
    return output(input, shape, input.dtype), output(input, shape, input.dtype)


def _check_product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """Check the arguments of a product; return its shape."""
    check_dims("weight", weight, "out_features, in_features")
    out_features, in_features = weight.shape
    if input.numel() != in_features or input.shape[-1:] != (in_features,):
        raise ValueError(f"input has shape {list(input.shape)}; allowed: one row [..., {in_features}]")
    check_float("input", input)
    check_like("weight", weight, "input", input)
    for name, tensor in (("input", input), ("weight", weight)):
        check_last_stride(name, tensor)
    if bias is not None:
        check_shape("bias", bias, "out_features", (out_features,))
        check_like("bias", bias, "input", input)
        check_last_stride("bias", bias)
    return (*input.shape[:-1], out_features)
