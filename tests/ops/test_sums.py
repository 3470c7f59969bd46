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

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path(hf_sparse_attn_kernels.__file__).parent
PLAIN_SUMS = {
    # Each thread has two of a row's products at least, and fuses the second with the first: both are rounded then.
    "centroids/prefill_kernels.py": ["weights * keys[None, :]"],
    "codes/mass.py": ["mass"],  # integers
}


def _is_product(term: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether a summed term is a product, or a name whose last value before, by lines, is one."""
    if not isinstance(term, ast.Name):
        return isinstance(term, ast.BinOp) and isinstance(term.op, ast.Mult)
    assigned = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AugAssign))]
    before = [
        node
        for node in assigned
        if ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == term.id
        and node.lineno < term.lineno
    ]
    last = max(before, key=lambda node: node.lineno, default=None)
    if isinstance(last, ast.AugAssign):
        return isinstance(last.op, ast.Mult)
    return last is not None and isinstance(last.value, ast.BinOp) and isinstance(last.value.op, ast.Mult)


def _summed_products(source: str) -> list[str]:
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            terms = [node.args[0] for node in calls if ast.unparse(node.func) == "tl.sum"]
            found += [ast.unparse(term) for term in terms if _is_product(term, function)]
    return found


def test_float_products_are_not_summed_by_the_compilers_choice_of_rounding():
    found = {path.relative_to(KERNELS).as_posix(): _summed_products(path.read_text()) for path in KERNELS.rglob("*.py")}
    assert {path: products for path, products in found.items() if products} == PLAIN_SUMS


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["x = tl.sum(a * b, axis=0)"], ["a * b"]),
        (["c = a * b", "x = tl.sum(c)"], ["c"]),
        (["c = a + b", "c *= b", "x = tl.sum(c)"], ["c"]),
        (["c = a * b", "c += b", "x = tl.sum(c)"], []),
        (["x = tl.sum(tl.maximum(a * b, b))", "c = a * b"], []),
    ],
)
def test_which_sums_are_of_products(lines, found):
    assert _summed_products("def kernel(a, b):\n    " + "\n    ".join(lines)) == found


def test_compiled_for_hopper_no_copies_differ(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.ops.compiled_sums"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
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
