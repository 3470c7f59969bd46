"""Triton kernel of `select_tokens_by_score`: all programs find maxima of spans, the last searches the best spans."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import math

import torch
import triton
import triton.language as tl

from .._check import check_triton_dtype
from .._topk import load_order_keys, write_top_blocks
from .._triton import cdiv, finished_last, launch_options, multiprocessors, next_power_of_2, wait_for_previous_kernel

KEYS_AT_ONCE = 16384
"""Keys that the selecting program keeps in registers."""
LISTED_AT_ONCE = 8192
"""Keys that it keeps together with their indices."""
ABSENT = tl.constexpr(-0x80000000)


@triton.jit
def write_top_spans(
    keys,  # int32 [BLOCK_N]
    spans,  # int32 [BLOCK_N], ascending
    floor,
    num_spans,  # that exist among them
    kept,
    kept_ptr,  # int32 [kept], written
    BLOCK_N: tl.constexpr,
):
    """Write the spans with the greatest keys, and return a key that at least `kept` of them reach."""
    floor = write_top_blocks(keys, spans, floor, kept_ptr, kept_ptr, num_spans, kept, kept, 0, 0, BLOCK_N, True, False)
    tl.debug_barrier()  # the other threads of this program read what was just written
    return floor


@triton.jit
def parts_of_spans(kept_ptr, kept, num_parts, SPAN: tl.constexpr, BLOCK_C: tl.constexpr):
    """List the parts of the kept spans [BLOCK_C], SPAN for each; `num_parts` where there is none."""
    lanes = tl.arange(0, BLOCK_C)
    exists = lanes < kept * SPAN
    parts = tl.load(kept_ptr + lanes // SPAN, mask=exists, other=0) * SPAN + lanes % SPAN
    return tl.where(exists & (parts < num_parts), parts, num_parts)


@triton.jit
def top_spans(
    maxima_ptr,  # of the pair, like the next two
    coarse_maxima_ptr,
    kept_ptr,
    num_spans,
    max_tokens,
    SPAN: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the spans with the greatest maxima; return their number and a key that as many tokens reach."""
    lanes = tl.arange(0, BLOCK_N)
    kept = tl.minimum(num_spans, max_tokens)
    if LEVELS == 2:
        keys = tl.load(maxima_ptr + lanes, mask=lanes < num_spans, other=ABSENT, cache_modifier=".cg")
        floor = write_top_spans(keys, lanes, ABSENT, num_spans, kept, kept_ptr, BLOCK_N)
    else:
        num_coarse = tl.cdiv(num_spans, SPAN)
        kept_coarse = tl.minimum(num_coarse, max_tokens)
        coarse_keys = tl.load(coarse_maxima_ptr + lanes, mask=lanes < num_coarse, other=ABSENT, cache_modifier=".cg")
        floor = write_top_spans(coarse_keys, lanes, ABSENT, num_coarse, kept_coarse, kept_ptr, BLOCK_N)
        spans = parts_of_spans(kept_ptr, kept_coarse, num_spans, SPAN, BLOCK_C)
        tl.debug_barrier()  # every thread has read the spans that are overwritten next
        keys = tl.load(maxima_ptr + spans, mask=spans < num_spans, other=ABSENT, cache_modifier=".cg")
        floor = tl.where(kept_coarse == kept, floor, ABSENT)
        found = tl.sum((spans < num_spans).to(tl.int32))
        floor = write_top_spans(keys, spans, floor, found, kept, kept_ptr, BLOCK_C)
    return kept, floor


