"""Triton launcher of `runs_prefill`."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from triton.runtime import driver

from .._check import check_triton
from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2
from .prefill_chunks import merge_chunks_kernel
from .prefill_kernels import prefill_attention_kernel
from .token_list import list_tokens


class Tiles(NamedTuple):
    """Sizes and launch options of the attention kernel."""

    block_m: int
    """Lanes of a column: pairs of a query and a head of the group."""
    block_n: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int
    """Two for each tile of K and V in flight, less one: their positions are loaded ahead. Fewer if memory is short."""
    per_multiprocessor: int
    """Programs that fit on a multiprocessor at the same time."""


NARROW = Tiles(128, 128, 8, 3, 1)  # 16-bit, head_dim at most 64
MEDIUM = Tiles(128, 64, 8, 5, 1)  # 16-bit, head_dim at most 128
WIDE = Tiles(128, 32, 8, 3, 1)  # 16-bit, head_dim at most 256
FLOAT32 = Tiles(16, 32, 8, 3, 2)  # no tensor cores: products of small tiles

WAVES = 3
"""Units of work for each program that runs at the same time. More balance better, fewer have less to merge."""
LEAST_TILES = 8
"""Tiles of keys in a unit, at least: writing and merging a partial result takes as long as several tiles."""
MERGED_AT_ONCE = 16  # lanes of a column in a program of the merge


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Return the shared memory that one program may take, in bytes; without a device, that of an H200."""
    if device.type != "cuda":
        return 227 << 10
    most: int = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return most


def _tiles(query: torch.Tensor, lanes: int, block_d: int) -> Tiles:
    """Choose the sizes for a call, no larger than its queries need and its shared memory allows."""
    if query.element_size() == 4:
        tiles = FLOAT32._replace(block_n=FLOAT32.block_n if block_d <= 128 else 16)
    else:
        tiles = NARROW if block_d <= 64 else MEDIUM if block_d <= 128 else WIDE
    block_m = max(16, min(tiles.block_m, next_power_of_2(lanes)))
    if block_m < tiles.block_m:  # fewer lanes leave room in the registers of fewer warps
        tiles = tiles._replace(block_m=block_m, block_n=min(64, tiles.block_n), num_warps=4)
    row_bytes = block_d * query.element_size()
    room = _shared_memory(query.device) // tiles.per_multiprocessor - block_m * row_bytes - 4096
    fitting = max(1, room // (2 * tiles.block_n * row_bytes))  # tiles of K and V in flight
    return tiles._replace(num_stages=min(tiles.num_stages, 2 * fitting - 1))


def runs_prefill(
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
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the chosen runs and, causally, to the tail."""
    check_triton("query", query)
    batch, q_heads, queries, head_dim = query.shape
    kv_heads = keys.shape[1]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    run_indices, run_counts = run_indices.contiguous(), run_counts.contiguous()
    context_start, seq_start, seq_end = context_start.contiguous(), seq_start.contiguous(), seq_end.contiguous()
    block_d = max(16, next_power_of_2(head_dim))
    tiles = _tiles(query, group * queries, block_d)
    positions, token_counts = list_tokens(
        context_keys, context_start, run_starts, run_indices, run_counts, token_order, tiles.block_n
    )
    columns = cdiv(group * queries, tiles.block_m)
    most_units = WAVES * tiles.per_multiprocessor * multiprocessors(query.device)
    # A column of several chunks has less than twice as many as its share of most_units.
    slots = min(most_units + columns * pairs, 2 * most_units)
    out = query.new_empty((batch, q_heads, queries, head_dim))
    lse = query.new_empty((batch, q_heads, queries), dtype=torch.float32)
    partial_max = query.new_empty((2, slots, tiles.block_m), dtype=torch.float32)
    partial_out = query.new_empty((slots, tiles.block_m, block_d), dtype=torch.float32)
    partials = (partial_max[0], partial_max[1], partial_out)
    sizes = (kv_heads, group, queries, pairs, columns, most_units)
    common = {
        "HEAD_DIM": head_dim,
        "LEAST_TILES": LEAST_TILES,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": block_d,
        "BLOCK_P": next_power_of_2(pairs),
        **launch_options(query.device),
    }
    prefill_attention_kernel[(most_units + columns * pairs,)](
        query,
        context_keys,
        context_values,
        positions,
        token_counts,
        keys,
        values,
        seq_start,
        seq_end,
        out,
        lse,
        *partials,
        *sizes,
        positions.shape[2],
        abs(scale) * math.log2(math.e),
        *query.stride()[:3],
        *context_keys.stride()[:3],
        *context_values.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        NEGATE=scale < 0,
        BLOCK_M=tiles.block_m,
        DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **common,
    )
    merge_m = min(MERGED_AT_ONCE, tiles.block_m)
    merge_chunks_kernel[(columns * (tiles.block_m // merge_m), pairs)](
        token_counts,
        seq_start,
        seq_end,
        *partials,
        out,
        lse,
        *sizes,
        COLUMN_M=tiles.block_m,
        BLOCK_M=merge_m,
        num_warps=4,
        **common,
    )
    return out, lse
