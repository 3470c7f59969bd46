"""Argument checks shared by the ops of a decode step by key codes."""

import torch

from .._check import (
    check_buffers,
    check_contiguous,
    check_int32,
    check_last_stride,
    check_like,
    check_sequence,
    check_shape,
)
from .checks import check_codes, check_correction, check_reduction, check_room, check_token_budget


def check_step(
    query: torch.Tensor,
    new_tokens: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor],
    metadata: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    query_centre: torch.Tensor | None,
    coded: torch.Tensor,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    page_size: int,
    bits: int,
    correction: str,
    max_tokens: int,
    sink_tokens: int,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
) -> None:
    """Check the arguments of `append_and_select_tokens` but the counter."""
    keys, codes = buffers[0], metadata[0]
    check_buffers(query, *buffers)
    batch, kv_heads, capacity, head_dim = keys.shape
    for name, tensor in zip(("new_key", "new_value"), new_tokens, strict=True):
        check_shape(name, tensor, "batch, kv_heads, head_dim", (batch, kv_heads, head_dim))
        check_like(name, tensor, "query", query)
        check_last_stride(name, tensor)
    check_codes(
        *metadata,
        query_centre,
        shape=(batch, kv_heads, head_dim),
        page_size=page_size,
        bits=bits,
        shared_centre=False,
        other_name="query",
        other=query,
    )
    check_correction(correction)
    check_room(codes, capacity)
    check_int32("coded", coded, "batch, kv_heads", (batch, kv_heads), "query", query)
    check_contiguous("coded", coded)
    check_sequence(*row_bounds, batch, "query", query)
    check_reduction(group_reduce, num_tokens, codes.shape[2], scale)
    check_token_budget(max_tokens, sink_tokens, page_size)
