"""Triton launcher of `runs_decode`."""

import math

import torch

from .._check import check_triton
from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2
from .._tuning import choice
from . import MAX_RUN
from .decode_kernel import merge_partials_kernel, runs_decode_kernel

MERGED_AT_ONCE = 8192  # elements of partial results that a merging program holds
REGISTERS = 65536  # of a multiprocessor


def runs_decode(
    query: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    context_start: torch.Tensor,
    run_starts: torch.Tensor,
    run_indices: torch.Tensor,
    run_counts: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    token_order: torch.Tensor | None,
    context_lengths: torch.Tensor | None,
    scale: float | None,
    counter: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the chosen runs and the tail: the tiles of all heads, then the merge of each head's partial results."""
    check_triton("query", query)
    batch, q_heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    runs = run_indices.shape[2]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    seq_start, seq_end, context_start = seq_start.contiguous(), seq_end.contiguous(), context_start.contiguous()
    run_indices, run_counts = run_indices.contiguous(), run_counts.contiguous()
    order = run_starts if token_order is None else token_order
    # Tokens of each pair's context: the end of its last run.
    lengths = run_starts[:, :, -1] if context_lengths is None else context_lengths[:, None].expand(-1, kv_heads)

    block_d = max(16, next_power_of_2(head_dim))
    tokens = context_keys.shape[2]
    config = choice("runs_decode", query.device, pairs=pairs, group=group, head_dim=head_dim, tokens=tokens)
    # One tile of K and one of V: at most 64 KiB, times the stages in flight.
    block_n = max(MAX_RUN, min(config["block_n"], 32768 // (block_d * keys.element_size())))
    most_tiles = pairs * (cdiv(runs, block_n // MAX_RUN) + cdiv(capacity, block_n))
    at_once = config["per_multiprocessor"] * multiprocessors(query.device)
    programs = min(config["waves"] * at_once, most_tiles)
    block_pairs = next_power_of_2(pairs)
    # Shares are equal, so all programs of a wave must run at once: none may take more registers than leave room for the
    # others.
    threads = 32 * config["warps"] * config["per_multiprocessor"]
    options = launch_options(query.device)

    out = query.new_empty((batch, q_heads, head_dim))
    lse = query.new_empty((batch, q_heads), dtype=torch.float32)
    partial_max, partial_sum = query.new_empty((2, programs + pairs, group), dtype=torch.float32)
    partial_out = query.new_empty((programs + pairs, group, head_dim), dtype=torch.float32)
    runs_decode_kernel[(programs,)](
        query,
        context_keys,
        context_values,
        context_start,
        run_starts,
        run_indices,
        run_counts,
        keys,
        values,
        seq_start,
        seq_end,
        order,
        lengths,
        partial_max,
        partial_sum,
        partial_out,
        seq_start if counter is None else counter,
        kv_heads,
        group,
        pairs,
        runs,
        scale * math.log2(math.e),
        *query.stride(),
        *context_keys.stride()[:3],
        *context_values.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        *run_starts.stride()[:2],
        *order.stride()[:2],
        *lengths.stride(),
        HEAD_DIM=head_dim,
        MAX_RUN=MAX_RUN,
        ORDERED=token_order is not None,
        COUNT=counter is not None,
        BLOCK_N=block_n,
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_D=block_d,
        PAIRS=block_pairs,
        STAGES=min(2, config["stages"]) if keys.element_size() == 4 else config["stages"],
        DOT_DTYPE=dot_dtype(keys.dtype),
        num_warps=config["warps"],
        maxnreg=max(64, min(255, REGISTERS // threads)),
        **options,
    )
    merge_partials_kernel[(pairs, group)](
        run_counts,
        seq_start,
        seq_end,
        partial_max,
        partial_sum,
        partial_out,
        out,
        lse,
        kv_heads,
        group,
        pairs,
        programs,
        HEAD_DIM=head_dim,
        MAX_RUN=MAX_RUN,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_S=MERGED_AT_ONCE // block_d,
        PAIRS=block_pairs,
        num_warps=8,
        **options,
    )
    return out, lse
