"""Triton launcher of `append_and_attend_progressively`: the launches of its two ops, one after another."""

import torch

from ..pages.step_rank import append_and_rank
from ..progressive.decode import progressive_decode


def append_and_attend_progressively(
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
    microbatch: int,
    threshold: float,
    max_blocks: int | None,
    sink_blocks: int,
    recent_blocks: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    rest: str,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
    statistic: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rank, then attend."""
    block_order, block_counts = append_and_rank(
        query,
        new_key,
        new_value,
        keys,
        values,
        page_min,
        page_max,
        seq_start,
        seq_end,
        page_size=page_size,
        max_blocks=max_blocks,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
        scale=scale,
        group_reduce=group_reduce,
        num_pages=num_pages,
        page_exponent=page_exponent,
        channel_exponent=channel_exponent,
        counter=counter,
        statistic=statistic,
    )
    out, lse, read_counts = progressive_decode(
        query,
        keys,
        values,
        block_order,
        block_counts,
        seq_start,
        seq_end,
        block_size=page_size,
        microbatch=microbatch,
        threshold=threshold,
        scale=scale,
        rest=rest,
        forced_blocks=sink_blocks + recent_blocks,
        counter=counter,
        finished=finished,
    )
    return out, lse, block_order, read_counts
