"""Triton launcher of `dense_decode`."""

import torch

from ._decode import decode_attention


def dense_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to every valid token; see `hf_sparse_attn_kernels.dense_decode`."""
    return decode_attention(
        query,
        keys,
        values,
        None,
        seq_start,
        seq_end,
        block_size=1,
        rope=None,
        scale=scale,
        return_lse=return_lse,
        counter=counter,
        finished=finished,
    )
