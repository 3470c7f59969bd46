"""Ranks of blocks, shared by the ranking Triton kernels: a bitonic sort of spans of blocks, then a merge of the spans.

A block's score and index make one int64, so no two blocks are equal and a sort needs no rule for ties.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ._topk import order_keys
from ._triton import cdiv, launch_options, next_power_of_2, wait_for_previous_kernel

LEAST_SPAN = 128
BLOCK_R = 128
SEARCHED_AT_ONCE = 4  # spans; with more, the compiler waits for some of the loads before it issues the others


@triton.jit
def count_blocks(start_ptr, end_ptr, row, width, BLOCK_SIZE: tl.constexpr):
    """Return the number of blocks of a row."""
    length = tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0)
    return tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, width)


@triton.jit
def rank_keys(scores, blocks, num_blocks, sink_blocks, recent_blocks):
    """Map scores to int64, all different, whose descending order is that of the ranks; absent blocks are the lowest."""
    upper = order_keys(scores, blocks, num_blocks, 0, 0)
    age = num_blocks - 1 - blocks
    is_recent = (age >= 0) & (age < recent_blocks)
    # Both are above the key of infinity.
    upper = tl.where((age >= 0) & (blocks < sink_blocks), 0x7FFFFFFE, upper)
    upper = tl.where(is_recent, 0x7FFFFFFF, upper)
    # The newest block comes first of the last ones, and the lower index of all others.
    lower = tl.where(is_recent, blocks, 0x7FFFFFFF - blocks)
    return (upper.to(tl.int64) << 32) | lower.to(tl.int64)


@triton.jit
def _block_of(keys):
    """Return the block that a key of `rank_keys` ranks."""
    upper = (keys >> 32).to(tl.int32)
    lower = (keys & 0x7FFFFFFF).to(tl.int32)
    return tl.where(upper == 0x7FFFFFFF, lower, 0x7FFFFFFF - lower)


@triton.jit
def _sort_descending(keys, LOG: tl.constexpr, LOW_BITS: tl.constexpr):
    """Sort int64 [2 ** LOG] by a bitonic network, descending; return the sorted keys, and the place of each of them.

    Neighbours are compared most often, so they should lie in one thread. Those are the entries of a tile that differ in
    the LOW_BITS upper bits of their index, if a thread has one entry in each part of the tile. They become neighbours.
    """
    index = tl.arange(0, 1 << LOG)
    places = ((index << LOW_BITS) | (index >> (LOG - LOW_BITS))) & ((1 << LOG) - 1)
    places = tl.reshape(places, [2] * LOG)
    keys = tl.reshape(keys, [2] * LOG)
    for phase in tl.static_range(1, LOG + 1):
        # Sorts groups of 2 ** phase, every other one ascending; the last one is descending.
        for step in tl.static_range(phase):
            # Compares places that differ in bit phase - 1 - step, which is an axis.
            partner = tl.sum(keys, axis=LOG - 1 - (LOG - LOW_BITS + phase - 1 - step) % LOG, keep_dims=True) - keys
            takes_lower = ((places >> (phase - 1 - step)) ^ (places >> phase)) & 1
            keys = tl.where((keys < partner) != (takes_lower == 1), partner, keys)
    return tl.reshape(keys, [1 << LOG]), tl.reshape(places, [1 << LOG])


@triton.jit
def write_span(
    keys,  # int64 [SPAN], of `rank_keys`, in any order
    sorted_ptr,  # of the span; not for ONE_SPAN
    order_ptr,  # of the row and KV head, for ONE_SPAN only, like the next
    count,
    max_blocks,
    SPAN: tl.constexpr,
    LOG_SPAN: tl.constexpr,
    LOW_BITS: tl.constexpr,
    ONE_SPAN: tl.constexpr,
):
    """Write the span's keys in descending order; a row's only span gives the order of the blocks itself."""
    keys, places = _sort_descending(keys, LOG_SPAN, LOW_BITS)
    if ONE_SPAN:
        tl.store(order_ptr + places, tl.where(places < count, _block_of(keys), -1), mask=places < max_blocks)
        for first in range(SPAN, max_blocks, SPAN):
            # A wider store would impose its layout on the whole sort.
            slots = tl.max_contiguous(first + tl.arange(0, SPAN), 1)
            tl.store(order_ptr + slots, tl.full((SPAN,), -1, tl.int32), mask=slots < max_blocks)
    else:
        tl.store(sorted_ptr + places, keys)


@triton.jit
def _count_parts(keys, parts_ptr, LOG_PART: tl.constexpr, PARTS: tl.constexpr):
    """Count the keys, of PARTS parts of 2 ** LOG_PART each, of the parts whose last key is greater than `keys`."""
    greater = tl.zeros(parts_ptr.shape, tl.int32)
    for part in tl.static_range(1, PARTS + 1):
        greater += tl.where(tl.load(parts_ptr + ((part << LOG_PART) - 1)) > keys, 1 << LOG_PART, 0)
    return greater


@triton.jit
def _count_greater(keys, sorted_ptr, starts, LOG_SPAN: tl.constexpr):
    """Count the keys greater than each of `keys` [R] in each of the spans that start at `starts` [S]: int32 [R, S].

    Each step finds the part, of four, where a span's keys cease to be greater. It loads three keys at once, so half as
    many loads depend on another as in a binary search. The lanes of a warp have neighbouring keys, so they probe
    neighbouring places.
    """
    keys = keys[:, None]
    greater = tl.zeros((keys.shape[0], starts.shape[0]), tl.int32)
    for step in tl.static_range((LOG_SPAN - 1) // 2):
        # If LOG_SPAN is odd, the first step has two parts.
        greater += _count_parts(
            keys,
            sorted_ptr + (starts[None, :] + greater),
            (LOG_SPAN - 1) // 2 * 2 - 2 * step,
            1 if LOG_SPAN % 2 == 1 and step == 0 else 3,
        )
    # All keys of the last part may be greater.
    return greater + _count_parts(keys, sorted_ptr + (starts[None, :] + greater), 0, 4)


@triton.jit
def merge_spans_kernel(
    sorted_ptr,  # int64 [batch * kv_heads, spans, SPAN], each span descending
    start_ptr,
    end_ptr,
    order_ptr,  # [batch * kv_heads, max_blocks]
    kv_heads,
    width,
    max_blocks,
    spans,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    LOG_SPAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write BLOCK_R blocks to their ranks, the numbers of greater keys in all spans; grid (tiles, batch * kv_heads)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    num_blocks = count_blocks(start_ptr, end_ptr, pair // kv_heads, width, BLOCK_SIZE)
    count = tl.minimum(num_blocks, max_blocks)
    first = tl.program_id(0) * BLOCK_R
    places = first + tl.arange(0, BLOCK_R)
    sorted_ptr += pair * spans * SPAN
    order_ptr += pair * max_blocks
    # Does not wait for the row's bounds; absent blocks are the last ones of the last span.
    keys = tl.load(sorted_ptr + places, mask=places < spans * SPAN, other=0)
    tl.store(order_ptr + places, tl.full((BLOCK_R,), -1, tl.int32), mask=(places >= count) & (places < max_blocks))
    if first < num_blocks:
        ranks = tl.zeros((BLOCK_R,), tl.int32)
        row_spans = tl.cdiv(num_blocks, SPAN)
        for first_span in range(0, row_spans, BLOCK_S):
            searched = first_span + tl.arange(0, BLOCK_S)
            # In a key's own span the greater keys are those at lower places.
            greater = _count_greater(keys, sorted_ptr, tl.minimum(searched, row_spans - 1) * SPAN, LOG_SPAN)
            ranks += tl.sum(tl.where((searched < row_spans)[None, :], greater, 0), axis=1)
        tl.store(order_ptr + ranks, _block_of(keys), mask=(places < num_blocks) & (ranks < max_blocks))


class Ranking(NamedTuple):
    """Outputs of a ranking, the spans that it is divided into, and the launch that merges them."""

    order: torch.Tensor
    """int32 [batch, kv_heads, max_blocks]."""
    counts: torch.Tensor
    """int32 [batch, kv_heads]."""
    sorted_keys: torch.Tensor
    """int64 [batch * kv_heads, spans, span]; of one span, `order`, which stands in for it."""
    spans: int
    span: int
    warps: int
    """Warps of a program that sorts a span."""

    @classmethod
    def allocate(
        cls, device: torch.device, batch: int, kv_heads: int, width: int, max_blocks: int, config: dict[str, int]
    ) -> "Ranking":
        """Divide `width` blocks into spans, by the launch choice "rank"."""
        order = torch.empty((batch, kv_heads, max_blocks), dtype=torch.int32, device=device)
        counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
        span = max(LEAST_SPAN, min(config["span"], next_power_of_2(width)))
        spans = cdiv(width, span)
        sorted_keys = order
        if spans > 1:
            sorted_keys = torch.empty((batch * kv_heads, spans, span), dtype=torch.int64, device=device)
        return cls(order, counts, sorted_keys, spans, span, config["warps"])

    def options(self) -> dict[str, Any]:
        """Return the options of a kernel that sorts spans by `write_span`."""
        return {
            "SPAN": self.span,
            "LOG_SPAN": self.span.bit_length() - 1,
            "LOW_BITS": max(1, self.span // (32 * self.warps)).bit_length() - 1,
            "ONE_SPAN": self.spans == 1,
            "num_warps": self.warps,
            **launch_options(self.order.device),
        }

    def merge(
        self, row_bounds: tuple[torch.Tensor, torch.Tensor], width: int, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge the sorted spans, if there are several; return order and counts."""
        batch, kv_heads, max_blocks = self.order.shape
        if self.spans > 1:
            merge_spans_kernel[(cdiv(max(width, max_blocks), BLOCK_R), batch * kv_heads)](
                self.sorted_keys,
                *row_bounds,
                self.order,
                kv_heads,
                width,
                max_blocks,
                self.spans,
                BLOCK_SIZE=block_size,
                SPAN=self.span,
                LOG_SPAN=self.span.bit_length() - 1,
                BLOCK_R=BLOCK_R,
                BLOCK_S=min(SEARCHED_AT_ONCE, next_power_of_2(self.spans)),
                num_warps=4,
                **launch_options(self.order.device),
            )
        return self.order, self.counts
