"""Triton launcher of `block_sparse_prefill`."""

import math

import torch

from .._check import check_triton
from .._triton import cdiv, dot_dtype, launch_options, next_power_of_2
from .members import members
from .prefill_kernel import block_sparse_prefill_kernel


def _tiles(query: torch.Tensor, block_size: int) -> dict[str, int]:
    """Choose the sizes of the tiles, which divide a block, the warps and the stages."""
    width = max(16, next_power_of_2(query.shape[3]))
    if query.element_size() == 4:  # no tensor cores: products of small tiles
        block_m, block_n, warps, stages = 16, 32 if width <= 128 else 16, 8, 2
    else:
        block_m, block_n, warps, stages = (64, 64, 4, 3) if width <= 128 else (64, 32, 8, 2)
    return {
        "BLOCK_M": min(block_m, block_size),
        "BLOCK_N": min(block_n, block_size),
        "BLOCK_D": width,
        "num_warps": warps,
        "num_stages": stages,
    }


def block_sparse_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    columns: torch.Tensor | None,
    column_counts: torch.Tensor | None,
    window: int | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from blocks of queries to blocks of keys, and to columns."""
    check_triton("query", query)
    batch, q_heads, queries, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    query_blocks, most_blocks = block_indices.shape[2:]
    scale = head_dim**-0.5 if scale is None else scale
    key_blocks = cdiv(capacity, block_size)
    # A program finds out by one load each which columns its blocks hold already.
    in_blocks = query if columns is None else members(block_indices, block_counts, key_blocks).contiguous()
    tiles = _tiles(query, block_size)
    # Padding has no program.
    out = query.new_zeros((batch, q_heads, queries, head_dim))
    lse = query.new_full((batch, q_heads, queries), float("-inf"), dtype=torch.float32)
    block_sparse_prefill_kernel[(query_blocks * (block_size // tiles["BLOCK_M"]), batch * q_heads)](
        query,
        keys,
        values,
        block_indices,
        block_counts,
        query if columns is None else columns,
        query if column_counts is None else column_counts,
        in_blocks,
        seq_start.contiguous(),
        seq_end.contiguous(),
        out,
        lse,
        q_heads,
        q_heads // kv_heads,
        queries,
        query_blocks,
        most_blocks,
        0 if columns is None else columns.shape[2],
        key_blocks,
        0 if window is None else window,
        scale * math.log2(math.e),
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        COLUMNS=columns is not None,
        WINDOW=window is not None,
        DOT_DTYPE=dot_dtype(query.dtype),
        **tiles,
        **launch_options(query.device),
    )
    return out, lse
