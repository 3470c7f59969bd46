"""Files of fixed contexts: safetensors, with a header that says what belongs to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hf_sparse_attn._version import __version__
from hf_sparse_attn.cache.prefix import Prefix, hash_token_ids
from hf_sparse_attn.checks import one_text, whole_numbers
from hf_sparse_attn.context.times import PreparationSeconds
from hf_sparse_attn.identity import ModelIdentity
from hf_sparse_attn.methods import Squeezed
from hf_sparse_attn.patch.tensor_parallel import head_shard_of
from hf_sparse_attn.patched import base_model, check_model_type, layer_devices
from hf_sparse_attn.tensor_file import TensorFile, damage_named, open_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.context.fixed import FixedContext

FORMAT = "hf_sparse_attn fixed context 1"


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

    def to_texts(self) -> dict[str, str]:
        """Return the header as texts, but for the version, which every file of tensors has."""
        return {
            "method": json.dumps(asdict(self.method)),
            "identity": json.dumps(self.identity._asdict()),
            "token_ids_hash": self.token_ids_hash,
            "seconds": json.dumps(self.seconds),
            "num_layers": str(self.num_layers),
            "num_tokens": str(self.num_tokens),
            "notes": json.dumps(self.notes),
        }

    @classmethod
    def of(cls, file: TensorFile) -> Header:
        """Read the header of an open file.

        Raises
        ------
        ValueError
            The header is damaged.
        """
        texts = file.header
        with damage_named(file.path):
            return cls(
                file.version,
                Squeezed(**json.loads(texts["method"])),
                ModelIdentity(**json.loads(texts["identity"])),
                texts["token_ids_hash"],
                PreparationSeconds(*json.loads(texts["seconds"])),
                int(texts["num_layers"]),
                int(texts["num_tokens"]),
                json.loads(texts["notes"]),
            )


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
    header = Header(
        __version__,
        context.method,
        context.identity,
        context.token_ids_hash,
        context.seconds,
        len(context.layers),
        context.num_tokens,
        dict(context.notes),
    )
    write_tensors(path, FORMAT, header.to_texts(), dict(_named_tensors(context)))


def read(cls: type[FixedContext], path: Path, model: PreTrainedModel, input_ids: torch.Tensor | None) -> FixedContext:
    """Read a context; see :meth:`FixedContext.load`."""
    check_model_type(model)
    head_shard_of(base_model(model)).require_whole("FixedContext.load")
    ids = None if input_ids is None else one_text(whole_numbers("input_ids", input_ids))
    with opened(path) as (file, header):
        header.identity.check(ModelIdentity.of(model), f"{path} was prepared")
        if ids is not None and hash_token_ids(ids) != header.token_ids_hash:
            raise ValueError(f"{path} holds the context of other token ids than the given input_ids")
        devices = layer_devices(model)
        layers, queries = [], []
        for number in range(header.num_layers):
            tensors = read_layer(file, number)
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
def opened(path: Path) -> Iterator[tuple[TensorFile, Header]]:
    """Open a file and read its header.

    Raises
    ------
    ValueError
        The file is damaged, cut off or no context.
    OSError
        The file cannot be read.
    """
    with open_tensors(path, FORMAT, "a fixed context") as file:
        yield file, Header.of(file)


def read_layer(file: TensorFile, number: int, without: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Read the tensors of a layer, but those ``without``, and check their checksums."""
    tensors = {}
    for full_name in file.checksums:
        name = full_name.rpartition(".")[2]
        if full_name == f"layers.{number}.{name}" and name not in without:
            tensors[name] = file.read(full_name)
    return tensors


def _named_tensors(context: FixedContext) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (layer, queries) in enumerate(zip(context.layers, context.queries, strict=True)):
        parts = {"keys": layer.keys, "values": layer.values, "queries": queries, **layer.metadata}
        for name, tensor in parts.items():
            yield f"layers.{number}.{name}", tensor
