"""CUDA C++ sources compiled by NVRTC, which torch brings along, when they first run; kept in a folder on disk."""

import ctypes
import hashlib
import logging
import os
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent
NOT_KEPT = "compiled kernels are not kept on disk: %s"
logger = logging.getLogger(__name__)


class CudaError(RuntimeError):
    """NVRTC or the driver is missing, or refused a call."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels: in $XDG_CACHE_HOME, or in ~/.cache.

    Raises
    ------
    RuntimeError
        The variable is not set, and the user has no home folder.
    """
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "hf_sparse_attn_kernels"


@lru_cache
def compiled(sources: tuple[str, ...], capability: tuple[int, int], macros: tuple[tuple[str, int], ...]) -> bytes:
    """Compile sources of the package for a device.

    Parameters
    ----------
    sources : tuple of str
        Files, relative to the package, compiled one after another as one.
    capability : tuple of int
        The device's compute capability.
    macros : tuple of (str, int)
        Names to define, and their values.

    Returns
    -------
    bytes
        A cubin, from the folder on disk if it is there.

    Raises
    ------
    CudaError
        NVRTC is missing, or the sources do not compile.
    """
    library = _nvrtc()
    text = "\n".join((PACKAGE / source).read_text(encoding="utf-8") for source in sources)
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", "--generate-line-info"]
    options += [f"-D{name}={value}" for name, value in macros]
    version = (ctypes.c_int(), ctypes.c_int())
    _check(library, library.nvrtcVersion(*map(ctypes.byref, version)), "nvrtcVersion")
    described = "\0".join((text, *options, *(str(part.value) for part in version)))
    try:
        file = cache_folder() / f"{hashlib.sha256(described.encode()).hexdigest()}.cubin"
    except RuntimeError as error:
        logger.debug(NOT_KEPT, error)
        return _compile(library, text, options)
    try:
        return file.read_bytes()
    except OSError:
        image = _compile(library, text, options)
    _store(file, image)
    return image


def _store(file: Path, image: bytes) -> None:
    """Write a file whole or not at all; a folder that cannot be written is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(descriptor, "wb") as partial:
                partial.write(image)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        logger.debug(NOT_KEPT, error)


@lru_cache
def _nvrtc() -> Any:
    """Load NVRTC: of torch's own CUDA packages, or the system's."""
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for path in (*(str(path) for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{name}"))), name):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError(f"{name} is not found; it comes with torch's CUDA packages")


def _compile(library: Any, text: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    source = text.encode()
    created = library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None)
    _check(library, created, "nvrtcCreateProgram")
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = library.nvrtcCompileProgram(program, len(options), arguments)
        if code:
            log = _output(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CudaError(f"nvrtcCompileProgram failed with code {code}: {log}")
        return _output(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    """Return a result of a program, such as its "CUBIN"."""
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.raw


def _check(library: Any, code: int, call: str) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaError(f"{call} failed: {library.nvrtcGetErrorString(code).decode()}")
