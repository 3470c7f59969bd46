"""Triton launcher of `append_and_attend_tokens`: those of `append_and_select_tokens`, then `sparse_decode`."""

import torch

from ..attention.decode import sparse_decode
from .step import append_and_select_tokens


def append_and_attend_tokens(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    sink_tokens: int,
    bits: int,
    correction: str,
    query_centre: torch.Tensor | None,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select, then attend."""
    block_indices, block_counts = append_and_select_tokens(
        query,
        new_key,
        new_value,
        keys,
        values,
        codes,
        factors,
        centres,
        centre_scale,
        coded,
        seq_start,
        seq_end,
        page_size=page_size,
        max_tokens=max_tokens,
        sink_tokens=sink_tokens,
        bits=bits,
        correction=correction,
        query_centre=query_centre,
        scale=scale,
        group_reduce=group_reduce,
        num_tokens=num_tokens,
        counter=counter,
    )
    out, lse = sparse_decode(
        query,
        keys,
        values,
        block_indices,
        block_counts,
        seq_start,
        seq_end,
        block_size=1,
        rope_cos=None,
        rope_sin=None,
        scale=scale,
        counter=counter,
        finished=finished,
    )
    return out, lse, block_indices, block_counts
