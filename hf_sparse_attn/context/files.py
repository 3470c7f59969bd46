"""Files of fixed contexts: safetensors, with a header that says what belongs to them."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_sparse_attn._version import __version__
from hf_sparse_attn.cache.prefix import Prefix, hash_token_ids
from hf_sparse_attn.context.identity import ModelIdentity
from hf_sparse_attn.context.times import PreparationSeconds
from hf_sparse_attn.methods import Squeezed
from hf_sparse_attn.patched import base_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.context.fixed import FixedContext

FORMAT = "hf_sparse_attn fixed context 1"
CHECKSUM_BYTES = 1 << 26


class Header(NamedTuple):
    """The header of a context's file."""

    version: str
    """Version of the library that wrote it."""
    method: Squeezed
    identity: ModelIdentity
    token_ids_hash: str
    seconds: PreparationSeconds
    """How long the preparation took."""
    num_layers: int
    num_tokens: int
    notes: dict[str, str]
    """The notes of the context."""
    checksums: dict[str, int]
    """CRC-32 of every tensor."""

    def to_metadata(self) -> dict[str, str]:
        """Return the header as texts, as safetensors stores it."""
        return {
            "format": FORMAT,
            "version": self.version,
            "method": json.dumps(asdict(self.method)),
            "identity": json.dumps(self.identity._asdict()),
            "token_ids_hash": self.token_ids_hash,
            "seconds": json.dumps(self.seconds),
            "num_layers": str(self.num_layers),
            "num_tokens": str(self.num_tokens),
            "notes": json.dumps(self.notes),
            "checksums": json.dumps(self.checksums),
        }

    @classmethod
    def from_metadata(cls, metadata: dict[str, str] | None, path: Path) -> Header:
        """Read the header; raise ``ValueError`` if it is not one of this format."""
        found = (metadata or {}).get("format")
        if metadata is None or found != FORMAT:
            raise ValueError(f"{path} is not a fixed context of this version: its format is {found!r}, not {FORMAT!r}")
        try:
            return cls(
                metadata["version"],
                Squeezed(**json.loads(metadata["method"])),
                ModelIdentity(**json.loads(metadata["identity"])),
                metadata["token_ids_hash"],
                PreparationSeconds(*json.loads(metadata["seconds"])),
                int(metadata["num_layers"]),
                int(metadata["num_tokens"]),
                json.loads(metadata["notes"]),
                json.loads(metadata["checksums"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has a damaged header: {error}") from error


def read_header(path: Path) -> Header:
    """Read what a file holds, without its tensors.

    Raises
    ------
    ValueError
        The file is damaged, cut off or no context.
    OSError
        The file cannot be read.
    """
    with opened(path) as (_, header):
        return header


def write(context: FixedContext, path: Path) -> None:
    """Write a context; see :meth:`FixedContext.save`."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _named_tensors(context)}
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    header = Header(
        __version__,
        context.method,
        context.identity,
        context.token_ids_hash,
        context.seconds,
        len(context.layers),
        context.num_tokens,
        dict(context.notes),
        checksums,
    )
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=header.to_metadata())
        _flush(temporary)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read(cls: type[FixedContext], path: Path, model: PreTrainedModel, input_ids: torch.Tensor | None) -> FixedContext:
    """Read a context; see :meth:`FixedContext.load`."""
    with opened(path) as (file, header):
        _check_model(header, ModelIdentity.of(model), path)
        if input_ids is not None and hash_token_ids(input_ids) != header.token_ids_hash:
            raise ValueError(f"{path} holds the context of other token ids than the given input_ids")
        devices = _layer_devices(model)
        layers, queries = [], []
        for number in range(header.num_layers):
            tensors = read_layer(file, number, header, path)
            on_device = {name: tensor.to(devices[number]) for name, tensor in tensors.items()}
            queries.append(on_device.pop("queries"))
            layers.append(Prefix(on_device.pop("keys"), on_device.pop("values"), on_device))
    return cls(
        method=header.method,
        config=base_model(model).config,
        identity=header.identity,
        token_ids_hash=header.token_ids_hash,
        layers=layers,
        queries=queries,
        seconds=header.seconds,
        notes=header.notes,
    )


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Header]]:
    """Open a file, and check that its header is whole and describes its tensors.

    Raises
    ------
    ValueError
        The file is damaged, cut off or no context.
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
        header = Header.from_metadata(file.metadata(), path)
        differing = set(header.checksums) ^ set(file.keys())
        if differing:
            raise ValueError(f"{path} is damaged: its tensors and its header differ in {', '.join(sorted(differing))}")
        yield file, header


def read_layer(
    file: Any, number: int, header: Header, path: Path, without: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Read the tensors of a layer, but those ``without``, and check their checksums."""
    tensors = {}
    for full_name in header.checksums:
        name = full_name.rpartition(".")[2]
        if full_name != f"layers.{number}.{name}" or name in without:
            continue
        tensors[name] = file.get_tensor(full_name)
        if _checksum(tensors[name]) != header.checksums[full_name]:
            raise ValueError(f"{path} is damaged: the checksum of {full_name} is wrong")
    return tensors


def _named_tensors(context: FixedContext) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (layer, queries) in enumerate(zip(context.layers, context.queries, strict=True)):
        parts = {"keys": layer.keys, "values": layer.values, "queries": queries, **layer.metadata}
        for name, tensor in parts.items():
            yield f"layers.{number}.{name}", tensor


def _check_model(header: Header, identity: ModelIdentity, path: Path) -> None:
    for name in ("config_hash", "weights_hash"):
        if getattr(header.identity, name) != getattr(identity, name):
            what = "with another configuration" if name == "config_hash" else "with other weights"
            raise ValueError(
                f"{path} was prepared by a model {what}: by {header.identity.model_id!r}, not {identity.model_id!r}"
            )


def _layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Return the device of each layer's parameters."""
    decoder = base_model(model).get_decoder()
    return [next(layer.parameters()).device for layer in decoder.layers]


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
