"""`load_blocks`: the chosen blocks, bit for bit, and nothing else."""

import pytest
import torch
from hf_sparse_attn_kernels import load_blocks

from tests.ops.helpers import IMPLS, check_schema, device

impls = pytest.mark.parametrize("impl", IMPLS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def make_arguments(block_size, head_dim, blocks=5, dtype=torch.float32, num_blocks=9, num_tokens=63):
    """Device memory of NaN, and host memory with numbers; the blocks overlap on the host, and begin anywhere."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.full((2, num_blocks, block_size, head_dim), torch.nan, dtype=dtype, device=device)
    host = torch.randn(2, num_tokens, head_dim, generator=generator).to(dtype)
    host = host.pin_memory() if device.type == "cuda" else host
    return {
        "keys": memory[0],
        "values": memory[1],
        "host_keys": host[0],
        "host_values": host[1],
        "block_indices": torch.randperm(num_blocks, generator=generator)[:blocks].to(device),
        "first_tokens": torch.randint(num_tokens - block_size + 1, (blocks,), generator=generator).to(device),
    }


@impls
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("block_size", "head_dim", "blocks"), [(1, 1, 1), (3, 80, 5), (16, 7, 9), (32, 10, 4), (8, 128, 7), (32, 256, 3)]
)
def test_blocks_are_copied_and_others_left_alone(block_size, head_dim, blocks, dtype, impl):
    """The largest block is larger than what a program copies at once; there are more blocks than programs."""
    arguments = make_arguments(block_size, head_dim, blocks, dtype)
    load_blocks(**arguments, impl=impl)
    written = arguments["block_indices"].tolist()
    for name in ("keys", "values"):
        for block, first in zip(written, arguments["first_tokens"].tolist(), strict=True):
            expected = arguments[f"host_{name}"][first : first + block_size]
            assert torch.equal(arguments[name][block].cpu(), expected)
        others = [block for block in range(9) if block not in written]
        assert arguments[name][others].isnan().all()


@pytest.mark.gpu
@torch.inference_mode()
def test_a_kernel_sees_what_an_earlier_copy_on_another_stream_has_stored():
    """Blocks go to the host and back many times, by streams that only wait for each other."""
    stores, loads = torch.cuda.Stream(), torch.cuda.Stream()
    arguments = make_arguments(16, 128, blocks=4, num_tokens=64)
    arguments["first_tokens"] = torch.arange(4, device=device) * 16
    arguments["block_indices"] = torch.arange(4, device=device)
    for number in range(100):
        source = torch.full((64, 128), float(number), device=device)
        stores.wait_stream(torch.cuda.current_stream())
        stores.wait_stream(loads)
        with torch.cuda.stream(stores):
            for name in ("host_keys", "host_values"):
                arguments[name].copy_(source, non_blocking=True)
        loads.wait_stream(stores)
        with torch.cuda.stream(loads):
            load_blocks(**arguments)
        torch.cuda.current_stream().wait_stream(loads)
        assert (arguments["keys"][:4] == number).all()
        assert (arguments["values"][:4] == number).all()


@pytest.mark.gpu
def test_pageable_memory_is_refused():
    arguments = make_arguments(8, 16)
    arguments["host_values"] = arguments["host_values"].clone()
    with pytest.raises(ValueError, match=r"host_values is not pinned; allowed with impl='triton' on cuda:0: pinned"):
        load_blocks(**arguments)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("block_indices", 9, "block_indices contains 9; allowed: 0 to num_blocks - 1 = 8"),
        ("block_indices", -1, "block_indices contains -1; allowed"),
        ("first_tokens", 56, "first_tokens contains 56; allowed: 0 to num_tokens - block_size = 55"),
        ("first_tokens", -1, "first_tokens contains -1; allowed"),
    ],
)
def test_the_reference_refuses_indices_out_of_range_before_it_writes(name, wrong, message):
    arguments = make_arguments(8, 16)
    arguments[name][-1] = wrong
    with pytest.raises(ValueError, match=message):
        load_blocks(**arguments, impl="reference")
    assert arguments["keys"].isnan().all()
    assert arguments["values"].isnan().all()


def test_the_default_device_does_not_matter():
    found, expected = make_arguments(8, 16), make_arguments(8, 16)
    load_blocks(**expected, impl="reference")
    with torch.device("meta"):
        load_blocks(**found, impl="reference")
    torch.testing.assert_close(found["keys"], expected["keys"], equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"keys": torch.zeros(9, 8)},
            ValueError,
            r"keys has shape \[9, 8\]; allowed: \[num_blocks, block_size, head_dim",
        ),
        ({"values": torch.zeros(9, 8, 15)}, ValueError, r"values has shape \[9, 8, 15\]; allowed: .* = \[9, 8, 16\]"),
        ({"host_keys": torch.zeros(63, 8)}, ValueError, r"host_keys has shape \[63, 8\]; allowed: .* = \[63, 16\]"),
        ({"host_values": torch.zeros(62, 16)}, ValueError, r"host_values has shape \[62, 16\]; allowed: .* \[63, 16\]"),
        (
            {"host_values": torch.zeros(63, 16).half()},
            TypeError,
            r"host_values has dtype torch.float16; allowed: torch",
        ),
        ({"host_keys": torch.zeros(16, 63).t()}, ValueError, r"host_keys has strides \[1, 63\]; allowed: contiguous"),
        (
            {"block_indices": torch.zeros(5).int()},
            TypeError,
            r"block_indices has dtype torch.int32; allowed: torch.int64",
        ),
        ({"first_tokens": torch.zeros(4).long()}, ValueError, r"first_tokens has shape \[4\]; allowed: \[n\] = \[5\]"),
        ({"host_keys": torch.zeros(63, 16, device="meta")}, ValueError, r"host_keys is on meta; allowed: host memory"),
    ],
    ids=str,
)
def test_arguments_are_checked(changes, error, message):
    changes = {
        name: tensor if name.startswith("host") or tensor.is_meta else tensor.to(device)
        for name, tensor in changes.items()
    }
    with pytest.raises(error, match=message):
        load_blocks(**make_arguments(8, 16) | changes)


def test_schema():
    """Of the reference, since the check makes copies of the arguments, which are not pinned."""
    check_schema("load_blocks", make_arguments(8, 16) | {"impl": "reference"})
