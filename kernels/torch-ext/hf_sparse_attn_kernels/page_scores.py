"""Triton kernels of `page_scores`: an upper bound of q.k over each page, reduced over the query heads of a group."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from ._triton import dot_dtype


@triton.jit
def page_scores_kernel(
    query_ptr,
    min_ptr,
    max_ptr,
    start_ptr,
    end_ptr,
    out_ptr,  # [batch * kv_heads, num_pages]; for SOFTMAX [batch * kv_heads, group, num_pages]
    tile_lse_ptr,  # [batch * kv_heads, tiles, group], for SOFTMAX only
    kv_heads,
    group,
    head_dim,
    num_pages,
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
    REDUCE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """BLOCK_P pages of one row and KV head; grid (page tiles, batch * kv_heads)."""
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    length = tl.load(end_ptr + row) - tl.load(start_ptr + row)
    pages = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    exists = (pages < num_pages) & (pages * PAGE_SIZE < length)
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)

    query_at = query_ptr + row * query_stride_b + (head * group + heads)[:, None] * query_stride_h
    query_mask = (heads < group)[:, None] & (dims < head_dim)[None, :]
    q = tl.load(query_at + dims[None, :] * query_stride_d, mask=query_mask, other=0.0)
    q = q.to(tl.float32)  # [BLOCK_G, BLOCK_D]
    # The bounds are read transposed: [BLOCK_D, BLOCK_P].
    mask = (dims < head_dim)[:, None] & exists[None, :]
    pages64 = pages.to(tl.int64)[None, :]
    min_at = min_ptr + row * min_stride_b + head * min_stride_h + pages64 * min_stride_p + dims[:, None]
    max_at = max_ptr + row * max_stride_b + head * max_stride_h + pages64 * max_stride_p + dims[:, None]
    lower = tl.load(min_at, mask=mask, other=0.0).to(DOT_DTYPE)
    upper = tl.load(max_at, mask=mask, other=0.0).to(DOT_DTYPE)
    # sum_i max(q_i m_i, q_i M_i) = max(q, 0).M + min(q, 0).m
    scores = tl.dot(tl.maximum(q, 0.0).to(DOT_DTYPE), upper, input_precision="ieee")
    scores += tl.dot(tl.minimum(q, 0.0).to(DOT_DTYPE), lower, input_precision="ieee")
    scores = tl.where(exists[None, :], scores * scale, float("-inf"))  # [BLOCK_G, BLOCK_P]

    if REDUCE == "softmax":
        head_mask = heads < group
        out_at = out_ptr + (pair * group + heads[:, None]) * num_pages + pages[None, :]
        tl.store(out_at, scores, mask=head_mask[:, None] & (pages < num_pages)[None, :])
        top = tl.max(scores, axis=1)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(scores - top[:, None]), axis=1)
        lse = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(tile_lse_ptr + (pair * tl.num_programs(0) + tl.program_id(0)) * group + heads, lse, mask=head_mask)
    else:
        if REDUCE == "mean":
            reduced = tl.sum(tl.where((heads < group)[:, None], scores, 0.0), axis=0) / group
        else:
            reduced = tl.max(tl.where((heads < group)[:, None], scores, float("-inf")), axis=0)
        tl.store(out_ptr + pair * num_pages + pages, reduced, mask=pages < num_pages)


@triton.jit
def group_softmax_kernel(
    head_scores_ptr,  # [batch * kv_heads, group, num_pages]
    tile_lse_ptr,  # [batch * kv_heads, tiles, group]
    out_ptr,  # [batch * kv_heads, num_pages]
    group,
    num_pages,
    tiles,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """log sum_h exp(s_h(p) - lse_h) of BLOCK_P pages; grid (page tiles, batch * kv_heads)."""
    pair = tl.program_id(1).to(tl.int64)
    heads = tl.arange(0, BLOCK_G)
    head_mask = heads < group
    # Each head's log-sum-exp over all pages, from those of the tiles.
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    for first in range(0, tiles, BLOCK_T):
        at = first + tl.arange(0, BLOCK_T)
        mask = (at < tiles)[:, None] & head_mask[None, :]
        part = tl.load(
            tile_lse_ptr + (pair * tiles + at[:, None]) * group + heads[None, :], mask=mask, other=float("-inf")
        )
        new_top = tl.maximum(top, tl.max(part, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(part - shift[None, :]), axis=0)
        top = new_top
    lse = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), 0.0)

    pages = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = head_mask[:, None] & (pages < num_pages)[None, :]
    at = head_scores_ptr + (pair * group + heads[:, None]) * num_pages + pages[None, :]
    scores = tl.load(at, mask=mask, other=float("-inf")) - lse[:, None]  # [BLOCK_G, BLOCK_P]
    # In logarithms: a page far below the best one must neither underflow nor tie with others.
    best = tl.max(scores, axis=0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp(scores - shift[None, :]), axis=0)
    reduced = tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out_ptr + pair * num_pages + pages, reduced, mask=pages < num_pages)


def page_scores(
    query: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    scale: float | None = None,
    group_reduce: str = "softmax",
    num_pages: int | None = None,
) -> torch.Tensor:
    """Launch `page_scores_kernel`, then `group_softmax_kernel`; see `hf_sparse_attn_kernels.page_scores`."""
    batch, q_heads, head_dim = query.shape
    kv_heads, max_pages = page_min.shape[1:3]
    group = q_heads // kv_heads
    num_pages = max_pages if num_pages is None else num_pages
    softmax = group_reduce == "softmax"
    block_g = max(16, triton.next_power_of_2(group))
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Two tiles of bounds at most 64 KiB together.
    block_p = max(16, min(64, 32768 // (block_d * query.element_size())))
    tiles = triton.cdiv(num_pages, block_p)

    out = query.new_empty((batch, kv_heads, num_pages), dtype=torch.float32)
    head_scores, tile_lse = out, out
    if softmax:
        head_scores = query.new_empty((batch * kv_heads, group, num_pages), dtype=torch.float32)
        tile_lse = query.new_empty((batch * kv_heads, tiles, group), dtype=torch.float32)
    page_scores_kernel[(tiles, batch * kv_heads)](
        query,
        page_min,
        page_max,
        seq_start.contiguous(),
        seq_end.contiguous(),
        head_scores,
        tile_lse,
        kv_heads,
        group,
        head_dim,
        num_pages,
        head_dim**-0.5 if scale is None else scale,
        *query.stride(),
        *page_min.stride()[:3],
        *page_max.stride()[:3],
        REDUCE=group_reduce,
        PAGE_SIZE=page_size,
        BLOCK_P=block_p,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=4,
    )
    if softmax:
        block_p = 128
        group_softmax_kernel[(triton.cdiv(num_pages, block_p), batch * kv_heads)](
            head_scores, tile_lse, out, group, num_pages, tiles, BLOCK_P=block_p, BLOCK_G=block_g, BLOCK_T=32
        )
    return out
