"""Every thread that holds a copy of a sum of products has the same bits."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import hf_sparse_attn_kernels
import pytest
import torch
import triton
import triton.language as tl
from hf_sparse_attn_kernels._triton import sum_of_products

from .helpers import device

KERNELS = Path(hf_sparse_attn_kernels.__file__).parent
PLAIN_SUMS = {
    # Each thread has two of a row's products at least, and fuses the second with the first: both are rounded then.
    "centroids/prefill_kernels.py": ["weights * keys[None, :]"],
}


def test_float_products_are_not_summed_by_the_compilers_choice_of_rounding():
    found = {}
    for path in sorted(KERNELS.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        sums = [node.args[0] for node in calls if ast.unparse(node.func) == "tl.sum"]
        products = [ast.unparse(term) for term in sums if isinstance(term, ast.BinOp) and isinstance(term.op, ast.Mult)]
        if products:
            found[path.relative_to(KERNELS).as_posix()] = products
    assert found == PLAIN_SUMS


def test_compiled_for_hopper_no_copies_differ(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.ops.compiled_sums"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts.pop("plain") > 0, "the search finds nothing in tl.sum(a * b), where there is something to find"
    assert counts == dict.fromkeys(("rounded", "merge of 32 splits", "merge of 64 splits"), 0)


@triton.jit
def _sums_kernel(a_ptr, b_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr):
    row = tl.arange(0, rows)
    at = row[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out_ptr + row, sum_of_products(tl.load(a_ptr + at), tl.load(b_ptr + row)[:, None], 1))


@pytest.mark.parametrize("columns", [1, 2, 64])
def test_a_factor_is_broadcast_and_nothing_is_lost(columns):
    generator = torch.Generator().manual_seed(columns)
    a = torch.randn(8, columns, generator=generator).to(device)
    b = torch.randn(8, generator=generator).to(device)
    out = torch.full((8,), float("nan"), device=device)
    _sums_kernel[(1,)](a, b, out, 8, columns)
    exact = (a.double() * b.double()[:, None]).sum(1)
    terms = (a.double() * b.double()[:, None]).abs().sum(1)
    assert ((out.double() - exact).abs() <= terms * columns * 2.0**-24).all()
