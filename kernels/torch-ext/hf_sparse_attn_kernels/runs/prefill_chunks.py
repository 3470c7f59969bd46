"""Units of work of about the same size for `runs_prefill`, and the merge of their partial results.

A *column* is a tile of queries of one pair of row and KV head. Its *tiles* are those of the keys it attends to. Heads
choose very different numbers of keys, so a column is cut into *chunks* of the same number of tiles, and each program
takes a *unit*: one chunk of one column. All columns of a pair are cut at the same keys, and their units follow one
another, so that they run at the same time and share keys and values in the L2 cache. The last, shorter chunks of all
pairs come at the end and fill the multiprocessors evenly.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from .._triton import wait_for_previous_kernel


@triton.jit
def chunks_of_pairs(
    token_counts_ptr,
    start_ptr,
    end_ptr,
    kv_heads,
    pairs,
    columns,
    most_units,
    LEAST_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Cut the tiles of every pair into chunks.

    Returns the tiles of a chunk, and for each of BLOCK_P pairs the number of chunks of this size, and whether a shorter
    one follows. A pair without tiles has one empty chunk. There are at most `most_units` units, plus the columns.
    """
    pair = tl.arange(0, BLOCK_P)
    exists = pair < pairs
    chosen = tl.load(token_counts_ptr + pair, mask=exists, other=0)
    start = tl.load(start_ptr + pair // kv_heads, mask=exists, other=0)
    end = tl.load(end_ptr + pair // kv_heads, mask=exists, other=0)
    tiles = tl.cdiv(chosen, BLOCK_N) + tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    work = tl.sum(tiles.to(tl.int64)) * columns
    chunk = tl.maximum(tl.cdiv(work, most_units), LEAST_TILES).to(tl.int32)
    whole = tiles // chunk
    rest = (exists & ((tiles % chunk > 0) | (tiles == 0))).to(tl.int32)
    return chunk, whole, rest


@triton.jit
def first_slot(whole, rest, pair, columns, BLOCK_P: tl.constexpr):
    """Return the number of chunks of `pair`, and the slot of the first partial result of its columns."""
    every = tl.arange(0, BLOCK_P)
    chunks = whole + rest
    number = tl.sum(tl.where(every == pair, chunks, 0))
    before = tl.sum(tl.where((every < pair) & (chunks > 1), chunks, 0))
    return number, before.to(tl.int64) * columns


@triton.jit
def store_result(
    out_ptr,
    lse_ptr,
    out,
    running_max,
    running_sum,
    row,
    query_head,
    query,
    valid,
    exists,
    q_heads,
    queries,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Divide by the sum and store; zeros and -inf for padding."""
    dims = tl.arange(0, BLOCK_D)
    seen = valid & (running_sum > 0)
    total = tl.where(seen, running_sum, 1.0)
    at = (row * q_heads + query_head) * queries + query
    out = tl.where(seen[:, None], out / total[:, None], 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * HEAD_DIM + dims[None, :], out, mask=exists[:, None] & (dims < HEAD_DIM)[None, :])
    lse = tl.where(seen, (running_max + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + at, lse, mask=exists)


@triton.jit
def merge_chunks_kernel(
    token_counts_ptr,  # int32 [batch * kv_heads]
    start_ptr,  # int32 [batch], like the next
    end_ptr,
    partial_max_ptr,  # [slots, COLUMN_M], in units of log2
    partial_sum_ptr,  # [slots, COLUMN_M]
    partial_out_ptr,  # [slots, COLUMN_M, BLOCK_D]
    out_ptr,  # [batch * q_heads, queries, HEAD_DIM]
    lse_ptr,  # [batch * q_heads, queries]
    kv_heads,
    group,
    queries,
    pairs,
    columns,
    most_units,
    HEAD_DIM: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    COLUMN_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the chunks of BLOCK_M lanes of a column that has several; grid (COLUMN_M // BLOCK_M * columns, pairs)."""
    wait_for_previous_kernel(PDL)
    _, whole, rest = chunks_of_pairs(
        token_counts_ptr, start_ptr, end_ptr, kv_heads, pairs, columns, most_units, LEAST_TILES, BLOCK_N, BLOCK_P
    )
    pair = tl.program_id(1)
    number, slot = first_slot(whole, rest, pair, columns, BLOCK_P)
    if number == 1:
        return
    lanes = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot += tl.program_id(0) * BLOCK_M // COLUMN_M
    lane = lanes % COLUMN_M
    query = lanes // group
    row = (pair // kv_heads).to(tl.int64)
    head = (pair % kv_heads).to(tl.int64)
    own = tl.load(end_ptr + row) - queries + query
    exists = query < queries
    valid = exists & (own >= tl.load(start_ptr + row))
    dims = tl.arange(0, BLOCK_D)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for _ in range(number):
        at = slot * COLUMN_M + lane
        part_max = tl.load(partial_max_ptr + at, mask=valid, other=float("-inf"))
        part_sum = tl.load(partial_sum_ptr + at, mask=valid, other=0.0)
        part_out = tl.load(partial_out_ptr + at[:, None] * BLOCK_D + dims[None, :], mask=valid[:, None], other=0.0)
        new_top = tl.maximum(top, part_max)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part_max - shift)
        decay = tl.exp2(top - shift)
        total = total * decay + part_sum * weight
        out = out * decay[:, None] + part_out * weight[:, None]
        top = new_top
        slot += columns
    store_result(
        out_ptr,
        lse_ptr,
        out,
        top,
        total,
        row,
        head * group + lanes % group,
        query,
        valid,
        exists,
        kv_heads * group,
        queries,
        HEAD_DIM,
        BLOCK_D,
    )
