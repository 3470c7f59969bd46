"""Triton kernels of `sparse_decode`: split-KV attention over the selected blocks, merged by log-sum-exp."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import math

import torch
import triton
import triton.language as tl

from ._triton import dot_dtype

MAX_SPLITS = 64
INTERPRETER_PROGRAMS = 16  # stands in for the device's size where there is none: small, but enough to split


@triton.jit
def sparse_decode_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    indices_ptr,  # [batch * kv_heads, max_blocks]
    counts_ptr,  # [batch * kv_heads]
    start_ptr,
    end_ptr,
    partial_max_ptr,  # [batch * q_heads, splits], in units of log2
    partial_sum_ptr,  # [batch * q_heads, splits]
    partial_out_ptr,  # [batch * q_heads, splits, head_dim]
    kv_heads,
    group,
    head_dim,
    max_blocks,
    scale_log2,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One split of one row and KV head, all query heads of its group; grid (splits, batch * kv_heads)."""
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    tokens = tl.minimum(tl.load(counts_ptr + pair), max_blocks) * BLOCK_SIZE
    # The splits share the tokens that this head selected, in whole tiles.
    per_split = tl.cdiv(tl.cdiv(tokens, BLOCK_N), splits) * BLOCK_N
    first = split * per_split
    last = tl.minimum(first + per_split, tokens)

    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    head_mask = heads < group
    dim_mask = dims < head_dim
    group_mask = head_mask[:, None] & dim_mask[None, :]
    query_at = query_ptr + row * query_stride_b + (head * group + heads)[:, None] * query_stride_h
    q = tl.load(query_at + dims[None, :] * query_stride_d, mask=group_mask, other=0.0)
    q = q.to(DOT_DTYPE)  # [BLOCK_G, BLOCK_D]
    keys_ptr += row * keys_stride_b + head * keys_stride_h
    values_ptr += row * values_stride_b + head * values_stride_h
    indices_ptr += pair * max_blocks

    running_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_G,), tl.float32)
    out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for tile in range(first, last, BLOCK_N):
        token = tile + lanes
        block = tl.load(indices_ptr + token // BLOCK_SIZE, mask=token < last, other=-1)
        position = start.to(tl.int64) + block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        valid = (block >= 0) & (position < end)
        mask = valid[:, None] & dim_mask[None, :]
        # What is masked is 0, not the buffer's content: a weight of 0 times a NaN would still be NaN.
        k = tl.load(keys_ptr + position[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
        v = tl.load(values_ptr + position[:, None] * values_stride_n + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(running_max - shift)
        running_sum = running_sum * decay + tl.sum(weights, axis=1)
        out = out * decay[:, None] + tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), input_precision="ieee")
        running_max = new_max

    partial = (pair * group + heads) * splits + split
    tl.store(partial_max_ptr + partial, running_max, mask=head_mask)
    tl.store(partial_sum_ptr + partial, running_sum, mask=head_mask)
    # A head that read nothing in this split leaves its part of the scratch unwritten.
    written = group_mask & (running_max > float("-inf"))[:, None]
    tl.store(partial_out_ptr + partial[:, None] * head_dim + dims[None, :], out, mask=written)


@triton.jit
def merge_splits_kernel(
    partial_max_ptr,
    partial_sum_ptr,
    partial_out_ptr,
    out_ptr,  # [batch * q_heads, head_dim]
    lse_ptr,  # [batch * q_heads]
    head_dim,
    splits,
    WITH_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of one query head; grid (batch * q_heads,)."""
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    every = tl.arange(0, BLOCK_S)
    maxima = tl.load(partial_max_ptr + head * splits + every, mask=every < splits, other=float("-inf"))
    sums = tl.load(partial_sum_ptr + head * splits + every, mask=every < splits, other=0.0)
    top = tl.max(maxima, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp2(maxima - shift), axis=0)
    out = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(splits):
        split_max = tl.load(partial_max_ptr + head * splits + split)
        written = tl.where(split_max > float("-inf"), head_dim, 0)
        part = tl.load(partial_out_ptr + (head * splits + split) * head_dim + dims, mask=dims < written, other=0.0)
        out += part * tl.exp2(split_max - shift)
    safe_total = tl.where(total > 0, total, 1.0)
    out = out / safe_total
    tl.store(out_ptr + head * head_dim + dims, out.to(out_ptr.dtype.element_ty), mask=dims < head_dim)
    if WITH_LSE:
        lse = tl.where(total > 0, (shift + tl.log2(safe_total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + head, lse)


def _num_splits(device: torch.device, pairs: int, tiles: int) -> int:
    """Splits per (row, KV head): about two programs per multiprocessor, from shapes the host knows."""
    programs = INTERPRETER_PROGRAMS
    if device.type == "cuda":
        programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(MAX_SPLITS, tiles, programs // pairs))


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
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Launch `sparse_decode_kernel`, then `merge_splits_kernel`; see `hf_sparse_attn_kernels.sparse_decode`."""
    batch, q_heads, head_dim = query.shape
    kv_heads, max_blocks = block_indices.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    block_d = max(16, triton.next_power_of_2(head_dim))
    # One tile of K and one of V: at most 32 KiB together, times the stages in flight.
    block_n = max(16, min(128, 16384 // (block_d * keys.element_size())))
    splits = _num_splits(query.device, batch * kv_heads, triton.cdiv(max_blocks * block_size, block_n))

    partial_max = query.new_empty((batch * q_heads, splits), dtype=torch.float32)
    partial_sum = torch.empty_like(partial_max)
    partial_out = query.new_empty((batch * q_heads, splits, head_dim), dtype=torch.float32)
    sparse_decode_kernel[(splits, batch * kv_heads)](
        query,
        keys,
        values,
        block_indices.contiguous(),
        block_counts.contiguous(),
        seq_start.contiguous(),
        seq_end.contiguous(),
        partial_max,
        partial_sum,
        partial_out,
        kv_heads,
        q_heads // kv_heads,
        head_dim,
        max_blocks,
        scale * math.log2(math.e),
        *query.stride(),
        *keys.stride()[:3],
        *values.stride()[:3],
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        BLOCK_G=max(16, triton.next_power_of_2(q_heads // kv_heads)),
        BLOCK_D=block_d,
        DOT_DTYPE=dot_dtype(keys.dtype),
        num_warps=4,
        num_stages=2 if keys.element_size() == 4 else 3,
    )
    out = query.new_empty((batch, q_heads, head_dim))
    lse = query.new_empty((batch, q_heads), dtype=torch.float32) if return_lse else None
    merge_splits_kernel[(batch * q_heads,)](
        partial_max,
        partial_sum,
        partial_out,
        out,
        partial_sum if lse is None else lse,
        head_dim,
        splits,
        WITH_LSE=return_lse,
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out if lse is None else (out, lse)
