"""Kernels on clusters compiled by several processes at once, before anything is timed: NVRTC does one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

from hf_sparse_attn_kernels._nvrtc import CudaError, compiled

from op_bench import ROOT

Macros = tuple[tuple[str, int], ...]


def compile_kernels(sources: tuple[str, ...], kernels: Iterable[Macros], capability: tuple[int, int]) -> None:
    """Compile sources with each of these macros into the folder on disk, from which later calls take them.

    Where NVRTC is missing nothing is compiled: the calls then say so, or run as separate launches.
    """
    each = list(dict.fromkeys(kernels))
    workers = min(len(each), len(os.sched_getaffinity(0)))
    folders = (str(ROOT / "kernels" / "benchmarks"), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}
    command = [sys.executable, "-m", "op_bench.cluster_compile"]
    shares = (json.dumps([sources, capability, each[first::workers]]) for first in range(workers))
    processes = [subprocess.Popen([*command, share], env=environment) for share in shares]
    for process in processes:
        process.wait()


def main(share: str) -> None:
    """Compile a process's share: JSON of the sources, the device's capability and the kernels' macros."""
    sources, capability, kernels = json.loads(share)
    with suppress(CudaError):
        for macros in kernels:
            compiled(tuple(sources), tuple(capability), tuple((name, value) for name, value in macros))


if __name__ == "__main__":
    main(sys.argv[1])
