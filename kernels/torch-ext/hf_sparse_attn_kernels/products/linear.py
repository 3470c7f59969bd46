"""Triton kernel of `one_row_linear`: a program has a few outputs, and goes through their weights in steps."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._triton import cdiv, launch_options, next_power_of_2, wait_for_previous_kernel

FEW = 512  # outputs
LONG = 8192  # bytes of an output's weights beyond which a program has one output, and takes smaller steps


@triton.jit
def _load_step(at, feature, begin: tl.constexpr, IN_FEATURES: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr):
    """Load BLOCK_K features from `begin` on; those beyond the last one are 0."""
    if begin + BLOCK_K <= IN_FEATURES:
        return tl.load(at + begin, eviction_policy=EVICT)
    return tl.load(at + begin, mask=begin + feature < IN_FEATURES, other=0.0, eviction_policy=EVICT)


@triton.jit
def one_row_linear_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    other_ptr,
    combined_ptr,
    out_features,
    weight_stride,
    IN_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_IS_READY: tl.constexpr,
    COMBINE_BY: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum up the products of BLOCK_N outputs, BLOCK_K at a time; grid (out_features / BLOCK_N,)."""
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(out, out_features - 1).to(tl.int64)  # programs at the end read the last row several times
    feature = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + row[:, None] * weight_stride + feature[None, :]
    input_at = input_ptr + feature
    if not WEIGHT_IS_READY:
        wait_for_previous_kernel(PDL)
    weight = _load_step(weight_at, feature[None, :], 0, IN_FEATURES, BLOCK_K, "evict_first")
    if WEIGHT_IS_READY:
        wait_for_previous_kernel(PDL)
    if COMBINE_BY is not None:
        other = tl.load(other_ptr + row).to(SUM_DTYPE)
    total = tl.zeros((BLOCK_N, BLOCK_K), SUM_DTYPE)
    for begin in tl.static_range(0, IN_FEATURES, BLOCK_K):
        if begin > 0:
            weight = _load_step(weight_at, feature[None, :], begin, IN_FEATURES, BLOCK_K, "evict_first")
        value = _load_step(input_at, feature, begin, IN_FEATURES, BLOCK_K, "").to(SUM_DTYPE)
        # Fused explicitly: for mere products the compiler would fuse the sum below, and not in all threads alike.
        total = tl.fma(weight.to(SUM_DTYPE), tl.broadcast_to(value[None, :], (BLOCK_N, BLOCK_K)), total)
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias_ptr + row).to(SUM_DTYPE)
    rounded = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out, rounded, mask=out < out_features)
    if COMBINE_BY is not None:
        rounded = rounded.to(SUM_DTYPE)
        combined = rounded + other if COMBINE_BY == "add" else rounded * other
        tl.store(combined_ptr + out, combined.to(out_ptr.dtype.element_ty), mask=out < out_features)


def one_row_linear(
    input: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None, weight_is_ready: bool
) -> torch.Tensor:
    """Launch `one_row_linear_kernel`."""
    out = input.new_empty((*input.shape[:-1], weight.shape[0]))
    _launch(input, weight, bias, weight_is_ready, out)
    return out


def combined_one_row_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    other: torch.Tensor,
    *,
    by: str,
    bias: torch.Tensor | None,
    weight_is_ready: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `one_row_linear_kernel`."""
    out, combined = torch.empty_like(other), torch.empty_like(other)
    _launch(input, weight, bias, weight_is_ready, out, other, by, combined)
    return out, combined


def _launch(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_is_ready: bool,
    out: torch.Tensor,
    other: torch.Tensor | None = None,
    by: str | None = None,
    combined: torch.Tensor | None = None,
) -> None:
    out_features, in_features = weight.shape
    block_n, block_k, warps = tiles(out_features, in_features, weight.itemsize)
    one_row_linear_kernel[(cdiv(out_features, block_n),)](
        input,
        weight,
        bias,
        out,
        other,
        combined,
        out_features,
        weight.stride(0),
        IN_FEATURES=in_features,
        HAS_BIAS=bias is not None,
        WEIGHT_IS_READY=weight_is_ready,
        COMBINE_BY=by,
        SUM_DTYPE=tl.float64 if input.dtype == torch.float64 else tl.float32,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **launch_options(input.device),
    )


def tiles(out_features: int, in_features: int, itemsize: int) -> tuple[int, int, int]:
    """Return the outputs of a program, the features in a step, and the warps for a matrix.

    Measured on an H200 for the matrices of Llama 3.1 8B and 70B, whole and divided over two GPUs.
    """
    row_bytes = in_features * itemsize
    if out_features <= FEW:  # too few programs to fill the device, so each has many loads under way
        block_n, step_bytes, thread_bytes = 2, 8192, 64
    elif row_bytes > LONG:
        block_n, step_bytes, thread_bytes = 1, 2048, 32
    else:  # two steps at least: the first is loaded while the kernel before still runs
        block_n, step_bytes, thread_bytes = 2, 4096 if row_bytes > 4096 else 2048, 64
    block_k = min(step_bytes // itemsize, next_power_of_2(in_features))
    return block_n, block_k, max(1, block_n * block_k * itemsize // (32 * thread_bytes))
