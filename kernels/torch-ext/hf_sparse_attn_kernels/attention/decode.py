"""Triton launchers of `sparse_decode`, `dense_decode` and `dense_prefill`."""

import math

import torch

from .._check import check_triton
from .._merge import merge_splits_kernel
from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2
from .._tuning import choice
from .decode_kernel import decode_attention_kernel

MAX_SPLITS = 128
MERGED_AT_ONCE = 8192  # elements of partial results that the merging program holds, of at most 16 splits
MOST_QUERIES = 64  # query heads times tokens that share a KV head in one launch of `dense_prefill`, the rows of a tile
MOST_OUTPUTS = 8192  # elements of their outputs, which a program keeps in registers
PREFILL = {"block_n": 64, "per_multiprocessor": 2, "warps": 4, "stages": 3, "merge_apart": 1}


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


def dense_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last tokens, as many at a time as share a read of K and V."""
    queries = query.shape[2]
    at_once = max(1, _most_queries(query) // (query.shape[1] // keys.shape[1]))
    at_once = cdiv(queries, cdiv(queries, at_once))
    parts = []
    for first in range(0, queries, at_once):
        later = max(0, queries - first - at_once)  # tokens that these do not see
        part, end = query[:, :, first : first + at_once], seq_end - later if later else seq_end
        parts.append(_attend(part, keys, values, None, seq_start, end, 1, None, scale, None, None))
    if len(parts) == 1:
        return parts[0]
    out, lse = zip(*parts, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


def _most_queries(query: torch.Tensor) -> int:
    """Return the maximum number of query heads times tokens of a KV head in one launch, at least 16."""
    outputs = MOST_OUTPUTS // 2 if query.element_size() == 4 else MOST_OUTPUTS
    return min(MOST_QUERIES, outputs // next_power_of_2(query.shape[-1]))


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
    """Launch the kernels over the blocks in `selection`, or over every valid token if it is None.

    `query` is [batch, q_heads, head_dim], or [batch, q_heads, queries, head_dim] for the last tokens of each row.
    """
    check_triton("query", query)
    batch, q_heads, head_dim = query.shape[0], query.shape[1], query.shape[-1]
    kv_heads, capacity = keys.shape[1:3]
    is_causal = query.dim() == 4
    queries = query.shape[2] if is_causal else 1
    pairs, group = batch * kv_heads, q_heads // kv_heads * queries
    scale = head_dim**-0.5 if scale is None else scale
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()
    block_indices, block_counts = (seq_start, seq_start) if selection is None else selection
    max_blocks = 0 if selection is None else block_indices.shape[2]
    most_tokens = capacity if selection is None else min(capacity, max_blocks * block_size)
    # With RoPE each half of the channels is a separate product, of at least 16 channels.
    block_d = max(16 if rope is None else 32, next_power_of_2(head_dim))
    op = _launch(selection is None, rope is not None, block_size)
    shape = {"pairs": pairs, "group": group, "head_dim": head_dim, "tokens": capacity}
    config = PREFILL if is_causal else choice(op, query.device, **shape)
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
    block_g = max(16, merge_g)

    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
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
        queries,
        max_blocks,
        scale * math.log2(math.e),
        *query.stride()[:2],
        query.stride(2) if is_causal else 0,
        query.stride(-1),
        *keys.stride()[:3],
        *values.stride()[:3],
        *((seq_start, seq_start) if rope is None else rope),
        HEAD_DIM=head_dim,
        DENSE=selection is None,
        CAUSAL=is_causal,
        SHARED=selection is not None and block_counts.shape[1] != kv_heads,
        ROPE=rope is not None,
        ONE_SPLIT=splits == 1,
        COUNT=counter is not None,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_S=1 if merge_apart else max(1, min(16, block_s, MERGED_AT_ONCE // (merge_g * block_d))),
        MERGE_G=1 if merge_apart else merge_g,
        MERGE_APART=merge_apart,
        DOT_DTYPE=dot_dtype(keys.dtype),
        # A product in float32 keeps its operands in registers: those of 16 queries with 256 channels take 8 warps.
        num_warps=max(config["warps"], block_g * block_d // 512) if full_precision else config["warps"],
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
