"""Files of fixed contexts: safetensors, with a header that says what belongs to them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from hf_sparse_attn_kernels.runs import MAX_RUN

from hf_sparse_attn._version import __version__
from hf_sparse_attn.cache.prefix import Prefix, hash_token_ids
from hf_sparse_attn.cache.saved import dtypes_of_values
from hf_sparse_attn.checks import one_text, whole_number, whole_numbers
from hf_sparse_attn.clusters.index import ALWAYS
from hf_sparse_attn.context.times import PreparationSeconds
from hf_sparse_attn.heads import HeadsOfLayers, heads_of_layers
from hf_sparse_attn.identity import ModelIdentity
from hf_sparse_attn.methods import Squeezed
from hf_sparse_attn.patch.tensor_parallel import head_shard_of
from hf_sparse_attn.patched import base_model, check_model_type, layer_devices
from hf_sparse_attn.tensor_file import Form, TensorFile, damage_named, json_entries, one_of, open_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.context.fixed import FixedContext

FORMAT = "hf_sparse_attn fixed context 1"
INT32_MAX = torch.iinfo(torch.int32).max
KEY_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
            method = Squeezed(**json.loads(texts["method"]))
            seconds = PreparationSeconds(*json.loads(texts["seconds"]))
            if not all(type(each) in (int, float) and 0 <= each <= sys.float_info.max for each in seconds):
                raise ValueError(f"seconds must be finite numbers of at least 0, got {texts['seconds']}")
            num_tokens = whole_number("num_tokens", int(texts["num_tokens"]), method.sink_tokens + method.window + 1)
            if num_tokens > INT32_MAX:
                raise ValueError(f"num_tokens must be at most {INT32_MAX}, got {num_tokens}")
            return cls(
                file.version,
                method,
                ModelIdentity(**json_entries("identity", texts["identity"], str)),
                texts["token_ids_hash"],
                seconds,
                whole_number("num_layers", int(texts["num_layers"]), 1),
                num_tokens,
                json_entries("notes", texts["notes"], str),
            )

    def forms(self, form_of: Callable[[str], Form]) -> Iterator[tuple[str, Form]]:
        """Return the names, shapes and dtypes that the tensors of the context must have.

        ``form_of`` returns the form that a tensor has. It decides what the header leaves open: heads, their width, the
        number of runs, and the dtypes of keys and queries.
        """
        clustered = self.num_tokens - self.method.sink_tokens - self.method.window
        clusters, coarse = self.method.num_clusters(clustered), self.method.num_coarse(clustered)
        first = form_of("layers.0.keys")
        kv_heads, head_dim = (max(1, first.shape[axis]) if len(first.shape) == 4 else 1 for axis in (1, 3))
        dtype = one_of(KEY_DTYPES, first.dtype)
        heads = (1, kv_heads)
        for number in range(self.num_layers):
            queries, runs = (form_of(f"layers.{number}.{name}") for name in ("queries", "run_clusters"))
            q_heads = max(1, (*queries.shape, 1)[0] // kv_heads) * kv_heads
            num_runs = min(max((1, *runs.shape[-1:])), clusters + self.num_tokens // MAX_RUN + 2)
            states = {
                "keys": (*heads, self.num_tokens, head_dim),
                "values": (*heads, self.num_tokens, head_dim),
                "centroids": (*heads, clusters, head_dim),
            }
            whole: dict[str, tuple[int, ...]] = {
                "token_order": (*heads, self.num_tokens),
                "cluster_sizes": (*heads, clusters),
                "run_starts": (*heads, num_runs + 1),
                "run_clusters": (*heads, num_runs),
                "context_start": (1,),
                "context_lengths": (1,),
            }
            thresholds = ["threshold"]
            if self.method.levels == 2:
                states["coarse_centroids"] = (*heads, coarse, head_dim)
                whole |= {"parents": (*heads, clusters), "coarse_sizes": (*heads, coarse)}
                thresholds.append("coarse_threshold")
            forms = {
                **{name: Form(shape, dtype) for name, shape in states.items()},
                **{name: Form(shape, torch.int32) for name, shape in whole.items()},
                **{name: Form((1,), torch.float32) for name in thresholds},
                "queries": Form((q_heads, self.method.window, head_dim), one_of(KEY_DTYPES, queries.dtype)),
                "index_bytes": Form((1,), torch.int64),
            }
            yield from ((f"layers.{number}.{name}", form) for name, form in forms.items())


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
    """Write a context; see :meth:`FixedContext.save`. Raise ``TypeError`` if a note is no text."""
    for name, note in context.notes.items():
        if not isinstance(name, str) or not isinstance(note, str):
            raise TypeError(f"notes must be texts by name, got {name!r}: {note!r}")
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
        _check_belongs(file, header, base_model(model))
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


def _check_belongs(file: TensorFile, header: Header, model: PreTrainedModel) -> None:
    """Raise ``ValueError`` unless a checked file has layers, heads and a dtype that the model gives it."""
    q_heads = tuple(file.shape(f"layers.{number}.queries")[0] for number in range(header.num_layers))
    _, kv_heads, _, head_dim = file.shape("layers.0.keys")
    found, expected = HeadsOfLayers(q_heads, kv_heads, head_dim), heads_of_layers(model.config)
    if found != expected:
        raise ValueError(f"{file.path} is damaged: it has {found}; the model has {expected}")
    dtype, dtypes = file.dtype("layers.0.keys"), dtypes_of_values(model)
    if dtype not in dtypes:
        raise ValueError(f"{file.path} is damaged: its keys are in {dtype}, and the model's in {dtypes[0]}")


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
        header = Header.of(file)
        file.check(header.forms(file.form))
        yield file, header


def read_layer(file: TensorFile, number: int, without: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Read the tensors of a layer, but those ``without``, and check them.

    Raises
    ------
    ValueError
        A checksum is wrong, or an index leads outside the context.
    """
    tensors = {}
    for full_name in file.checksums:
        name = full_name.rpartition(".")[2]
        if full_name == f"layers.{number}.{name}" and name not in without:
            tensors[name] = file.read(full_name)
    with damage_named(file.path, f"index of layer {number}"):
        _check_index(tensors, file.shape(f"layers.{number}.keys")[2])
    return tensors