@triton.jit
def select_tokens_by_score_kernel(
    scores_ptr,  # float16 [pairs, num_tokens]
    maxima_ptr,  # int32 [pairs, programs * PROGRAM_T / SPAN], for LEVELS > 1, like the next
    kept_ptr,  # int32 [pairs, max_tokens]
    coarse_maxima_ptr,  # int32 [pairs, programs * PROGRAM_T / SPAN ** 2], for LEVELS == 3
    start_ptr,
    end_ptr,
    finished_ptr,  # int32 [pairs], 0 before and after
    indices_ptr,  # int32 [pairs, max_tokens]
    counts_ptr,  # int32 [pairs]
    kv_heads,
    num_tokens,
    max_tokens,
    sink_tokens,
    PAGE_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    SPAN: tl.constexpr,
    PROGRAM_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the tokens of a row and KV head; the last program to finish its part does; grid (programs, pairs).

    The spans of SPAN tokens with the highest maxima hold all tokens that can be selected. With 3 levels, the same holds
    for these spans and spans of SPAN of them.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.minimum(tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0), num_tokens)
    recent = length - tl.maximum(length - 1, 0) // PAGE_SIZE * PAGE_SIZE
    programs = tl.maximum(tl.cdiv(length, PROGRAM_T), 1)
    program = tl.program_id(0)
    if program < programs:
        SPANS: tl.constexpr = PROGRAM_T // SPAN
        scores_ptr += pair * num_tokens
        maxima_ptr += pair * (tl.num_programs(0) * SPANS)
        coarse_maxima_ptr += pair * (tl.num_programs(0) * (SPANS // SPAN))
        kept_ptr += pair * max_tokens
        indices_ptr += pair * max_tokens
        if LEVELS > 1:
            tokens = program * PROGRAM_T + tl.arange(0, PROGRAM_T)
            keys = load_order_keys(scores_ptr, tokens, length, sink_tokens, recent, PADDED)
            maxima = tl.max(tl.reshape(keys, (SPANS, SPAN)), axis=1)
            tl.store(maxima_ptr + program * SPANS + tl.arange(0, SPANS), maxima)
            if LEVELS == 3:
                coarse = tl.max(tl.reshape(maxima, (SPANS // SPAN, SPAN)), axis=1)
                at = program * (SPANS // SPAN) + tl.arange(0, SPANS // SPAN)
                tl.store(coarse_maxima_ptr + at, coarse)
        if LEVELS == 1 or finished_last(finished_ptr + pair, programs):
            count = tl.minimum(length, max_tokens)
            tl.store(counts_ptr + pair, count)
            if LEVELS == 1:
                lanes = tl.arange(0, BLOCK_N)
                write_top_blocks(
                    load_order_keys(scores_ptr, lanes, length, sink_tokens, recent, PADDED),
                    lanes,
                    ABSENT,
                    scores_ptr,
                    indices_ptr,
                    length,
                    count,
                    max_tokens,
                    sink_tokens,
                    recent,
                    BLOCK_N,
                    ONE_TILE,
                    PADDED,
                )
            else:
                num_spans = tl.cdiv(length, SPAN)
                kept, floor = top_spans(
                    maxima_ptr, coarse_maxima_ptr, kept_ptr, num_spans, max_tokens, SPAN, LEVELS, BLOCK_N, BLOCK_C
                )
                candidates = parts_of_spans(kept_ptr, kept, length, SPAN, BLOCK_C)
                write_top_blocks(
                    load_order_keys(scores_ptr, candidates, length, sink_tokens, recent, False),
                    candidates,
                    tl.where(kept == count, floor, ABSENT),
                    scores_ptr,
                    indices_ptr,
                    tl.sum((candidates < length).to(tl.int32)),
                    count,
                    max_tokens,
                    sink_tokens,
                    recent,
                    BLOCK_C,
                    True,
                    False,
                )


def _levels(num_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Return the number of levels, and the tokens of a span, with which no level has too many keys for registers."""
    largest = LISTED_AT_ONCE // next_power_of_2(max_tokens)
    if num_tokens > KEYS_AT_ONCE and largest > 1:
        # Levels of about the same size: num_tokens / span spans, then max_tokens * span tokens.
        balanced = min(largest, next_power_of_2(max(2, math.isqrt(num_tokens // max_tokens))))
        for levels, span in ((2, balanced), (2, largest), (3, balanced), (3, largest)):
            if cdiv(num_tokens, span ** (levels - 1)) <= KEYS_AT_ONCE:
                return levels, span
    return 1, 1


def select_tokens_by_score(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel."""
    check_triton_dtype("scores", scores, (torch.float16,))
    batch, kv_heads, num_tokens = scores.shape
    pairs, device = batch * kv_heads, scores.device
    levels, span = _levels(num_tokens, max_tokens)
    keys = cdiv(num_tokens, span ** (levels - 1))
    one_tile = keys <= KEYS_AT_ONCE
    block_n = max(128, next_power_of_2(keys)) if one_tile else LISTED_AT_ONCE
    block_c = max(128, next_power_of_2(max_tokens) * span)
    # About one program for each multiprocessor, since one that selects is large.
    program_t = next_power_of_2(cdiv(num_tokens * pairs, multiprocessors(device)))
    program_t = max(1024, span**2, min(program_t, KEYS_AT_ONCE))
    programs = 1 if levels == 1 else cdiv(num_tokens, program_t)

    indices = torch.empty((batch, kv_heads, max_tokens), dtype=torch.int32, device=device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    maxima = coarse_maxima = kept = indices
    if levels > 1:
        maxima = torch.empty((pairs, programs * program_t // span), dtype=torch.int32, device=device)
        kept = torch.empty((pairs, max_tokens), dtype=torch.int32, device=device)
        if finished is None:
            finished = torch.zeros((pairs,), dtype=torch.int32, device=device)
    if levels == 3:
        coarse_maxima = torch.empty((pairs, programs * program_t // span**2), dtype=torch.int32, device=device)
    largest = max(block_n, block_c if levels > 1 else 0)
    select_tokens_by_score_kernel[(programs, pairs)](
        scores.contiguous(),
        maxima,
        kept,
        coarse_maxima,
        seq_start.contiguous(),
        seq_end.contiguous(),
        counts if finished is None else finished,
        indices,
        counts,
        kv_heads,
        num_tokens,
        max_tokens,
        sink_tokens,
        PAGE_SIZE=page_size,
        LEVELS=levels,
        SPAN=span,
        PROGRAM_T=program_t,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        ONE_TILE=one_tile,
        PADDED=num_tokens % 16 == 0,
        num_warps=4 if largest <= 2048 else 16,
        **launch_options(device),
    )
    return indices, counts
