"""Two ways of timing a step: one CUDA-graph replay, and one layer's share of a graph of many layers."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARMUP_CALLS = 3
"""Calls before a capture, in which kernels are compiled and loaded, and cuDNN builds its plans."""
COPIED_BYTES = 1 << 31
HOST_COPIED_BYTES = 1 << 28


def quartiles(microseconds: Sequence[float]) -> dict[str, float]:
    """Return minimum, quartiles and number of samples."""
    values = sorted(microseconds)
    if len(values) == 1:
        values *= 2
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": values[0], "q1": q1, "median": median, "q3": q3, "samples": len(microseconds)}


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a step on a separate stream after warm-up; return the graph and the step's result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    was_collecting = gc.isenabled()
    gc.disable()  # a kernel collected during the capture is unloaded, which aborts the capture
    try:
        with torch.cuda.graph(graph, stream=stream):
            outputs = step()
    finally:
        if was_collecting:
            gc.enable()
    torch.cuda.synchronize()
    return graph, outputs


def time_replay(graph: torch.cuda.CUDAGraph, budget_ms: float) -> dict[str, float]:
    """Return the times of one replay in µs, with the L2 cache flushed before each."""
    from triton.testing import do_bench

    times = do_bench(graph.replay, warmup=max(5, int(budget_ms / 4)), rep=int(budget_ms), return_mode="all")
    return quartiles([1e3 * time for time in times])


def time_layers(graph: torch.cuda.CUDAGraph, layers: int, budget_ms: float) -> dict[str, float]:
    """Return the times of one layer in µs: a replay divided by the layers, which flush the L2 cache for each other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    estimate = max(marks[1].elapsed_time(marks[-1]) / 2, 1e-3)
    repeats = min(200, max(10, int(budget_ms / estimate)))
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return quartiles([1e3 * begin.elapsed_time(end) / layers for begin, end in zip(begins, ends, strict=True)])


def copy_bytes_per_second() -> float:
    """Measure the bytes per second that a copy within the device's memory reads and writes."""
    source = torch.randn(COPIED_BYTES // 4, device="cuda")
    return 2 * COPIED_BYTES / _copy_seconds(source)


def host_copy_bytes_per_second() -> float:
    """Measure the bytes per second that the copy engine moves from pinned memory to the device, in one piece."""
    source = torch.zeros(HOST_COPIED_BYTES // 4, pin_memory=True)
    return HOST_COPIED_BYTES / _copy_seconds(source)


def _copy_seconds(source: torch.Tensor) -> float:
    """Return the median time of a copy to the device."""
    from triton.testing import do_bench

    target = torch.empty_like(source, device="cuda")
    milliseconds = do_bench(lambda: target.copy_(source, non_blocking=True), warmup=25, rep=100, return_mode="median")
    return 1e-3 * float(milliseconds)
