"""Triton launchers of `sparse_decode` and `dense_decode`."""

import math

import torch

from .._check import check_triton
from .._merge import merge_splits_kernel
from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2
from .._tuning import choice
from .decode_kernel import decode_attention_kernel

MAX_SPLITS = 128
MERGED_AT_ONCE = 8192  # elements of partial results that the merging program holds, of at most 16 splits


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
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    scale: float | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the selected blocks."""
    selection = (block_indices.contiguous(), block_counts.contiguous())
    rope = None if rope_cos is None or rope_sin is None else (rope_cos, rope_sin)
    return _attend(query, keys, values, selection, seq_start, seq_end, block_size, rope, scale, counter, finished)


def dense_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to every valid token."""
    return _attend(query, keys, values, None, seq_start, seq_end, 1, None, scale, counter, finished)


def _launch(dense: bool, rope: bool, block_size: int) -> str:
    """Return the name of the launch choice."""
    if dense:
        return "dense_decode"
    if rope:
        return "rope_decode"
    return "token_decode" if block_size == 1 else "sparse_decode"


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    selection: tuple[torch.Tensor, torch.Tensor] | None,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    block_size: int,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels over the blocks in `selection`, or over every valid token if it is None."""
    check_triton("query", query)
    batch, q_heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()
    block_indices, block_counts = (seq_start, seq_start) if selection is None else selection
    max_blocks = 0 if selection is None else block_indices.shape[2]
    most_tokens = capacity if selection is None else min(capacity, max_blocks * block_size)
    # With RoPE each half of the channels is a separate product, of at least 16 channels.
    block_d = max(16 if rope is None else 32, next_power_of_2(head_dim))
    op = _launch(selection is None, rope is not None, block_size)
    config = choice(op, query.device, pairs=pairs, group=group, head_dim=head_dim, tokens=capacity)
    # One tile of K and one of V, with RoPE half as large plus the tables': at most 64 KiB, times the stages in flight.
    most_n = 32768 // (block_d * keys.element_size())
    block_n = max(16, min(config["block_n"], most_n if rope is None else most_n // 2))
    per_pair = config["per_multiprocessor"] * multiprocessors(query.device) // pairs
    splits = max(1, min(MAX_SPLITS, cdiv(most_tokens, block_n), per_pair))
    if rope is not None:  # no more splits than have a tile
        tiles = cdiv(max_blocks, block_n)
        splits = cdiv(tiles, cdiv(tiles, splits))
    merge_apart = bool(config["merge_apart"]) and splits > 1
    full_precision = keys.element_size() == 4
    merge_g, block_s = next_power_of_2(group), next_power_of_2(splits)

    out = query.new_empty((batch, q_heads, head_dim))
    lse = query.new_empty((batch, q_heads), dtype=torch.float32)
    partial_max = partial_sum = partial_out = out
    if splits > 1:
        partial_max = query.new_empty((2, pairs, splits, group), dtype=torch.float32)
        partial_sum = partial_max[1]
        partial_out = query.new_empty((pairs, splits, group, head_dim), dtype=torch.float32)
        if finished is None and not merge_apart:
            finished = torch.zeros((batch, kv_heads), dtype=torch.int32, device=query.device)
    decode_attention_kernel[(splits, pairs)](
        query,
        keys,
        values,
        block_indices,
        block_counts,
        seq_start,
        seq_end,
        out,
        lse,
        partial_max,
        partial_sum,
        partial_out,
        seq_start if finished is None else finished,
        seq_start if counter is None else counter,
        kv_heads,
        group,
        max_blocks,
        scale * math.log2(math.e),
        *query.stride(),
        *keys.stride()[:3],
        *values.stride()[:3],
        *((seq_start, seq_start) if rope is None else rope),
        HEAD_DIM=head_dim,
        DENSE=selection is None,
        SHARED=selection is not None and block_counts.shape[1] != kv_heads,
        ROPE=rope is not None,
        ONE_SPLIT=splits == 1,
        COUNT=counter is not None,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_S=1 if merge_apart else max(1, min(16, block_s, MERGED_AT_ONCE // (merge_g * block_d))),
        MERGE_G=1 if merge_apart else merge_g,
        MERGE_APART=merge_apart,
        DOT_DTYPE=dot_dtype(keys.dtype),
        # A product in float32 keeps its operands in registers: those of 256 channels take 8 warps.
        num_warps=max(config["warps"], block_d // 32) if full_precision else config["warps"],
        num_stages=2 if full_precision else config["stages"],
        **launch_options(query.device),
    )
    if merge_apart:
        merge_splits_kernel[(pairs, group)](
            partial_max,
            partial_sum,
            partial_out,
            out,
            lse,
            group,
            splits,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_S=block_s,
            num_warps=8,
            **launch_options(query.device),
        )
    return out, lse
