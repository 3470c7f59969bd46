"""Sums by one kernel over the processes of two or more GPUs: ``python -m tests.one_shot_sums PROCESSES``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from hf_sparse_attn_kernels.sums.ops import DTYPES

from hf_sparse_attn.patch import one_shot

COUNTS = (2, 24, 514, 4096, 32_768)
"""Numbers of elements."""
NOT_SERVED = ((torch.float64, 64), (torch.bfloat16, 7), (torch.float32, 100_000), (torch.int64, 64))


def check(rank: int, size: int, port: int) -> None:
    """Compare sums with those of torch, bit by bit, called and in a CUDA graph."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = torch.distributed.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=size)
    group: Any = torch.distributed.group.WORLD
    try:
        for dtype in DTYPES:
            for count in COUNTS:
                of_all = torch.randn(size, count, generator=torch.Generator().manual_seed(count)).to(dtype).to(device)
                check_sum(of_all, rank, group)
        assert one_shot._memory[group] is not None
        for dtype, count in NOT_SERVED:
            of_all = torch.arange(size * count).view(size, count).remainder(9).to(dtype).to(device)
            assert not one_shot._is_served(of_all[rank], group)
            own = of_all[rank].clone()
            one_shot.all_reduce(own)
            assert torch.equal(own, of_all.sum(dim=0, dtype=dtype))
    finally:
        torch.distributed.destroy_process_group()


def check_sum(of_all: torch.Tensor, rank: int, group: Any) -> None:
    """Check the sum of one row for each process: added in float32 in their order, and rounded once."""
    expected = torch.zeros_like(of_all[0], dtype=torch.float32)
    for row in of_all:
        expected += row
    own = of_all[rank].clone()
    assert one_shot._is_served(own, group)
    one_shot.all_reduce(own, group=group)
    results = [own]
    graph, recorded = torch.cuda.CUDAGraph(), torch.full_like(own, torch.nan)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        one_shot.all_reduce(recorded, group=group)
    for _ in range(3):
        recorded.copy_(of_all[rank])
        graph.replay()
        results.append(recorded.clone())
    for result in results:
        assert torch.equal(result, expected.to(of_all.dtype))


if __name__ == "__main__":
    processes = int(sys.argv[1])
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(check, (processes, server.port), nprocs=processes)
