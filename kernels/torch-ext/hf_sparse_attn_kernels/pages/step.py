"""Triton launcher of `append_and_select`: the new token and the page scores of a decode step, then its top-k."""

import torch

from .._check import check_triton
from .step_scores import score_pages
from .step_select import select_pages


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
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and score in one launch, select in another."""
    check_triton("query", query)
    q_heads, head_dim = query.shape[1:]
    kv_heads, max_pages = page_min.shape[1:3]
    group = q_heads // kv_heads
    rows = (seq_start.contiguous(), seq_end.contiguous())
    num_pages = max_pages if num_pages is None else num_pages
    if group == 1:
        group_reduce = "max"  # of one head all three keep the order
    scored = score_pages(
        query,
        (new_key, new_value),
        (keys, values),
        (page_min, page_max),
        None if page_exponent is None or channel_exponent is None else (page_exponent, channel_exponent),
        rows,
        page_size=page_size,
        num_pages=num_pages,
        scale=head_dim**-0.5 if scale is None else scale,
        group_reduce=group_reduce,
        counter=counter,
    )
    return select_pages(
        scored,
        rows,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=num_pages,
        max_blocks=max_blocks,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
        group_reduce=group_reduce,
        finished=finished,
    )
