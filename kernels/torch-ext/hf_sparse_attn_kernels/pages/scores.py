"""Triton kernels of `page_scores`: an upper bound of q.k over each page, reduced over the query heads of a group."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._triton import INTERPRET, cdiv, next_power_of_2, score_dtype
from .tiles import group_softmax, split_query, store_scores


@triton.jit
def page_scores_kernel(
    query_ptr,
    min_ptr,
    max_ptr,
    page_exponent_ptr,
    channel_exponent_ptr,
    start_ptr,
    end_ptr,
    out_ptr,  # [batch * kv_heads, num_pages]; for "softmax" [batch * kv_heads, group, num_pages rounded up to 16]
    tile_lse_ptr,  # [batch * kv_heads, group, tiles], for "softmax" only
    kv_heads,
    group,
    num_pages,
    max_pages,
    scale,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    min_stride_b,
    min_stride_h,
    min_stride_p,
    max_stride_b,
    max_stride_h,
    max_stride_p,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    REDUCE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Score BLOCK_P pages of a row and KV head; grid (page tiles, batch * kv_heads)."""
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    length = tl.load(end_ptr + row) - tl.load(start_ptr + row)
    row_pages = tl.minimum(tl.cdiv(tl.maximum(length, 0), PAGE_SIZE), num_pages)
    above, below, unit = split_query(
        query_ptr + row * query_stride_b + head * group * query_stride_h,
        channel_exponent_ptr + pair * HEAD_DIM,
        group,
        query_stride_h,
        query_stride_d,
        HEAD_DIM,
        QUANTIZED,
        BLOCK_G,
        BLOCK_D,
        DOT_DTYPE,
    )
    padded_pages = (num_pages + 15) // 16 * 16
    out_ptr += pair * (group * padded_pages if REDUCE == "softmax" else num_pages)
    store_scores(
        above,
        below,
        min_ptr + row * min_stride_b + head * min_stride_h,
        max_ptr + row * max_stride_b + head * max_stride_h,
        page_exponent_ptr + pair * max_pages,
        tl.program_id(0) * BLOCK_P,
        tl.minimum((tl.program_id(0) + 1) * BLOCK_P, row_pages),
        min_stride_p,
        max_stride_p,
        scale * unit,
        out_ptr,
        tile_lse_ptr + pair * group * tl.num_programs(0) + tl.program_id(0),
        tl.num_programs(0),
        group,
        padded_pages,
        HEAD_DIM,
        QUANTIZED,
        REDUCE,
        BLOCK_P,
        BLOCK_G,
        BLOCK_D,
        DOT_DTYPE,
        INTERPRETED,
    )
    if REDUCE != "softmax":
        pages = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        tl.store(
            out_ptr + pages,
            tl.full((BLOCK_P,), float("-inf"), tl.float32),
            mask=(pages >= row_pages) & (pages < num_pages),
        )


@triton.jit
def group_softmax_kernel(
    head_scores_ptr,  # [batch * kv_heads, group, num_pages rounded up to 16]
    tile_lse_ptr,  # [batch * kv_heads, group, tiles]
    out_ptr,  # [batch * kv_heads, num_pages]
    start_ptr,
    end_ptr,
    kv_heads,
    num_pages,
    tiles,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Reduce BLOCK_P pages over the group; grid (page tiles, batch * kv_heads)."""
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    length = tl.load(end_ptr + row) - tl.load(start_ptr + row)
    row_pages = tl.minimum(tl.cdiv(tl.maximum(length, 0), PAGE_SIZE), num_pages)
    padded_pages = (num_pages + 15) // 16 * 16
    pages = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    scores = group_softmax(
        head_scores_ptr + pair * GROUP * padded_pages,
        tile_lse_ptr + pair * GROUP * tiles,
        pages,
        row_pages,
        padded_pages,
        tl.cdiv(row_pages, TILE_P),
        tiles,
        GROUP,
        BLOCK_P,
        BLOCK_T,
    )
    tl.store(out_ptr + pair * num_pages + pages, scores, mask=pages < num_pages)


def page_scores(
    query: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    scale: float | None,
    group_reduce: str,
    num_pages: int | None,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
) -> torch.Tensor:
    """Launch `page_scores_kernel`, then `group_softmax_kernel`."""
    check_triton("query", query)
    batch, q_heads, head_dim = query.shape
    kv_heads, max_pages = page_min.shape[1:3]
    group = q_heads // kv_heads
    num_pages = max_pages if num_pages is None else num_pages
    softmax = group_reduce == "softmax"
    block_g = max(16, next_power_of_2(group))
    block_d = max(16, next_power_of_2(head_dim))
    # Two tiles of bounds take at most 64 KiB together.
    block_p = max(16, min(64, 32768 // (block_d * page_min.element_size())))
    tiles = cdiv(num_pages, block_p)
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()

    out = query.new_empty((batch, kv_heads, num_pages), dtype=torch.float32)
    head_scores, tile_lse = out, out
    if softmax:
        head_scores = query.new_empty((batch * kv_heads, group, cdiv(num_pages, 16) * 16), dtype=torch.float32)
        tile_lse = query.new_empty((batch * kv_heads, group, tiles), dtype=torch.float32)
    page_scores_kernel[(tiles, batch * kv_heads)](
        query,
        page_min,
        page_max,
        page_min if page_exponent is None else page_exponent,
        page_min if channel_exponent is None else channel_exponent,
        seq_start,
        seq_end,
        head_scores,
        tile_lse,
        kv_heads,
        group,
        num_pages,
        max_pages,
        head_dim**-0.5 if scale is None else scale,
        *query.stride(),
        *page_min.stride()[:3],
        *page_max.stride()[:3],
        HEAD_DIM=head_dim,
        QUANTIZED=channel_exponent is not None,
        REDUCE=group_reduce,
        PAGE_SIZE=page_size,
        BLOCK_P=block_p,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        DOT_DTYPE=score_dtype(query, channel_exponent is not None),
        INTERPRETED=INTERPRET,
        num_warps=4,
    )
    if softmax:
        group_softmax_kernel[(cdiv(num_pages, 256), batch * kv_heads)](
            head_scores,
            tile_lse,
            out,
            seq_start,
            seq_end,
            kv_heads,
            num_pages,
            tiles,
            GROUP=group,
            PAGE_SIZE=page_size,
            TILE_P=block_p,
            BLOCK_P=256,
            BLOCK_T=next_power_of_2(tiles),
        )
    return out