def _check_index(index: Mapping[str, torch.Tensor], tokens: int) -> None:
    """Check that a layer's index, or a part of it, does not lead outside its context: kernels read where it leads."""
    limits = {"cluster_sizes": (0, tokens), "coarse_sizes": (0, tokens), "run_starts": (0, tokens)}
    limits |= {"context_start": (0, 0), "context_lengths": (tokens, tokens)}
    limits["run_clusters"] = (ALWAYS, index["cluster_sizes"].shape[-1] - 1)
    if "coarse_sizes" in index:
        limits["parents"] = (0, index["coarse_sizes"].shape[-1] - 1)
    for name, (least, most) in limits.items():
        if name in index:
            low, high = (int(bound) for bound in index[name].aminmax())
            if low < least or high > most:
                raise ValueError(f"{name} must be between {least} and {most}, got {low if low < least else high}")
    starts, lengths = index["run_starts"], index["run_starts"].diff()
    low, high = (int(bound) for bound in lengths.aminmax())
    if low < 0 or high > MAX_RUN or bool((starts[..., 0] != 0).any()) or bool((starts[..., -1] != tokens).any()):
        raise ValueError(f"run_starts must ascend from 0 to {tokens} in steps of at most {MAX_RUN}")
    if "token_order" in index:
        every = torch.arange(tokens, dtype=torch.int32).expand_as(index["token_order"])
        if not torch.equal(index["token_order"].sort().values, every):
            raise ValueError(f"token_order must name each of the tokens 0 to {tokens - 1} once")


def _named_tensors(context: FixedContext) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (layer, queries) in enumerate(zip(context.layers, context.queries, strict=True)):
        parts = {"keys": layer.keys, "values": layer.values, "queries": queries, **layer.metadata}
        for name, tensor in parts.items():
            yield f"layers.{number}.{name}", tensor
