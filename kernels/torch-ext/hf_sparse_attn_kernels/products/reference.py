"""Torch reference of the product of a single row."""

import torch
from torch.nn.functional import linear

from .._reference import compute_dtype


def one_row_linear(
    input: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None, weight_is_ready: bool
) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.one_row_linear`."""
    exact = compute_dtype(input.dtype)
    return linear(input.to(exact), weight.to(exact), None if bias is None else bias.to(exact)).to(input.dtype)
