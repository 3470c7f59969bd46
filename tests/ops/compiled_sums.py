"""Compile sums of products for a Hopper GPU, which takes none, and say in which of them copies of a sum differ.

A process of its own, without Triton's interpreter: `python -m tests.ops.compiled_sums` prints a JSON object, for each
kernel the number of exchanges between threads whose two ends round differently.
"""

import json
import re
from typing import Any

import triton
import triton.language as tl
from hf_sparse_attn_kernels._merge import merge_splits_kernel
from hf_sparse_attn_kernels._triton import sum_of_products
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHAPES = {"rows": 4, "columns": 32}


@triton.jit
def plain_kernel(a_ptr, b_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr):
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out_ptr + tl.arange(0, rows), tl.sum(tl.load(a_ptr + at) * tl.load(b_ptr + at), axis=1))


@triton.jit
def rounded_kernel(a_ptr, b_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr):
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out_ptr + tl.arange(0, rows), sum_of_products(tl.load(a_ptr + at), tl.load(b_ptr + at), 1))


def differing_copies(ptx: str) -> int:
    """Count the exchanges in which a thread adds what it got to a product of its own that it has not rounded."""
    products = set(re.findall(r"mul(?:\.rn)?\.f32 +\t?(%r\d+)", ptx))
    count = 0
    for got, sent in re.findall(r"shfl\.sync\.bfly\.b32 +\t?(%r\d+), (%r\d+),", ptx):
        is_fused = re.search(rf"fma\.rn\.f32 +\t?%r\d+, [^;]*, {got};", ptx) is not None
        may_be = sent in products and re.search(rf"add\.f32 +\t?%r\d+, [^;]*{got}\b", ptx) is not None
        count += is_fused or may_be
    return count


def ptx_of(kernel: Any, pointers: int, integers: int, **constants: Any) -> str:
    """Compile a kernel whose first arguments are pointers to float32 and whose next ones are integers."""
    types = ["*fp32"] * pointers + ["i32"] * integers + ["constexpr"] * len(constants)
    source = ASTSource(fn=kernel, signature=dict(zip(kernel.arg_names, types, strict=True)), constexprs=constants)
    text: str = triton.compile(source, target=HOPPER, options={"num_warps": 4, "enable_fp_fusion": True}).asm["ptx"]
    return text


if __name__ == "__main__":
    merge = {"HEAD_DIM": 80, "BLOCK_D": 128, "PDL": False}
    compiled = {
        "plain": ptx_of(plain_kernel, 3, 0, **SHAPES),
        "rounded": ptx_of(rounded_kernel, 3, 0, **SHAPES),
        "merge of 32 splits": ptx_of(merge_splits_kernel, 5, 2, **merge, BLOCK_S=32),
        "merge of 64 splits": ptx_of(merge_splits_kernel, 5, 2, **merge, BLOCK_S=64),
    }
    print(json.dumps({name: differing_copies(ptx) for name, ptx in compiled.items()}))
