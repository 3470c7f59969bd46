"""Triton kernel of `page_bounds`: elementwise minimum and maximum of the keys of a page."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl


@triton.jit
def page_bounds_kernel(
    keys_ptr,
    min_ptr,
    max_ptr,
    start_ptr,
    end_ptr,
    kv_heads,
    head_dim,
    num_new,
    max_pages,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    min_stride_b,
    min_stride_h,
    min_stride_p,
    max_stride_b,
    max_stride_h,
    max_stride_p,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One touched page of one row and KV head; grid (touched pages, batch * kv_heads)."""
    row = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = (tl.program_id(1) % kv_heads).to(tl.int64)
    start = tl.load(start_ptr + row)
    length = tl.load(end_ptr + row) - start
    page = tl.maximum(length - num_new, 0) // PAGE_SIZE + tl.program_id(0)
    if (page * PAGE_SIZE < length) & (page < max_pages):
        dims = tl.arange(0, BLOCK_D)
        lower = tl.full((BLOCK_D,), float("inf"), tl.float32)
        upper = tl.full((BLOCK_D,), float("-inf"), tl.float32)
        base = keys_ptr + row * keys_stride_b + head * keys_stride_h
        for chunk in range(0, PAGE_SIZE, BLOCK_N):
            offsets = page * PAGE_SIZE + chunk + tl.arange(0, BLOCK_N)
            positions = (start + offsets).to(tl.int64)
            mask = (offsets < length)[:, None] & (dims < head_dim)[None, :]
            tile = tl.load(base + positions[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
            tile = tile.to(tl.float32)  # [BLOCK_N, BLOCK_D]
            lower = tl.minimum(lower, tl.min(tl.where(mask, tile, float("inf")), axis=0))
            upper = tl.maximum(upper, tl.max(tl.where(mask, tile, float("-inf")), axis=0))
        page64 = page.to(tl.int64)
        min_out = min_ptr + row * min_stride_b + head * min_stride_h + page64 * min_stride_p + dims
        max_out = max_ptr + row * max_stride_b + head * max_stride_h + page64 * max_stride_p + dims
        tl.store(min_out, lower.to(min_ptr.dtype.element_ty), mask=dims < head_dim)
        tl.store(max_out, upper.to(max_ptr.dtype.element_ty), mask=dims < head_dim)


def page_bounds(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    num_new: int,
) -> None:
    """Launch `page_bounds_kernel`; see `hf_sparse_attn_kernels.page_bounds`."""
    batch, kv_heads, capacity, head_dim = keys.shape
    max_pages = page_min.shape[2]
    num_new = min(num_new, capacity)
    # The most pages that num_new consecutive tokens can touch.
    touched = min((num_new + page_size - 2) // page_size + 1, max_pages)
    block_d = max(16, triton.next_power_of_2(head_dim))
    page_bounds_kernel[(touched, batch * kv_heads)](
        keys,
        page_min,
        page_max,
        seq_start.contiguous(),
        seq_end.contiguous(),
        kv_heads,
        head_dim,
        num_new,
        max_pages,
        *keys.stride()[:3],
        *page_min.stride()[:3],
        *page_max.stride()[:3],
        PAGE_SIZE=page_size,
        BLOCK_N=min(page_size, max(1, 8192 // block_d)),
        BLOCK_D=block_d,
        num_warps=4,
    )
