"""RoPE by slot, for kernels that read keys before RoPE."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def load_rotated(
    at,  # [N, 1], addresses of vectors of HEAD_DIM channels
    stride,  # of the channels
    slot,  # [N]
    valid,  # [N]
    cos_ptr,  # [slots, HEAD_DIM // 2], like the next
    sin_ptr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Load vectors as two halves [N, BLOCK_H], vector i rotated to slot[i] in float32 and rounded once; 0 if invalid.

    With halves, every cosine, sine and channel is loaded only once.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)[None, :]
    mask = valid[:, None] & (dims < HALF)
    first = tl.load(at + dims * stride, mask=mask, other=0.0)
    second = tl.load(at + (dims + HALF) * stride, mask=mask, other=0.0)
    angle_at = slot.to(tl.int64)[:, None] * HALF + dims
    cos = tl.load(cos_ptr + angle_at, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle_at, mask=mask, other=0.0)
    x1 = first.to(tl.float32)
    x2 = second.to(tl.float32)
    return (x1 * cos - x2 * sin).to(first.dtype), (x2 * cos + x1 * sin).to(second.dtype)
