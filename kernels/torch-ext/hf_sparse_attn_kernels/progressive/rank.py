"""Triton kernels of `rank_blocks`: ranks by counting within spans of blocks, then by a search in the other spans."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._topk import load_order_keys
from .._triton import cdiv, launch_options, next_power_of_2, wait_for_previous_kernel

ONE_SPAN_LIMIT = 1024
"""Blocks that are ranked by counting alone, in one launch."""
SPAN = 256
"""Blocks of a span, if there are more.

A block takes about 3 operations for each block of its span, then 8 for each of the 9 steps of the search in each other
span. For 4,096 blocks, 128K tokens in blocks of 32, that is least with spans of 256: 1,800 operations. Counting alone
would take 12,000.
"""
BLOCK_R = 32
SEARCHED_AT_ONCE = 16  # spans
MOST_FORCED = (1 << 22) - 1
"""First blocks, and last blocks, that can have keys of their own: there are 2^23 - 1 integers above infinity's key."""


@triton.jit
def _rank_keys(scores_ptr, blocks, num_blocks, sink_blocks, recent_blocks):
    """Load scores as int32 in the order of the ranks, except ties; absent blocks are the lowest."""
    keys = load_order_keys(scores_ptr, blocks, num_blocks, 0, 0, False)
    recent_blocks = tl.minimum(recent_blocks, num_blocks)
    age = num_blocks - 1 - blocks
    # The largest integer is left out, so that 1 can be added to a key.
    keys = tl.where((blocks < sink_blocks) & (age >= 0), 0x7FFFFFFE - recent_blocks - blocks, keys)
    return tl.where((age < recent_blocks) & (age >= 0), 0x7FFFFFFE - age, keys)


@triton.jit
def _row_blocks(start_ptr, end_ptr, row, width, BLOCK_SIZE: tl.constexpr):
    """Return the number of blocks of a row."""
    length = tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0)
    return tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, width)


