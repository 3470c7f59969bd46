"""Second kernel of `append_and_select`: reduces the page scores over the group and takes the top-k."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._topk import load_order_keys, order_keys, write_top_blocks
from .._triton import finished_last, wait_for_previous_kernel
from .tiles import group_softmax


@triton.jit
def select_pages_kernel(
    scores_ptr,  # [batch * kv_heads, num_pages rounded up to 16], reduced over the group; written for "softmax"
    head_scores_ptr,  # [batch * kv_heads, group, the same], for "softmax" only, like the next
    program_lse_ptr,  # [batch * kv_heads, group, score_programs]
    maxima_ptr,  # int32 [batch * kv_heads, programs * PROGRAM_P / SPAN], for TWO_LEVELS only, like the next
    spans_ptr,  # int32 [batch * kv_heads, max_blocks]
    start_ptr,
    end_ptr,
    finished_ptr,  # int32 [batch * kv_heads], 0 before and after
    indices_ptr,  # [batch * kv_heads, max_blocks]
    counts_ptr,  # [batch * kv_heads]
    kv_heads,
    num_pages,
    max_blocks,
    sink_blocks,
    recent_blocks,
    score_programs,
    scored_per_program,
    GROUP: tl.constexpr,
    REDUCE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PROGRAM_P: tl.constexpr,
    ONE_PROGRAM: tl.constexpr,
    TWO_LEVELS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce PROGRAM_P pages of a row and KV head; the last program to finish selects; grid (programs, pairs).

    With many pages the selection has two levels: the spans of SPAN pages with the highest maxima hold all pages that
    can be selected.
    """
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0)
    row_pages = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    programs = tl.maximum(tl.cdiv(row_pages, PROGRAM_P), 1)
    program = tl.program_id(0)
    if program < programs:
        padded_pages = (num_pages + 15) // 16 * 16
        scores_ptr += pair * padded_pages
        head_scores_ptr += pair * GROUP * padded_pages
        program_lse_ptr += pair * score_programs * GROUP
        maxima_ptr += pair * (tl.num_programs(0) * (PROGRAM_P // SPAN))
        spans_ptr += pair * max_blocks
        indices_ptr += pair * max_blocks
        if not ONE_PROGRAM:
            pages = program * PROGRAM_P + tl.arange(0, PROGRAM_P)
            if REDUCE == "softmax":
                scores = group_softmax(
                    head_scores_ptr,
                    program_lse_ptr,
                    pages,
                    row_pages,
                    padded_pages,
                    1 + tl.cdiv(tl.maximum(row_pages - 1, 0), scored_per_program),
                    score_programs,
                    GROUP,
                    PROGRAM_P,
                    BLOCK_T,
                )
                tl.store(scores_ptr + pages, scores, mask=pages < padded_pages)
                keys = order_keys(scores, pages, row_pages, sink_blocks, recent_blocks)
            else:
                keys = load_order_keys(scores_ptr, pages, row_pages, sink_blocks, recent_blocks, True)
            if TWO_LEVELS:
                maxima = tl.max(tl.reshape(keys, (PROGRAM_P // SPAN, SPAN)), axis=1)
                spans = program * (PROGRAM_P // SPAN) + tl.arange(0, PROGRAM_P // SPAN)
                tl.store(maxima_ptr + spans, maxima)
        if ONE_PROGRAM or finished_last(finished_ptr + pair, programs):
            count = tl.minimum(row_pages, max_blocks)
            tl.store(counts_ptr + pair, count)
            lanes = tl.arange(0, BLOCK_N)
            if TWO_LEVELS:
                num_spans = tl.cdiv(row_pages, SPAN)
                span_keys = tl.load(maxima_ptr + lanes, mask=lanes < num_spans, other=-0x80000000, cache_modifier=".cg")
                kept_spans = tl.minimum(num_spans, max_blocks)
                # Every kept span has a page that reaches this, so at least `kept_spans` pages do.
                floor = write_top_blocks(
                    span_keys,
                    lanes,
                    -0x80000000,
                    scores_ptr,
                    spans_ptr,
                    num_spans,
                    kept_spans,
                    kept_spans,
                    0,
                    0,
                    BLOCK_N,
                    True,
                    True,
                )
                tl.debug_barrier()  # the other threads of this program read what was just written
                candidates = tl.arange(0, BLOCK_C)
                exists = candidates < kept_spans * SPAN
                span = tl.load(spans_ptr + candidates // SPAN, mask=exists, other=0)
                kept_pages = tl.where(exists, span * SPAN + candidates % SPAN, row_pages)
                page_keys = load_order_keys(scores_ptr, kept_pages, row_pages, sink_blocks, recent_blocks, False)
                num_candidates = tl.sum((kept_pages < row_pages).to(tl.int32))
                write_top_blocks(
                    page_keys,
                    kept_pages,
                    tl.where(kept_spans == count, floor, -0x80000000),
                    scores_ptr,
                    indices_ptr,
                    num_candidates,
                    count,
                    max_blocks,
                    sink_blocks,
                    recent_blocks,
                    BLOCK_C,
                    True,
                    False,
                )
            else:
                write_top_blocks(
                    load_order_keys(scores_ptr, lanes, row_pages, sink_blocks, recent_blocks, True),
                    lanes,
                    -0x80000000,
                    scores_ptr,
                    indices_ptr,
                    row_pages,
                    count,
                    max_blocks,
                    sink_blocks,
                    recent_blocks,
                    BLOCK_N,
                    ONE_TILE,
                    True,
                )
