"""Triton launcher of `sparse_decode`."""

import torch

from ._decode import decode_attention


def sparse_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    counter: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to the selected blocks; see `hf_sparse_attn_kernels.sparse_decode`."""
    return decode_attention(
        query,
        keys,
        values,
        (block_indices.contiguous(), block_counts.contiguous()),
        seq_start,
        seq_end,
        block_size=block_size,
        rope=None if rope_cos is None or rope_sin is None else (rope_cos, rope_sin),
        scale=scale,
        return_lse=return_lse,
        counter=counter,
        finished=finished,
    )
