"""Triton launcher of `sparse_prefill`."""

import math
from functools import lru_cache

import torch
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .._check import check_triton
from .._triton import cdiv, dot_dtype, launch_options, next_power_of_2
from .prefill_kernels import pack_tokens_kernel, prefill_attention_kernel

PACKED_AT_ONCE = 32  # slots in a tile of the packing kernel


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Return the shared memory that one program may take, in bytes; without a device, that of an H200."""
    if device.type != "cuda":
        return 227 << 10
    most: int = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return most


def _tiles(query: torch.Tensor, lanes: int) -> dict[str, int]:
    """Choose the sizes of the tiles of queries and slots, the warps and the stages."""
    width = max(16, next_power_of_2(query.shape[3]))
    if query.element_size() == 4:  # no tensor cores: products of small tiles
        block_m, block_n, warps, stages = 16, 32 if width <= 128 else 16, 8, 2
    else:
        # Tiles of 64 queries leave room for two programs per multiprocessor: one computes while the other waits.
        block_m = max(16, min(64, next_power_of_2(lanes)))
        block_n, warps, stages = (64, 4, 3) if width <= 128 else (32, 8, 3)
    row_bytes = width * query.element_size()
    fitting = (_shared_memory(query.device) - block_m * row_bytes - 1024) // (2 * block_n * row_bytes)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": max(1, min(stages, fitting))}


def sparse_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from a chunk to selected tokens and to itself."""
    check_triton("query", query)
    batch, q_heads, queries, head_dim = query.shape
    kv_heads = keys.shape[1]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    block_indices, block_counts = block_indices.contiguous(), block_counts.contiguous()
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()
    block_h = max(8, next_power_of_2((head_dim + 1) // 2))
    tiles = _tiles(query, group * queries)
    most_chosen = block_indices.shape[2]
    whole = max(PACKED_AT_ONCE, tiles["BLOCK_N"])  # whole tiles of either, since both are powers of two
    packed_slots = cdiv(most_chosen + queries, whole) * whole
    packed = query.new_empty((2, pairs, packed_slots, 2 * block_h))
    common = {
        "HEAD_DIM": head_dim,
        "SHARED": block_counts.shape[1] != kv_heads,
        "ROPE": rope_cos is not None,
        "BLOCK_H": block_h,
        **launch_options(query.device),
    }
    tables = (query, query) if rope_cos is None else (rope_cos, rope_sin)
    pack_tokens_kernel[(cdiv(packed_slots, PACKED_AT_ONCE), pairs)](
        keys,
        values,
        block_indices,
        block_counts,
        seq_start,
        seq_end,
        *tables,
        packed[0],
        packed[1],
        kv_heads,
        most_chosen,
        queries,
        packed_slots,
        *keys.stride()[:3],
        *values.stride()[:3],
        BLOCK_N=PACKED_AT_ONCE,
        num_warps=4,
        **common,
    )
    # Whole tiles of packed tokens are loaded by descriptor: one copy each, for any width.
    tile = [tiles["BLOCK_N"], 2 * block_h]
    packed_keys, packed_values = (TensorDescriptor.from_tensor(tokens.flatten(0, 1), tile) for tokens in packed)
    out = query.new_empty((batch, q_heads, queries, head_dim))
    lse = query.new_empty((batch, q_heads, queries), dtype=torch.float32)
    prefill_attention_kernel[(cdiv(group * queries, tiles["BLOCK_M"]), pairs)](
        query,
        packed_keys,
        packed_values,
        block_counts,
        seq_start,
        seq_end,
        *tables,
        out,
        lse,
        kv_heads,
        group,
        queries,
        packed_slots,
        scale * math.log2(math.e),
        *query.stride()[:3],
        DOT_DTYPE=dot_dtype(query.dtype),
        **tiles,
        **common,
    )
    return out, lse
