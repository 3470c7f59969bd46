"""Helpers shared by the Triton kernels and their launchers."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton sees it when the kernels are decorated
INTERPRETER_MULTIPROCESSORS = 8  # assumed without a device: few, but enough to split

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# Triton's own versions take several microseconds per call, and a decode step makes hundreds of calls.
def cdiv(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def dot_dtype(dtype: torch.dtype) -> Any:
    """Return the operand type of `tl.dot` for tensors of `dtype`.

    Triton's interpreter multiplies bfloat16 bit patterns as integers, so it gets float32, which is exact.
    """
    if INTERPRET and dtype == torch.bfloat16:
        return tl.float32
    return _DOT_DTYPES[dtype]


def score_dtype(query: torch.Tensor, quantized: bool) -> Any:
    """Return the operand type of `tl.dot` for page scores: 8-bit levels become float16."""
    return tl.float16 if quantized and query.dtype != torch.float32 else dot_dtype(query.dtype)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of the device's multiprocessors."""
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@lru_cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Return launch arguments for programmatic dependent launch on devices that have it: Hopper and later.

    Such a kernel may start while the previous one in the stream still runs; it waits before its first load.
    """
    dependent = not INTERPRET and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait until the previous kernel has finished and its results are visible, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sum_of_products(a, b, axis: tl.constexpr):
    """Sum the products of two float32 tensors, and give every thread that holds a copy of a sum the same bits.

    `tl.sum(a * b, axis)` does not: threads exchange what they have, and add a neighbour's product, which is rounded, to
    their own, which the compiler fuses into the addition and so leaves exact. Both ends of an exchange hold a sum then
    that differs in the last bit, and which of them is stored through shared memory is left to chance. A product that is
    itself a fused operation, here with 0, is rounded once for both.
    """
    return tl.sum(tl.fma(a, b, 0.0), axis=axis)


@triton.jit
def prefetch(at):
    """Bring the lines of 128 bytes at these pointers into the L2 cache. Compiled code only."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@triton.jit
def finished_last(finished_ptr, programs):
    """Return whether this is the last of `programs` programs to finish; it then sees all stores of the others.

    The counter at `finished_ptr` is 0 before the first and after the last.
    """
    tl.debug_barrier()  # every thread's stores come before the count
    is_last = tl.atomic_add(finished_ptr, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.store(finished_ptr, 0)
    return is_last
