"""Small sums over processes by one kernel: which ones it makes, and what it makes of them on several GPUs."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_sparse_attn.patch import one_shot

ROOT = Path(__file__).parents[2]
PAIR = SimpleNamespace(size=lambda: 2)


def row(count=64, **changes):
    """What is asked of a tensor on a GPU."""
    tensor = torch.zeros(count, dtype=changes.pop("dtype", torch.bfloat16))
    asked = {name: getattr(tensor, name) for name in ("dtype", "nbytes", "itemsize", "storage_offset", "is_contiguous")}
    return SimpleNamespace(**{**asked, "is_cuda": True, **changes})


@pytest.mark.parametrize(
    ("tensor", "group", "is_served"),
    [
        (row(), PAIR, True),
        (row(dtype=torch.float32), PAIR, True),
        (row(one_shot.LARGEST_SUM // 2), PAIR, True),
        (row(one_shot.LARGEST_SUM // 2 + 8), PAIR, False),
        (row(dtype=torch.float16), PAIR, True),
        (row(dtype=torch.float64), PAIR, False),
        (row(6), PAIR, True),
        (row(7), PAIR, False),
        (row(0), PAIR, False),
        (row(storage_offset=lambda: 3), PAIR, False),
        (row(storage_offset=lambda: 4), PAIR, True),
        (row(is_contiguous=lambda: False), PAIR, False),
        (row(is_cuda=False), PAIR, False),
        (row(), SimpleNamespace(size=lambda: 4), True),
        (row(), SimpleNamespace(size=lambda: 8), True),
        (row(), SimpleNamespace(size=lambda: 9), False),
    ],
)
def test_what_the_kernel_serves(tensor, group, is_served):
    assert one_shot._is_served(tensor, group) is is_served


@pytest.mark.parametrize(
    ("change", "reach"),
    [
        ({}, True),
        ({"host": "two"}, False),
        ({"device": "0", "reached": "1"}, False),
        ({"reached": ""}, False),
        ({"reached": "0 2 3"}, True),
        ({"reached": "2 3"}, False),
    ],
)
def test_devices_that_reach_each_other(change, reach):
    first = {"host": "one", "device": "0", "reached": "1"}
    second = {"host": "one", "device": "1", "reached": "0"}
    assert one_shot._reach_each_other([first, {**second, **change}]) is reach


def test_an_addend_of_another_sum_is_refused():
    tensor = torch.zeros(4)
    with pytest.raises(ValueError, match="addend and combined are given for a sum that the kernel does not make"):
        one_shot.all_reduce(tensor, group=object(), addend=tensor, combined=tensor)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_sums_on_several_gpus(processes):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs CUDA, {processes} devices")
    paths = [str(ROOT), str(ROOT / "kernels/torch-ext"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "tests.one_shot_sums", str(processes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
