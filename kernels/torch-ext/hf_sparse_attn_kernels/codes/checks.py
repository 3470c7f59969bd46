"""Argument checks shared by the ops on key codes."""

import torch

from .._check import (
    check_at_least,
    check_contiguous,
    check_device,
    check_dims,
    check_dtype,
    check_scale,
    check_shape,
    check_up_to,
)
from . import BITS, CORRECTIONS, GROUP_REDUCE

CODES_AXES = "batch, kv_heads, pages * page_size, bits, head_dim // 8"


def check_page_size(page_size: int) -> None:
    """Check that tiles of 16 tokens lie within a page."""
    check_at_least("page_size", page_size, 1)
    if page_size % 16:
        raise ValueError(f"page_size={page_size}; allowed: a multiple of 16")


def check_codes(
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    query_centre: torch.Tensor | None,
    *,
    shape: tuple[int, int, int],
    page_size: int,
    bits: int,
    shared_centre: bool,
    other_name: str,
    other: torch.Tensor,
) -> None:
    """Check the metadata of a layer of `shape` (batch, kv_heads, head_dim), on the device of `other`."""
    batch, kv_heads, head_dim = shape
    check_page_size(page_size)
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits={bits!r}; allowed: {', '.join(map(str, BITS))}")
    if head_dim % 8:
        raise ValueError(f"head_dim={head_dim} of {other_name}; allowed: a multiple of 8")
    check_dims("codes", codes, CODES_AXES)
    tokens = codes.shape[2]
    if tokens % page_size:
        raise ValueError(f"codes has {tokens} tokens; allowed: a multiple of page_size={page_size}")
    pages, width = tokens // page_size, 1 if query_centre is None else 2
    pair, head = (batch, kv_heads), "batch, kv_heads"
    centre_count, of_centres = (1, "1") if shared_centre else (pages, "pages")
    expected = [
        ("codes", codes, torch.uint8, CODES_AXES, (*pair, tokens, bits, head_dim // 8)),
        ("factors", factors, torch.float16, f"{head}, pages * page_size, {width}", (*pair, tokens, width)),
        ("centres", centres, torch.int8, f"{head}, {of_centres}, head_dim", (*pair, centre_count, head_dim)),
        ("centre_scale", centre_scale, torch.float16, f"{head}, {of_centres}", (*pair, centre_count)),
    ]
    if query_centre is not None:
        expected.append(("query_centre", query_centre, torch.float32, f"{head}, head_dim", (*pair, head_dim)))
    for name, tensor, dtype, axes, tensor_shape in expected:
        check_dtype(name, tensor, dtype)
        check_shape(name, tensor, axes, tensor_shape)
        check_device(name, tensor, other_name, other)
        check_contiguous(name, tensor)


def check_correction(correction: str) -> None:
    """Check the choice of the factor."""
    if correction not in CORRECTIONS:
        raise ValueError(f"correction={correction!r}; allowed: {', '.join(map(repr, CORRECTIONS))}")


def check_room(codes: torch.Tensor, capacity: int) -> None:
    """Check that every buffer position has codes."""
    if codes.shape[2] < capacity:
        raise ValueError(f"codes has {codes.shape[2]} tokens; allowed: at least capacity={capacity} of keys")


def check_reduction(group_reduce: str, num_tokens: int | None, tokens: int, scale: float | None) -> None:
    """Check the reduction over a group, the number of tokens to score, and the factor on the scores."""
    if group_reduce not in GROUP_REDUCE:
        raise ValueError(f"group_reduce={group_reduce!r}; allowed: {', '.join(map(repr, GROUP_REDUCE))}")
    check_up_to("num_tokens", num_tokens, tokens, f"{tokens}, the tokens of codes")
    check_scale(scale)


def check_share(name: str, share: float) -> None:
    """Check a share that must not be 0."""
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise TypeError(f"{name} has type {type(share).__name__}; allowed: a number")
    if not 0 < share <= 1:
        raise ValueError(f"{name}={share}; allowed: above 0 and at most 1")


def check_forced_tokens(sink_tokens: int, page_size: int) -> None:
    """Check the numbers of tokens that are always read."""
    check_page_size(page_size)
    check_at_least("sink_tokens", sink_tokens, 0)


def check_token_budget(max_tokens: int, sink_tokens: int, page_size: int) -> None:
    """Check that the tokens that are always read fit."""
    check_forced_tokens(sink_tokens, page_size)
    check_at_least("max_tokens", max_tokens, 1)
    if sink_tokens + page_size > max_tokens:
        raise ValueError(
            f"sink_tokens={sink_tokens} and page_size={page_size}; allowed: together at most max_tokens={max_tokens}"
        )
