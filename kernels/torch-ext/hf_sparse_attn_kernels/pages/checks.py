"""Argument checks shared by the ops on pages."""

import torch

from .._check import (
    check_contiguous,
    check_device,
    check_dims,
    check_dtype,
    check_last_stride,
    check_like,
    check_page_size,
    check_scale,
    check_sequence,
    check_shape,
    check_up_to,
    skippable,
)
from . import STATISTICS

BOUNDS_AXES = "batch, kv_heads, max_pages, head_dim"
GROUP_REDUCE = ("softmax", "mean", "max")


@skippable
def check_bounds(
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    other_name: str,
    other: torch.Tensor,
) -> None:
    """Check page bounds: in the dtype of `other` without exponents, or int8 with both exponents."""
    batch, kv_heads, max_pages, head_dim = shape
    for name, bound in (("page_min", page_min), ("page_max", page_max)):
        check_shape(name, bound, BOUNDS_AXES, shape)
        check_device(name, bound, other_name, other)
        check_last_stride(name, bound)
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
            check_dtype(name, exponent, torch.int8)
            check_shape(name, exponent, axes, exponent_shape)
            check_device(name, exponent, other_name, other)
            check_contiguous(name, exponent)


@skippable
def check_capacity(page_min: torch.Tensor, capacity: int, page_size: int) -> None:
    """Check that the bounds have a page for every buffer position."""
    max_pages = page_min.shape[2]
    if max_pages * page_size < capacity:
        raise ValueError(
            f"max_pages={max_pages} of page_min; allowed: at least {-(-capacity // page_size)}, "
            f"to hold capacity={capacity} in pages of page_size={page_size}"
        )


def check_statistic(statistic: str) -> None:
    """Check the name of a statistic of a page's keys."""
    if statistic not in STATISTICS:
        raise ValueError(f"statistic={statistic!r}; allowed: {', '.join(map(repr, STATISTICS))}")


@skippable
def check_scoring(group_reduce: str, num_pages: int | None, max_pages: int, scale: float | None) -> None:
    """Check the reduction over a group, the number of pages to score, and the factor on the scores."""
    if group_reduce not in GROUP_REDUCE:
        raise ValueError(f"group_reduce={group_reduce!r}; allowed: {', '.join(map(repr, GROUP_REDUCE))}")
    check_up_to("num_pages", num_pages, max_pages, f"max_pages={max_pages}")
    check_scale(scale)


@skippable
def check_step(
    query: torch.Tensor,
    token: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    exponents: tuple[torch.Tensor | None, torch.Tensor | None],
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    page_size: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    statistic: str,
) -> None:
    """Check a token to append, and the bounds that a decode step updates and scores."""
    batch, kv_heads, capacity, head_dim = keys.shape
    for name, tensor in zip(("new_key", "new_value"), token, strict=True):
        check_shape(name, tensor, "batch, kv_heads, head_dim", (batch, kv_heads, head_dim))
        check_like(name, tensor, "query", query)
        check_last_stride(name, tensor)
    check_page_size(page_size)
    page_min, page_max = bounds
    check_dims("page_min", page_min, BOUNDS_AXES)
    shape = (batch, kv_heads, page_min.shape[2], head_dim)
    check_bounds(page_min, page_max, *exponents, shape, "query", query)
    check_capacity(page_min, capacity, page_size)
    check_sequence(*row_bounds, batch, "query", query)
    check_scoring(group_reduce, num_pages, page_min.shape[2], scale)
    check_statistic(statistic)
