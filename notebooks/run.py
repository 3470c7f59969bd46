"""Execute notebooks and write them with their outputs to build/notebooks: ``python notebooks/run.py [NAME ...]``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from rich.console import Console
from rich.text import Text

SOURCES = Path(__file__).resolve().parent
TARGET = SOURCES.parent / "build" / "notebooks"
TIMEOUT_SECONDS = 180.0
# They take longest, so they start first: with several jobs, no core is idle at the end.
LONGEST = ("write_a_method", "squeezed", "tokenselect", "what_is_read", "speed_and_memory", "quickstart")
# Progress bars and import messages of torch and tqdm do not help readers.
QUIET = {"TORCH_LOGS": "-all", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}


class ThisInterpreter(AsyncKernelManager):
    """Kernel manager that always uses this interpreter, whichever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """Specification of a kernel in this interpreter."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def sources() -> dict[str, Path]:
    """Return the paths of the notebooks by name."""
    return {path.stem: path for path in sorted(SOURCES.glob("*.ipynb"))}


def execute(
    notebook: nbformat.NotebookNode, timeout: float = TIMEOUT_SECONDS, environment: dict[str, str] | None = None
) -> None:
    """Execute a notebook's cells in place.

    Parameters
    ----------
    notebook
        Receives the outputs, even if a cell fails.
    timeout
        Seconds for all cells together.
    environment
        Additional environment variables of the kernel.

    Raises
    ------
    CellExecutionError, CellTimeoutError, DeadKernelError
        A cell raised, the time ran out, or the kernel died.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as sockets, tempfile.TemporaryDirectory() as empty:
        client = NotebookClient(
            notebook,
            kernel_manager_class=ThisInterpreter,
            shutdown_kernel="immediate",
            timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
            resources={"metadata": {"path": empty}},  # notebooks must work without the repository's files
        )
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{sockets}/kernel"
        client.execute(env={**os.environ, **QUIET, **(environment or {})})


def run(path: Path, timeout: float, threads: int | None = None) -> tuple[float, str | None]:
    """Execute one notebook, write it to ``TARGET``, and return its duration in seconds and its failure, if any.

    ``threads`` are those of PyTorch, None for its own choice.
    """
    notebook = nbformat.read(path, as_version=4)
    started = time.perf_counter()
    failure = None
    try:
        execute(notebook, timeout, {} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    except CellTimeoutError:
        failure = f"took more than {timeout:.0f} s"
    except (CellExecutionError, DeadKernelError) as error:
        failure = str(error).strip()
    TARGET.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, TARGET / path.name)
    return time.perf_counter() - started, failure


def main() -> int:
    """Execute the notebooks named on the command line, or all; return the exit code."""
    known = sources()
    parser = argparse.ArgumentParser(
        description="Execute notebooks and write them with their outputs to build/notebooks."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for each notebook")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks at a time, which share the processor's cores")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    if unknown := sorted(set(arguments.names) - set(known)):
        parser.error(f"unknown notebook {', '.join(unknown)}; known: {', '.join(known)}")
    console = Console(highlight=False)
    names, failed = arguments.names or [*LONGEST, *(name for name in known if name not in LONGEST)], []
    threads = None if arguments.jobs == 1 else max(1, (os.cpu_count() or 1) // arguments.jobs)
    with ProcessPoolExecutor(arguments.jobs) as pool, console.status("notebooks ..."):
        outcomes = pool.map(run, [known[name] for name in names], repeat(arguments.timeout), repeat(threads))
        for name, (seconds, failure) in zip(names, outcomes, strict=True):
            console.print(f"{name:20} {seconds:6.1f} s  {'failed' if failure else 'ok'}")
            if failure:
                failed.append(name)
                console.print(Text.from_ansi(failure), soft_wrap=True)
    console.print(f"{len(failed)} failed; outputs are in {TARGET}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
