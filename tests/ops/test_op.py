"""Which implementation runs: what is asked for, or an error."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_sparse_attn_kernels import _op, select_blocks, use_impl

from tests.ops.helpers import device, int32

PACKAGE = Path(__file__).parents[2] / "kernels" / "torch-ext"


def _select(**options):
    scores = torch.tensor([[[1.0, 3.0, 2.0]]], device=device)
    return select_blocks(scores, int32([0]), int32([3]), block_size=1, max_blocks=2, **options)[0].tolist()


@pytest.fixture
def calls(monkeypatch):
    """The implementations that the ops ran, in order."""
    seen = []
    resolve = _op.resolve_impl

    def record(impl, tensor):
        seen.append(resolve(impl, tensor))
        return seen[-1]

    monkeypatch.setattr(_op, "resolve_impl", record)
    return seen


def test_default_and_use_impl(calls):
    default = "triton" if device.type == "cuda" else "reference"
    assert _select() == [[[1, 2]]]
    with use_impl("triton"):
        _select()
        with use_impl("reference"):
            _select()
            _select(impl="triton")
        _select()
    _select()
    assert calls == [default, "triton", "reference", "triton", "triton", default]


def test_use_impl_is_undone_by_an_error(calls):
    with pytest.raises(KeyError), use_impl("triton"):
        raise KeyError
    _select()
    assert calls == ["triton" if device.type == "cuda" else "reference"]


def test_unknown_name():
    with pytest.raises(ValueError, match="impl='cuda'; allowed"), use_impl("cuda"):
        pass


def test_triton_on_cpu_tensors_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    scores = torch.zeros(1, 1, 3)
    bounds = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="impl='triton' with tensors on 'cpu'; allowed"):
        select_blocks(scores, *bounds, block_size=1, max_blocks=2, impl="triton")


def test_without_triton_the_reference_runs_and_triton_is_an_error():
    script = """
import sys
sys.modules["triton"] = None
import torch
from hf_sparse_attn_kernels import select_blocks
arguments = (torch.zeros(1, 1, 3), torch.zeros(1).int(), torch.full((1,), 3).int())
print(select_blocks(*arguments, block_size=1, max_blocks=2)[0].tolist())
try:
    select_blocks(*arguments, block_size=1, max_blocks=2, impl="triton")
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "[[[0, 1]]]",
        "impl='triton', but triton is not installed; allowed here: impl='reference'",
    ]