@triton.jit
def rank_in_span_kernel(
    scores_ptr,  # [batch * kv_heads, width]
    start_ptr,
    end_ptr,
    order_ptr,  # [batch * kv_heads, max_blocks], for ONE_SPAN
    counts_ptr,  # [batch * kv_heads]
    sorted_keys_ptr,  # int32 [batch * kv_heads, width], each span by descending key; not for ONE_SPAN, like the next
    sorted_blocks_ptr,
    kv_heads,
    width,
    max_blocks,
    sink_blocks,
    recent_blocks,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    ONE_SPAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank BLOCK_R blocks among the SPAN blocks that they lie in; grid (tiles, batch * kv_heads)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    num_blocks = _row_blocks(start_ptr, end_ptr, pair // kv_heads, width, BLOCK_SIZE)
    count = tl.minimum(num_blocks, max_blocks)
    first = tl.program_id(0) * BLOCK_R
    lanes = tl.arange(0, BLOCK_R)
    blocks = first + lanes
    scores_ptr += pair * width
    order_ptr += pair * max_blocks
    if first == 0:
        tl.store(counts_ptr + pair, count)
    if ONE_SPAN:
        tl.store(order_ptr + blocks, tl.full((BLOCK_R,), -1, tl.int32), mask=(blocks >= count) & (blocks < max_blocks))
    if first < num_blocks:
        keys = _rank_keys(scores_ptr, blocks, num_blocks, sink_blocks, recent_blocks)
        span_first = first // SPAN * SPAN
        ranks = tl.zeros((BLOCK_R,), tl.int32)
        for chunk in range(span_first, tl.minimum(span_first + SPAN, num_blocks), BLOCK_C):
            others = chunk + tl.arange(0, BLOCK_C)
            other_keys = _rank_keys(scores_ptr, others, num_blocks, sink_blocks, recent_blocks)
            # Of equal keys the lower index wins: blocks before the tile need only reach a key. Ties in it follow below.
            other_keys += (others < first).to(tl.int32)
            ranks += tl.sum((other_keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
        own_keys = _rank_keys(scores_ptr, blocks, num_blocks, sink_blocks, recent_blocks)
        tied_before = (own_keys[None, :] == keys[:, None]) & (lanes[None, :] < lanes[:, None])
        ranks += tl.sum(tied_before.to(tl.int32), axis=1)
        if ONE_SPAN:
            tl.store(order_ptr + ranks, blocks, mask=(blocks < num_blocks) & (ranks < max_blocks))
        else:
            at = pair * width + span_first + ranks
            tl.store(sorted_keys_ptr + at, keys, mask=blocks < num_blocks)
            tl.store(sorted_blocks_ptr + at, blocks, mask=blocks < num_blocks)


@triton.jit
def merge_ranks_kernel(
    sorted_keys_ptr,  # int32 [batch * kv_heads, width], each span by descending key
    sorted_blocks_ptr,
    start_ptr,
    end_ptr,
    order_ptr,  # [batch * kv_heads, max_blocks]
    kv_heads,
    width,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    LOG_SPAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add, to the ranks of BLOCK_R blocks in their span, the blocks of other spans that come before them.

    Grid (tiles, batch * kv_heads).
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    num_blocks = _row_blocks(start_ptr, end_ptr, pair // kv_heads, width, BLOCK_SIZE)
    count = tl.minimum(num_blocks, max_blocks)
    first = tl.program_id(0) * BLOCK_R
    places = first + tl.arange(0, BLOCK_R)
    sorted_keys_ptr += pair * width
    order_ptr += pair * max_blocks
    tl.store(order_ptr + places, tl.full((BLOCK_R,), -1, tl.int32), mask=(places >= count) & (places < max_blocks))
    if first < num_blocks:
        keys = tl.load(sorted_keys_ptr + places, mask=places < num_blocks, other=-0x80000000)
        own_span = first // SPAN
        ranks = places % SPAN
        for first_span in range(0, tl.cdiv(num_blocks, SPAN), BLOCK_S):
            spans = first_span + tl.arange(0, BLOCK_S)
            sizes = tl.minimum(num_blocks - spans * SPAN, SPAN)
            sizes = tl.where(spans == own_span, 0, sizes)
            # Of equal keys the lower index wins: in earlier spans they come before, in later ones they do not.
            bounds = keys[:, None] - (spans < own_span).to(tl.int32)[None, :]  # [BLOCK_R, BLOCK_S]
            before = tl.zeros((BLOCK_R, BLOCK_S), tl.int32)  # keys of the span that exceed the bound
            for step in tl.static_range(LOG_SPAN + 1):
                skip = max(1, SPAN >> (step + 1))
                probes = before + (skip - 1)
                mask = probes < sizes[None, :]
                found = tl.load(sorted_keys_ptr + (spans * SPAN)[None, :] + probes, mask=mask, other=-0x80000000)
                before += tl.where(mask & (found > bounds), skip, 0)
            ranks += tl.sum(before, axis=1)
        blocks = tl.load(sorted_blocks_ptr + pair * width + places, mask=places < num_blocks, other=0)
        tl.store(order_ptr + ranks, blocks, mask=(places < num_blocks) & (ranks < max_blocks))


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
    """Launch the kernels."""
    check_triton_dtype("scores", scores, (torch.float32,))
    batch, kv_heads, width = scores.shape
    max_blocks = width if max_blocks is None else max_blocks
    for name, forced in (("sink_blocks", sink_blocks), ("recent_blocks", recent_blocks)):
        if forced > MOST_FORCED:
            raise ValueError(f"{name}={forced}; allowed for impl='triton': at most {MOST_FORCED}")
    device, pairs = scores.device, batch * kv_heads
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    order = torch.empty((batch, kv_heads, max_blocks), dtype=torch.int32, device=device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    one_span = width <= ONE_SPAN_LIMIT
    span = max(BLOCK_R, next_power_of_2(width)) if one_span else SPAN
    sorted_keys = sorted_blocks = order
    if not one_span:
        sorted_keys, sorted_blocks = torch.empty((2, pairs, width), dtype=torch.int32, device=device)
    grid = (cdiv(max(width, max_blocks), BLOCK_R), pairs)
    options = launch_options(device)
    rank_in_span_kernel[grid](
        scores.contiguous(),
        *row_bounds,
        order,
        counts,
        sorted_keys,
        sorted_blocks,
        kv_heads,
        width,
        max_blocks,
        sink_blocks,
        recent_blocks,
        BLOCK_SIZE=block_size,
        SPAN=span,
        ONE_SPAN=one_span,
        BLOCK_R=BLOCK_R,
        BLOCK_C=min(span, 256),
        num_warps=4,
        **options,
    )
    if not one_span:
        merge_ranks_kernel[grid](
            sorted_keys,
            sorted_blocks,
            *row_bounds,
            order,
            kv_heads,
            width,
            max_blocks,
            BLOCK_SIZE=block_size,
            SPAN=span,
            LOG_SPAN=span.bit_length() - 1,
            BLOCK_R=BLOCK_R,
            BLOCK_S=min(SEARCHED_AT_ONCE, next_power_of_2(cdiv(width, span))),
            num_warps=4,
            **options,
        )
    return order, counts
