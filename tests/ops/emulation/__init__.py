"""Kernels in CUDA C++, compiled for the CPU."""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hf_sparse_attn_kernels import _cluster
from hf_sparse_attn_kernels._nvrtc import PACKAGE

HEADER = Path(__file__).with_name("device.h")
MOST_SHARED = 227 * 1024  # bytes that a block may have on compute capability 9.0
OPTIONS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE")
"""Fortified, `longjmp` refuses to jump from one stack to another."""


class CpuKernel:
    """A kernel that takes the place of a `ClusterKernel`, and runs its clusters on the CPU, one after another.

    Parameters
    ----------
    sources, macros, name
        As for `ClusterKernel`.
    """

    def __init__(self, sources: tuple[str, ...], macros: tuple[tuple[str, int], ...], name: str) -> None:
        files = [HEADER, *(PACKAGE / source for source in sources if source != "_cluster.cuh")]
        texts = [file.read_text() for file in files]
        texts.append(f"""
extern "C" int run(const char* bytes, int clusters_x, int blocks_y) {{
  Arguments arguments;
  memcpy(&arguments, bytes, sizeof(arguments));
  return run_grid({name}, arguments, clusters_x, blocks_y);
}}""")
        defined = [f"-D{macro}={value}" for macro, value in macros]
        with TemporaryDirectory() as folder:
            source, library = Path(folder, f"{name}.cpp"), Path(folder, f"{name}.so")
            source.write_text("\n".join(texts))
            subprocess.run(["c++", *OPTIONS, *defined, "-o", str(library), str(source)], check=True)
            self._run = ctypes.CDLL(str(library)).run

    def max_clusters(self, shared: int) -> int:
        """Return a number that serves every test."""
        return 1024

    def __call__(self, clusters: tuple[int, int], shared: int, stream: int, arguments: bytes) -> None:
        """Run clusters in x and y.

        Raises
        ------
        RuntimeError
            Threads wait for each other.
        """
        if waiting := self._run(ctypes.c_char_p(arguments), *clusters):
            raise RuntimeError(f"{waiting} threads of a cluster wait for each other")


compiled_for_cpu = cache(CpuKernel)


CLUSTERS = [
    {"cluster": 3, "threads": 256},
    pytest.param({"cluster": 8, "threads": 512}, marks=pytest.mark.gpu),
    pytest.param({"cluster": 2, "threads": 512}, marks=pytest.mark.gpu),
]
"""Launch choices to test a step with; the CPU takes seconds for a large cluster."""


def clusters_fixture(module: ModuleType, name: str) -> Any:
    """Return a fixture, `on_clusters`: where there is no CUDA device a kernel of this name runs on the CPU.

    Parameters
    ----------
    module : module
        The implementation of an op on clusters.
    name : str
        The name of its kernel.
    """

    @pytest.fixture
    def on_clusters() -> Iterator[None]:
        with on_device(module, name):
            yield

    return on_clusters


def on_device(module: ModuleType, name: str) -> AbstractContextManager[None]:
    """Let a step's implementation on clusters run on the CUDA device, or where there is none as :func:`on_cpu`."""
    return nullcontext() if torch.cuda.is_available() else on_cpu(module, name)


def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets an entry with each launch of a kernel on clusters."""
    kernel: Any = _cluster.ClusterKernel if torch.cuda.is_available() else CpuKernel
    launches: list[None] = []
    launch = kernel.__call__
    monkeypatch.setattr(kernel, "__call__", lambda self, *options: launches.append(launch(self, *options)))
    return launches


@contextmanager
def on_cpu(module: ModuleType, name: str) -> Iterator[None]:
    """Let a step's implementation on clusters, a kernel of this name, serve tensors of the CPU."""

    def kernel_of(device: torch.device, size: int, threads: int, *shape: Any) -> CpuKernel:
        return compiled_for_cpu(module.SOURCES, module.kernel_macros(size, threads, *shape), name)

    with pytest.MonkeyPatch.context() as patch, planned_with(module, kernel_of):
        patch.setattr(module, "unlaunchable", lambda *_: None, raising=False)
        yield


@contextmanager
def planned_with(
    module: ModuleType,
    kernel_of: Callable[..., Any],
    *,
    capability: tuple[int, int] = (9, 0),
    most_shared: int = MOST_SHARED,
) -> Iterator[None]:
    """Let launches be planned for a device that is not there.

    Parameters
    ----------
    module : module
        The implementation of an op on clusters.
    kernel_of : callable
        Takes the place of its `_kernel`.
    capability, most_shared
        The device's compute capability, and the most bytes of shared memory that a block may have.
    """
    module._plan.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_kernel", kernel_of)
        patch.setattr(_cluster, "most_shared_bytes", lambda device: most_shared)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        yield
    module._plan.cache_clear()
