"""Helpers shared by the torch references.

References read only what the kernels read, never copy lengths from a CUDA device, and compute in float32 (float64 for
float64). On the CPU the number of torch calls dominates a decode step. Lengths are known there, so references skip
masks and gathers that the lengths make unnecessary.
"""

import math

import torch
from torch.nn.functional import pad

_FORCED = 1 << 40  # ranks above every score's order
_ABSENT = -(1 << 40)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computations and scores for tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_lengths(seq_start: torch.Tensor, seq_end: torch.Tensor) -> torch.Tensor:
    """Return the number of valid tokens of each row, int32 [batch]."""
    return (seq_end - seq_start).clamp_(min=0)


def host_lengths(seq_start: torch.Tensor, seq_end: torch.Tensor) -> list[int] | None:
    """Return the number of valid tokens of each row, or None if that would wait for a device."""
    return row_lengths(seq_start, seq_end).tolist() if seq_start.device.type == "cpu" else None


def power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 2 ** exponent exactly, from the bits of a float32, for exponents between -126 and 127."""
    return ((exponent.int() + 127) << 23).view(torch.float32).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [.., head_dim] by angles [.., head_dim // 2], half-split as in Transformers, rounded once."""
    first, second = x.to(compute_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def take_tokens(buffers: tuple[torch.Tensor, ...], positions: torch.Tensor) -> list[torch.Tensor]:
    """Gather each buffer [batch, kv_heads, capacity, head_dim] at int64 `positions` [batch, 1 or kv_heads, n].

    With any strides, every token is a line of one flat view of the storage. Selecting lines of a matrix is several
    times faster than indexing three dimensions. Positions past the buffer read its first or last token.
    """
    batch, kv_heads, capacity, head_dim = buffers[0].shape
    positions = positions.clamp(0, capacity - 1)
    taken: list[torch.Tensor] = []
    index_strides, index = None, positions
    for buffer in buffers:
        strides = buffer.stride()[:3]
        unit = max(1, math.gcd(*strides))
        batch_step, head_step, token_step = (stride // unit for stride in strides)
        if strides != index_strides:
            head_first = torch.arange(kv_heads, device=buffer.device) * head_step
            index = positions * token_step + head_first[:, None]
            if batch > 1:
                index = index + torch.arange(batch, device=buffer.device)[:, None, None] * batch_step
            index, index_strides = index.flatten(), strides
        last = (batch - 1) * batch_step + (kv_heads - 1) * head_step + (capacity - 1) * token_step
        tokens = buffer.as_strided((last + 1, head_dim), (unit, 1))
        taken.append(tokens.index_select(0, index).view(batch, kv_heads, -1, head_dim))
    return taken


def blank(values: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Zero absent values, in place: a weight of 0 times a NaN would still be NaN."""
    return values.masked_fill_(absent[..., None], 0.0)


def append(
    buffers: tuple[torch.Tensor, ...],
    tokens: tuple[torch.Tensor, ...],
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
) -> None:
    """Write each of `tokens` [batch, kv_heads, head_dim] at the end of the rows of its buffer, except empty rows.

    Where the host knows the ends, one beyond the capacity is an error, and nothing is written.
    """
    lengths = host_lengths(seq_start, seq_end)
    if lengths is not None:
        capacity = buffers[0].shape[2]
        ends = {row: end for row, end in enumerate(seq_end.tolist()) if lengths[row] > 0}
        for row, end in ends.items():
            if end > capacity:
                raise ValueError(f"seq_end={end} of row {row} is beyond the capacity; allowed: at most {capacity}")
        for row, end in ends.items():
            for buffer, token in zip(buffers, tokens, strict=True):
                buffer[row, :, end - 1] = token[row]
        return
    has_tokens = (seq_end > seq_start)[:, None, None, None]
    last = (seq_end - 1).long()[:, None, None, None]
    for buffer, token in zip(buffers, tokens, strict=True):
        token = token[:, :, None]
        index = last.clamp(0, buffer.shape[2] - 1).expand_as(token)
        buffer.scatter_(2, index, torch.where(has_tokens, token, buffer.gather(2, index)))


def score_order(scores: torch.Tensor) -> torch.Tensor:
    """Return int64 of fewer than 33 bits in the order of `scores`: equal for equal scores, NaN as -inf."""
    scores = scores.nan_to_num(float("-inf"), float("inf"), float("-inf")).add_(0.0)  # turns -0.0 into 0.0
    if scores.dtype == torch.float64:
        ranks: torch.Tensor = torch.unique(scores, return_inverse=True)[1]  # type: ignore[no-untyped-call]
        return ranks
    bits = scores.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def count_tokens(counter: torch.Tensor, tokens_read: torch.Tensor, length: torch.Tensor, kv_heads: int) -> None:
    """Add the tokens read, and those that dense attention reads, to the counter of an attention op."""
    dense = length.sum() * kv_heads
    if counter.device.type == "cpu":
        counter += torch.tensor([int(tokens_read), int(dense), 0, 1], device=counter.device)
    else:
        counter[0] += tokens_read
        counter[1] += dense
        counter[3] += 1


def rank_blocks(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int | None,
    sink_blocks: int,
    recent_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.rank_blocks`, for the families that rank."""
    batch, kv_heads, width = scores.shape
    max_blocks = width if max_blocks is None else max_blocks
    lengths = host_lengths(seq_start, seq_end)
    if lengths is not None:
        width = min(width, max(1, -(-max(lengths) // block_size)))
    num_blocks = ((row_lengths(seq_start, seq_end) + (block_size - 1)) // block_size).clamp_(max=width)[:, None]
    blocks = torch.arange(width, device=scores.device)
    age = num_blocks - 1 - blocks  # [batch, width]: 0 for the newest block
    keys = score_order(scores[..., :width])
    keys = torch.where((blocks < sink_blocks)[None, None], _FORCED - recent_blocks - blocks, keys)
    keys = torch.where((age < recent_blocks)[:, None], (_FORCED - age)[:, None], keys)
    keys.masked_fill_((age < 0)[:, None], _ABSENT)
    order = keys.argsort(dim=-1, descending=True, stable=True)[..., :max_blocks].int()
    counts = num_blocks.clamp(max=max_blocks).int().expand(batch, kv_heads).contiguous()
    order.masked_fill_(blocks[:max_blocks] >= counts[..., None], -1)
    return pad(order, (0, max_blocks - order.shape[2]), value=-1), counts
