"""Torch reference of products of a single row."""

import torch
from torch.nn.functional import linear

from .._reference import compute_dtype


def one_row_linear(
    input: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None, weight_is_ready: bool
) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.one_row_linear`."""
    exact = compute_dtype(input.dtype)
    return linear(input.to(exact), weight.to(exact), None if bias is None else bias.to(exact)).to(input.dtype)


def combined_one_row_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    other: torch.Tensor,
    *,
    by: str,
    bias: torch.Tensor | None,
    weight_is_ready: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.combined_one_row_linear`."""
    out = one_row_linear(input, weight, bias=bias, weight_is_ready=weight_is_ready)
    return out, out + other if by == "add" else out * other
