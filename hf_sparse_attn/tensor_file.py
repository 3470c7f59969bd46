"""Files of tensors: safetensors that are written whole or not at all, with a checksum for every tensor."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_sparse_attn._version import __version__

CHECKSUM_BYTES = 1 << 26


class TensorFile(NamedTuple):
    """An open file of tensors."""

    path: Path
    header: dict[str, str]
    """The texts that it was written with."""
    version: str
    """Version of the library that wrote it."""
    checksums: dict[str, int]
    """CRC-32 of every tensor, in the order in which they were written."""
    file: Any
    """The file as the ``safetensors`` package opens it."""

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor onto the CPU.

        Raises
        ------
        ValueError
            Its checksum is wrong.
        """
        tensor: torch.Tensor = self.file.get_tensor(name)
        if _checksum(tensor) != self.checksums[name]:
            raise ValueError(f"{self.path} is damaged: the checksum of {name} is wrong")
        return tensor

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape without reading it."""
        shape: list[int] = self.file.get_slice(name).get_shape()
        return shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without reading it."""
        dtype: torch.dtype = self.file.get_slice(name)[:0].dtype
        return dtype


def write_tensors(path: Path, kind: str, header: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors of any device to a file, which replaces another one once it is whole.

    Parameters
    ----------
    path
        The file; its folder exists.
    kind
        What the file holds and the version of its format, such as ``"hf_sparse_attn fixed context 1"``.
    header
        Texts to keep with the tensors.
    tensors
        The tensors, by name.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in on_host.items()}
    metadata = {**header, "format": kind, "version": __version__, "checksums": json.dumps(checksums)}
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        save_file(on_host, temporary, metadata=metadata)
        _flush(temporary)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextmanager
def open_tensors(path: Path, kind: str, what: str) -> Iterator[TensorFile]:
    """Open a file of :func:`write_tensors`, and check that its header is whole and describes its tensors.

    Parameters
    ----------
    path
        The file.
    kind
        As for :func:`write_tensors`.
    what
        What the file should be, for messages, such as ``"a fixed context"``.

    Raises
    ------
    ValueError
        The file is damaged, cut off or of another kind.
    OSError
        The file cannot be read.
    """
    with path.open("rb"):
        pass  # raises OSError with the file's name
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error
    with file:
        header = file.metadata() or {}
        found = header.pop("format", None)
        if found != kind:
            raise ValueError(f"{path} is not {what} of this version: its format is {found!r}, not {kind!r}")
        with damage_named(path):
            version, checksums = header.pop("version"), json.loads(header.pop("checksums"))
            differing = set(checksums) ^ set(file.keys())
        if differing:
            raise ValueError(f"{path} is damaged: its tensors and its header differ in {', '.join(sorted(differing))}")
        yield TensorFile(path, header, version, checksums, file)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn missing or mistyped content of a header into a ``ValueError`` that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} has a damaged header: {error}") from error


def _checksum(tensor: torch.Tensor) -> int:
    content: bytes | Any = b"" if not tensor.numel() else tensor.contiguous().flatten().view(torch.uint8).numpy()
    checksum = 0
    for begin in range(0, len(content), CHECKSUM_BYTES):
        checksum = zlib.crc32(content[begin : begin + CHECKSUM_BYTES], checksum)
    return checksum


def _flush(name: str) -> None:
    """Wait until a file is on the disk, which may turn out to be full only now."""
    with open(name, "rb") as file:
        os.fsync(file.fileno())
