"""one_shot_all_reduce against torch's sums, its messages, and its errors."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hf_sparse_attn_kernels import one_shot_all_reduce
from hf_sparse_attn_kernels.sums import HALVES, PROGRAM_WORDS
from hf_sparse_attn_kernels.sums.ops import DTYPES

from tests.ops.helpers import IMPLS, check_schema, device, grid

POISON = -7  # a word -7 of call -1


def make_memory(processes, programs):
    """Buffers of all processes, and counts of each."""
    words = programs * PROGRAM_WORDS
    buffers = [torch.zeros(HALVES, processes, words, dtype=torch.int64, device=device) for _ in range(processes)]
    return buffers, [torch.zeros(programs, dtype=torch.int32, device=device) for _ in range(processes)]


def drawn(processes, count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(processes, count, generator=generator).to(device, dtype)


def in_order(of_all):
    """Add up in float32, in the order of the rows, and round once."""
    total = torch.zeros(of_all.shape[1:], dtype=torch.float32, device=device)
    for row in of_all:
        total += row
    return total.to(of_all.dtype)


def messages(tensor, count):
    return (count << 32) | (tensor.view(torch.int32).long() & 0xFFFFFFFF)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("processes", "rank"), [(2, 0), (2, 1), grid(3, 1), grid(8, 7)])
@pytest.mark.parametrize("count", [2, 500, grid(514), 1100], ids=str)
def test_writes_to_all_others_and_adds_what_they_wrote(impl, dtype, processes, rank, count):
    check_sum(impl, dtype, processes, rank, count)


def check_sum(impl, dtype, processes, rank, count):
    """The others' messages are there before; what this process leaves alone is poison."""
    buffers, counts = make_memory(processes, 5)
    of_all, calls = drawn(processes, count, dtype), 41
    for buffer in buffers:
        buffer.fill_(POISON)
    counts[rank].fill_(calls - 1)
    words = of_all.view(torch.int32).shape[1]
    programs = -(-words // PROGRAM_WORDS)
    received = buffers[rank][calls % HALVES, :, : programs * PROGRAM_WORDS]
    received[:] = calls << 32  # the words of a program's end, of which no number is made
    for process in range(processes):
        if process != rank:
            received[process, :words] = messages(of_all[process], calls)
    before = [buffer.clone() for buffer in buffers]
    own = torch.full((count + 8,), torch.nan, dtype=dtype, device=device)
    own[4:-4] = of_all[rank]
    one_shot_all_reduce(own[4:-4], buffers, counts[rank], rank=rank, impl=impl)
    expected = in_order(of_all)
    if impl == "triton" and device.type == "cpu" and dtype == torch.bfloat16:  # Triton's interpreter truncates it
        torch.testing.assert_close(own[4:-4], expected, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(own[4:-4], expected)
    assert own[:4].isnan().all()
    assert own[-4:].isnan().all()
    assert counts[rank].tolist() == [calls] * programs + [calls - 1] * (5 - programs)
    assert torch.equal(buffers[rank], before[rank])
    for process in range(processes):
        if process != rank:
            sent = buffers[process][calls % HALVES, rank, :words]
            assert torch.equal(sent, messages(of_all[rank], calls))
            sent.copy_(before[process][calls % HALVES, rank, :words])
            buffers[process][calls % HALVES, rank, words : programs * PROGRAM_WORDS] = POISON
            assert torch.equal(buffers[process], before[process])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [6, 700])
def test_is_added_to_another_tensor_as_torch_would(impl, dtype, count):
    buffers, counts = make_memory(2, 3)
    own, others, addend = drawn(3, count, dtype)
    buffers[0][1, 1] = 1 << 32
    words = messages(others, 1)
    buffers[0][1, 1, : len(words)] = words
    combined = torch.full_like(addend, torch.nan)
    one_shot_all_reduce(own, buffers, counts[0], rank=0, addend=addend, combined=combined, impl=impl)
    truncates = impl == "triton" and device.type == "cpu" and dtype == torch.bfloat16
    torch.testing.assert_close(combined, own + addend, rtol=torch.finfo(dtype).eps if truncates else 0, atol=0)


@pytest.mark.parametrize("processes", [2, 3])
def test_threads_agree_call_after_call(processes):
    """Sums of several sizes in turn, so that programs have made different numbers of calls."""
    buffers, counts = make_memory(processes, 4)
    tensors = [drawn(processes, count, torch.float32, count) for count in (1000, 3, 700, 256, 1, 1024, 5) * 4]
    streams = [torch.cuda.Stream() for _ in range(processes)] if device.type == "cuda" else []
    for rank in range(processes):  # loading a kernel may wait for those that run, and they for it
        for tensor in tensors:
            others, zeros = make_memory(processes, 4)
            others[rank].fill_(1 << 32)
            one_shot_all_reduce(tensor[rank].clone(), others, zeros[rank], rank=rank)
    own_of_all = [[tensor[rank].clone() for tensor in tensors] for rank in range(processes)]
    if streams:
        torch.cuda.synchronize()

    def run(rank):
        own = own_of_all[rank]
        for each in own:
            if streams:
                with torch.cuda.stream(streams[rank]):
                    one_shot_all_reduce(each, buffers, counts[rank], rank=rank)
            else:
                one_shot_all_reduce(each, buffers, counts[rank], rank=rank)
        return own

    with ThreadPoolExecutor(processes) as pool:
        sums = list(pool.map(run, range(processes)))
    if streams:
        torch.cuda.synchronize()
    for index, of_all in enumerate(tensors):
        for rank in range(processes):
            assert torch.equal(sums[rank][index], in_order(of_all)), (index, rank)


def make_arguments():
    buffers, counts = make_memory(2, 2)
    return {"tensor": torch.zeros(8, device=device), "buffers": buffers, "counts": counts[0], "rank": 0}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: {"tensor": a["tensor"].double()}, TypeError, "tensor has dtype torch.float64; allowed: torch.float"),
        (lambda a: {"tensor": a["tensor"][::2]}, ValueError, r"tensor has strides \[2\]; allowed: contiguous"),
        (lambda a: {"tensor": a["tensor"].half()[:3]}, ValueError, "tensor has 6 bytes; allowed: multiples of 4 up to"),
        (lambda a: {"tensor": a["tensor"].half()[1:3]}, ValueError, "tensor has storage offset 1"),
        (lambda a: {"tensor": a["tensor"][:0]}, ValueError, "tensor has 0 bytes"),
        (lambda a: {"tensor": a["tensor"].repeat(65)}, ValueError, r"2080 bytes; allowed: .* 2048, for \[2\] counts"),
        (lambda a: {"buffers": a["buffers"][:1]}, ValueError, "buffers has 1 tensors; allowed: 2 to 8"),
        (lambda a: {"buffers": [a["buffers"][0].int()] * 2}, TypeError, r"buffers\[0\] has dtype torch.int32"),
        (lambda a: {"buffers": [a["buffers"][0]] * 3}, ValueError, r"buffers\[0\] has shape .* = \[2, 3, 512\]"),
        (lambda a: {"buffers": [each.mT for each in a["buffers"]]}, ValueError, r"buffers\[0\] has strides"),
        (lambda a: {"counts": a["counts"].long()}, TypeError, "counts has dtype torch.int64; allowed: torch.int32"),
        (lambda a: {"addend": a["tensor"]}, ValueError, "combined is missing; allowed: both or neither"),
        (lambda a: {"combined": a["tensor"]}, ValueError, "addend is missing; allowed: both or neither"),
        (
            lambda a: {"addend": a["tensor"].half(), "combined": a["tensor"]},
            TypeError,
            "addend has dtype torch.float16; allowed: torch.float32",
        ),
        (
            lambda a: {"addend": a["tensor"], "combined": a["tensor"][:4]},
            ValueError,
            r"combined has shape \[4\]; allowed: .* = \[8\]",
        ),
        (lambda a: {"rank": 2}, ValueError, "rank=2; allowed: below 2, the number of buffers"),
        (lambda a: {"rank": -1}, ValueError, "rank=-1"),
    ],
)
def test_bad_input(impl, change, error, message):
    arguments = make_arguments()
    with pytest.raises(error, match=message):
        one_shot_all_reduce(**{**arguments, **change(arguments)}, impl=impl)
    assert not arguments["counts"].any()


def test_schema():
    arguments = make_arguments()
    arguments["buffers"][0][1, 1] = 1 << 32
    check_schema("one_shot_all_reduce", arguments)
    combined = {"addend": torch.ones(8, device=device), "combined": torch.empty(8, device=device)}
    arguments["buffers"][0][:, 1] = 1 << 32
    check_schema("one_shot_all_reduce", {**arguments, **combined, "counts": torch.zeros_like(arguments["counts"])})
