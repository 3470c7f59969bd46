"""Kernels in CUDA C++, compiled for the CPU."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

from hf_sparse_attn_kernels._nvrtc import PACKAGE

HEADER = Path(__file__).with_name("device.h")
OPTIONS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w")


def compile_for_cpu(
    sources: tuple[str, ...], macros: tuple[tuple[str, int], ...], name: str, folder: Path
) -> Callable[[tuple[int, int], int, int, bytes], None]:
    """Compile a kernel of a few device functions, and return it with the call of a `ClusterKernel`."""
    texts = [HEADER.read_text(), *((PACKAGE / source).read_text() for source in sources if source != "_cluster.cuh")]
    texts.append(f"""
extern "C" void run(const char* bytes, int blocks_x, int blocks_y) {{
  Arguments arguments;
  memcpy(&arguments, bytes, sizeof(arguments));
  run_grid({name}, arguments, blocks_x, blocks_y);
}}""")
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text("\n".join(texts))
    defined = [f"-D{macro}={value}" for macro, value in macros]
    subprocess.run(["c++", *OPTIONS, *defined, "-o", str(library), str(source)], check=True)
    run = ctypes.CDLL(str(library)).run

    def launch(blocks: tuple[int, int], shared: int, stream: int, arguments: bytes) -> None:
        run(ctypes.c_char_p(arguments), *blocks)

    return launch
