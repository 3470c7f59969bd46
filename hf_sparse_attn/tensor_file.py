"""Files of tensors: safetensors that are written whole or not at all, with a checksum for every tensor."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_sparse_attn._version import __version__
from hf_sparse_attn.whole_file import replacing

CHECKSUM_BYTES = 1 << 26
T = TypeVar("T")


class Form(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Return both for messages."""
        return f"{list(self.shape)} in {str(self.dtype).removeprefix('torch.')}"


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
            There is none of this name, or its checksum is wrong.
        """
        with self._damage_named(name):
            tensor: torch.Tensor = self.file.get_tensor(name)
        if _checksum(tensor) != self.checksums[name]:
            raise ValueError(f"{self.path} is damaged: the checksum of {name} is wrong")
        return tensor

    def form(self, name: str) -> Form:
        """Return a tensor's shape and dtype without reading it; errors as of :meth:`read`."""
        with self._damage_named(name):
            part = self.file.get_slice(name)
            shape = tuple(part.get_shape())
            return Form(shape, (part[:0] if shape else self.file.get_tensor(name)).dtype)

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape without reading it."""
        return list(self.form(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without reading it."""
        return self.form(name).dtype

    def check(self, expected: Iterable[tuple[str, Form]]) -> None:
        """Check that the file has all tensors that its header stands for, and no others, without reading them.

        Raises
        ------
        ValueError
            A tensor is missing, has no place, or has another shape or dtype. Those after it are not asked for.
        """
        known = set()
        for name, form in expected:
            found = self.form(name)
            if found != form:
                raise ValueError(f"{self.path} is damaged: {name} must be {form}, got {found}")
            known.add(name)
        if needless := sorted(self.checksums.keys() - known):
            raise ValueError(f"{self.path} is damaged: {needless[0]} is no part of what its header describes")

    @contextmanager
    def _damage_named(self, name: str) -> Iterator[None]:
        if name not in self.checksums:
            raise ValueError(f"{self.path} is damaged: {name} is missing")
        try:
            yield
        except SafetensorError as error:
            raise ValueError(f"{self.path} is damaged: {name} cannot be read: {error}") from error


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
        The file cannot be written, or what has its name is no regular file.
    """
    if path.exists() and not path.is_file():  # safetensors would put a file in its place
        raise OSError(f"{path} could not be written: it is no regular file")
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in on_host.items()}
    metadata = {**header, "format": kind, "version": __version__, "checksums": json.dumps(checksums)}
    try:
        with replacing(path) as name:
            save_file(on_host, name, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


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
            version, checksums = header.pop("version"), json_entries("checksums", header.pop("checksums"), int)
            differing = checksums.keys() ^ set(file.keys())
        if differing:
            raise ValueError(f"{path} is damaged: its tensors and its header differ in {', '.join(sorted(differing))}")
        yield TensorFile(path, header, version, checksums, file)


def json_entries(name: str, text: str, kind: type[T]) -> dict[str, T]:
    """Read a JSON object whose values are all of one type.

    Raises
    ------
    TypeError
        It is something else; ``name`` stands for it in the message.
    ValueError
        The text is not JSON.
    """
    entries = json.loads(text)
    if not isinstance(entries, dict) or not all(type(value) is kind for value in entries.values()):
        raise TypeError(f"{name} must be a JSON object with values of type {kind.__name__}")
    return entries


def one_of(allowed: Sequence[torch.dtype], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor has if that is allowed, else the first one that is, which it should have."""
    return dtype if dtype in allowed else allowed[0]


@contextmanager
def damage_named(path: Path, part: str = "header") -> Iterator[None]:
    """Turn missing or mistyped content of a header, or of another part, into a ``ValueError`` that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged {part}: {error}") from error


def _checksum(tensor: torch.Tensor) -> int:
    content: bytes | Any = b"" if not tensor.numel() else tensor.contiguous().flatten().view(torch.uint8).numpy()
    checksum = 0
    for begin in range(0, len(content), CHECKSUM_BYTES):
        checksum = zlib.crc32(content[begin : begin + CHECKSUM_BYTES], checksum)
    return checksum
