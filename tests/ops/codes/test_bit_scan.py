"""The scan that multiplies bits: on the device, or on the CPU with a thread for every thread of a block."""

import logging
from contextlib import nullcontext

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import code_scores
from hf_sparse_attn_kernels._nvrtc import CudaError
from hf_sparse_attn_kernels.codes import bit_scan
from hf_sparse_attn_kernels.codes.scores import plan

from tests.ops.codes.inputs import HALF, INF, make_coded
from tests.ops.emulation import compiled_for_cpu
from tests.ops.helpers import device, grid

SERVED = {"head_dim": 128, "page_size": 64}


@pytest.fixture
def bits_multiplied(monkeypatch):
    """Have the kernel serve what it can, in as many blocks; returns the list of its launches' blocks."""
    launched = []

    def kernel_for(device, heads, softmax):
        if device.type == "cuda":
            kernel = build(device, heads, softmax)
        else:
            kernel = compiled_for_cpu(bit_scan.SOURCES, bit_scan.kernel_macros(heads, softmax), "scan_codes")

        def launch(blocks, *others):
            launched.append(blocks)
            kernel(blocks, *others)

        return launch

    def force(most_blocks):
        monkeypatch.setattr(bit_scan, "blocks_of", lambda *_, **shape: most_blocks)
        return launched

    build = bit_scan._kernel
    monkeypatch.setattr(bit_scan, "_kernel", kernel_for)
    if device.type == "cpu":
        monkeypatch.setattr(bit_scan, "_stream", lambda device: 0)
    return force


@pytest.mark.parametrize(
    ("group", "group_reduce", "lengths", "most_blocks", "options"),
    [
        (1, "max", [200, 0, 1, 64, 65, 129], 12, {}),
        (2, "max", [700, 300], 12, {"first_page": 1}),
        (4, "max", [300, 650], 3, {"num_tokens": 333}),
        (7, "max", [130], 4, {}),
        (2, "softmax", [700], 6, {"first_page": 3, "num_tokens": 651}),
        (4, "softmax", [200, 0, 1, 64, 65, 129], 99, {}),
        (8, "softmax", [700, 300], 4, {"first_page": 1}),
        grid(3, "max", [700], 6, {"num_tokens": 650}),
        grid(5, "max", [129, 700], 16, {"first_page": 20}),
        grid(3, "softmax", [700, 300], 12, {}),
        grid(5, "softmax", [130], 4, {"scale": 0.3}),
    ],
)
def test_scores_are_those_of_the_reference(bits_multiplied, group, group_reduce, lengths, most_blocks, options):
    launched = bits_multiplied(most_blocks)
    coded = make_coded(lengths, group=group, dtype=torch.bfloat16, **SERVED)
    coded.encode(impl="reference")
    for row, (count, *_) in enumerate(coded.coded.tolist()):
        coded.metadata["factors"][row, :, count * 64 :] = float("nan")
    arguments = {**coded.metadata, **coded.ends(), **coded.options, **options, "group_reduce": group_reduce}
    ours, theirs = (code_scores(coded.rows.query, **arguments, impl=impl).float() for impl in ("triton", "reference"))
    assert len(launched) == 1
    assert launched[0][0] * launched[0][1] <= max(most_blocks, 2 * len(lengths))
    exists = theirs != -INF
    assert ((ours != -INF) == exists).all()
    assert (ours == theirs).float().mean() > 0.99
    # The reference adds in another order, which may round to the next float16.
    assert ((ours - theirs)[exists].abs() <= 2 * HALF * (theirs[exists].abs() + 16)).all()


@pytest.mark.parametrize(
    ("served", "options"),
    [
        (True, {}),
        (False, {"head_dim": 64}),
        (False, {"page_size": 32}),
        (False, {"bits": 2}),
        (False, {"centred": False}),
        (False, {"group": 9}),
    ],
)
def test_it_serves_one_kind_of_codes(served, options):
    coded = make_coded([100], **{**SERVED, "group": 4, **options})
    centre = coded.options.get("query_centre")
    arguments = {"page_size": coded.page_size, "bits": coded.options["bits"], "scale": None, "group_reduce": "max"}
    prepared = plan(coded.rows.query, coded.metadata["codes"], centre, **arguments)
    codes, factors = coded.metadata["codes"], coded.metadata["factors"]
    assert bit_scan.serves(prepared, codes, factors) == served
    if served:
        shifted = torch.empty(codes.numel() + 8, dtype=torch.uint8, device=device)[8:].view(codes.shape)
        assert not bit_scan.serves(prepared, shifted, factors)
        shifted = torch.empty(factors.numel() + 1, dtype=torch.float16, device=device)[1:].view(factors.shape)
        assert not bit_scan.serves(prepared, codes, shifted)


def test_without_the_compiler_tritons_kernel_scans(monkeypatch, caplog):
    def fail(*_, **options):
        raise CudaError("libnvrtc.so is not found")

    monkeypatch.setattr(bit_scan, "ClusterKernel", fail)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(bit_scan, "blocks_of", lambda *_, **shape: 8)
    bit_scan._kernel.cache_clear()
    coded = make_coded([200], group=2, **SERVED)
    coded.encode(impl="reference")
    arguments = {**coded.metadata, **coded.ends(), **coded.options}
    with caplog.at_level(logging.DEBUG, bit_scan.__name__):
        ours, theirs = (code_scores(coded.rows.query, **arguments, impl=impl) for impl in ("triton", "reference"))
    bit_scan._kernel.cache_clear()
    torch.testing.assert_close(ours, theirs, rtol=2 * HALF, atol=1e-3)
    assert "codes are scanned by Triton's kernel: libnvrtc.so is not found" in caplog.messages


def test_the_launch_choice_gives_the_blocks(monkeypatch):
    shape = {"pairs": 8, "group": 4, "tokens": 4096}
    assert bit_scan.blocks_of(torch.device("cpu"), **shape) == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(bit_scan, "multiprocessors", lambda device: 132)
    with tuning.forced(bit_scan={"per_multiprocessor": 8}):
        assert bit_scan.blocks_of(torch.device("cuda"), **shape) == 1056
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
        assert bit_scan.blocks_of(torch.device("cuda"), **shape) == 0


def test_channels_are_doubled_as_the_query_is_stored():
    """A bit of a byte at place p of its value meets a channel that is doubled 5 - p times."""
    places = [bit + shift for bit, shift in enumerate((3, 3, 3, 0, 0, 0, -2, -2))]
    assert [bit_scan.DOUBLINGS >> 4 * bit & 15 for bit in range(8)] == [5 - place for place in places]
