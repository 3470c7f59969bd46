"""The contents of a cache, as named tensors and a header: taken out of one cache, and put into another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.padding import Padding
from hf_sparse_attn.cache.queries import PromptQueries
from hf_sparse_attn.methods import SparseMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.cache import SparseCache

QUERY_TENSORS = ("states", "counts", "total", "number")

Read = Callable[[str], torch.Tensor]
"""Returns a tensor of the contents by its name, on any device."""


class QueryNumbers(NamedTuple):
    """The numbers of a layer's :class:`PromptQueries`."""

    scale: float
    end: int


class Header(NamedTuple):
    """A cache's state, but for its tensors; all of it are JSON values."""

    method: str
    """The method with its parameters, as :func:`method_text` writes it."""
    rows: int
    """Rows of the batch."""
    tokens: int
    """Tokens of a row, left padding included."""
    starts: list[int]
    """Position of each row's first token."""
    prompt_is_open: bool
    finished_at: int
    closed_from: int | None
    left_out: list[int]
    queries: list[QueryNumbers | None]
    """Those of each layer that keeps queries."""
    window_tokens: list[int | None]
    """Tokens that each sliding-window layer has seen; None for the others."""

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Read what :meth:`to_json` wrote; errors are those of mistyped values."""
        values = json.loads(text)
        values["queries"] = [None if each is None else QueryNumbers(*each) for each in values["queries"]]
        return cls(**values)

    def to_json(self) -> str:
        """Return the header as text."""
        return json.dumps(self._asdict())


def method_text(method: SparseMethod) -> str:
    """Return a method's name and parameters, in their order."""
    parameters = {field.name: getattr(method, field.name) for field in fields(method)}
    return f"{method.name} {json.dumps(parameters, default=repr)}"


def check_complete(cache: SparseCache) -> None:
    """Check that a cache's tokens can be taken out of it.

    Raises
    ------
    ValueError
        It is empty, begins with a fixed context, which has a file of its own, or its method evicts tokens.
    """
    if cache.method.evicts:
        raise ValueError(
            f"the cache of {cache.method.name!r} can neither be saved nor parked, since it does not hold every token; "
            "allowed: caches of methods that evict none"
        )
    if cache.prefix_tokens:
        raise ValueError(
            f"the cache begins with a fixed context of {cache.prefix_tokens} tokens: save the context itself "
            "(FixedContext.save), and create caches from it"
        )
    if not cache.length:
        raise ValueError("the cache is empty: fill it first")


def header_of(cache: SparseCache) -> Header:
    """Return the header of a complete cache between two passes."""
    first = cache.sparse_layers[0]
    queries = (layer.prompt_queries if isinstance(layer, SparseLayer) else None for layer in cache.layers)
    return Header(
        method_text(cache.method),
        len(first.keys),
        cache.length,
        list(first.lengths.starts),
        cache.shared.prompt_is_open,
        cache.finished_at,
        cache.closed_from,
        list(cache.left_out),
        [None if each is None else QueryNumbers(each.scale, each.end) for each in queries],
        [None if isinstance(layer, SparseLayer) else layer.cumulative_length for layer in cache.layers],
    )


def tensors_of(cache: SparseCache) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors of a complete cache with their names, on their devices, layer by layer.

    Metadata has the shape that it would have in buffers without room for more tokens.
    """
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, SparseLayer):
            yield f"layers.{number}.keys", layer.keys
            yield f"layers.{number}.values", layer.values
            continue
        layer.storage.stage(layer.lengths)
        yield f"layers.{number}.keys", layer.keys[:, :, : layer.held]
        yield f"layers.{number}.values", layer.values[:, :, : layer.held]
        for name, shape in layer.metadata_shapes(layer.held).items():
            yield f"layers.{number}.metadata.{name}", layer.metadata[name][tuple(slice(size) for size in shape)]
        if layer.prompt_queries is not None:
            for name in QUERY_TENSORS:
                yield f"layers.{number}.queries.{name}", getattr(layer.prompt_queries, name)


def fill(cache: SparseCache, header: Header, names: Mapping[str, Any], read: Read, devices: list[torch.device]) -> None:
    """Put contents into an empty cache.

    Parameters
    ----------
    cache
        The cache, for a model of the same configuration and for the same method.
    header
        The header.
    names
        The names of the tensors.
    read
        Reads one of them.
    devices
        Device of each layer.
    """
    padding = torch.tensor(header.starts, dtype=torch.int32, device=devices[0])
    cache.shared.padding = Padding(padding, min(header.starts), max(header.starts) > 0)
    for number, (layer, device) in enumerate(zip(cache.layers, devices, strict=True)):

        def on_device(name: str, number: int = number, device: torch.device = device) -> torch.Tensor:
            return read(f"layers.{number}.{name}").to(device)

        cache.append_tokens(on_device("keys"), on_device("values"), number)
        if not isinstance(layer, SparseLayer):
            layer.cumulative_length = header.window_tokens[number]
            continue
        begin = f"layers.{number}.metadata."
        for name in (name.removeprefix(begin) for name in names if name.startswith(begin)):
            part = on_device(f"metadata.{name}")
            layer.metadata[name][tuple(slice(size) for size in part.shape)] = part
        numbers = header.queries[number]
        if numbers is not None:
            states, counts, total, number_seen = (on_device(f"queries.{name}") for name in QUERY_TENSORS)
            layer.prompt_queries = PromptQueries(states, counts, total, number_seen, *numbers)
    cache.shared.padding = None
    cache.shared.prompt_is_open, cache.finished_at = header.prompt_is_open, header.finished_at
    cache.closed_from, cache.left_out = header.closed_from, list(header.left_out)
    if header.prompt_is_open:
        cache.reopen_prompt()  # which finishes it in static buffers
