"""The contents of a cache, as named tensors and a header: taken out of one cache, and put into another."""

from __future__ import annotations

import copy
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.padding import Padding
from hf_sparse_attn.cache.queries import PromptQueries
from hf_sparse_attn.checks import boolean, whole_number
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.tensor_file import Form, one_of

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

    def check(self, layers: int) -> None:
        """Check types and ranges, for a model of so many layers.

        Raises
        ------
        TypeError, ValueError
            A value has another type, or is out of range. The message names it.
        """
        whole_number("rows", self.rows, 1)
        tokens = whole_number("tokens", self.tokens, 1)
        _check_length("starts", self.starts, self.rows)
        for start in self.starts:  # a row may begin after tokens that a crop has left
            _check_between("starts", start, 0, torch.iinfo(torch.int32).max)
        boolean("prompt_is_open", self.prompt_is_open)
        _check_between("finished_at", self.finished_at, 0, tokens)
        if self.closed_from is not None:
            _check_between("closed_from", self.closed_from, 0, tokens)
        _check_length("left_out", self.left_out, None)
        for former, place in pairwise([-1, *self.left_out]):
            _check_between("left_out", place, former + 1, tokens + len(self.left_out) - 1)
        _check_length("queries", self.queries, layers)
        for numbers in self.queries:
            if numbers is not None:
                _check_between("queries: end", numbers.end, 0, tokens)
                if type(numbers.scale) not in (int, float) or not abs(numbers.scale) <= torch.finfo(torch.float32).max:
                    raise ValueError(f"queries: scale must be a finite number, got {numbers.scale!r}")
        _check_length("window_tokens", self.window_tokens, layers)
        for seen in self.window_tokens:
            if seen is not None:
                _check_between("window_tokens", seen, tokens, tokens)

    def check_layers(self, cache: SparseCache) -> None:
        """Check that a cache's layers with sliding windows are those of the header; raise ``ValueError`` if not."""
        for number, layer in enumerate(cache.layers):
            is_window = not isinstance(layer, SparseLayer)
            if is_window != (self.window_tokens[number] is not None):
                raise ValueError(
                    f"window_tokens must be {'a number' if is_window else None} for layer {number}, got "
                    f"{self.window_tokens[number]!r}"
                )
            if is_window and self.queries[number] is not None:
                raise ValueError(f"queries must be None for layer {number}, which has a sliding window")

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
            f"the cache of {cache.method.name!r} cannot be saved, since it does not hold every token; "
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


def forms_of(
    cache: SparseCache, header: Header, form_of: Callable[[str], Form], dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[str, Form]]:
    """Return the names, shapes and dtypes that the tensors of a cache must have, as :func:`tensors_of` names them.

    Parameters
    ----------
    cache
        An empty cache, for the model and its method.
    header
        The header, checked.
    form_of
        Returns the form that a tensor has. It decides what the header leaves open: which of the allowed dtypes keys,
        values and queries have, how many tokens sliding windows still hold, and how many queries are kept.
    dtypes
        Those that the model's values may have, the model's own first.
    """
    # Queries, and keys beside them in a sliding window, are wider under autocast, which leaves RoPE in float32.
    after_rope = (*dtypes, *(torch.promote_types(dtype, torch.float32) for dtype in dtypes))
    kv_heads, head_dim, tokens = cache.heads.kv_heads, cache.heads.head_dim, header.tokens
    dtype = one_of(dtypes, form_of(f"layers.{cache.sparse_layers[0].layer_idx}.keys").dtype)
    for number, (layer, queries) in enumerate(zip(cache.layers, header.queries, strict=True)):
        begin = f"layers.{number}."
        if not isinstance(layer, SparseLayer):
            held = _within(form_of(f"{begin}keys"), min(tokens, layer.sliding_window - 1), tokens)
            for name in ("keys", "values"):
                form = Form((header.rows, kv_heads, held, head_dim), one_of(after_rope, form_of(begin + name).dtype))
                yield begin + name, form
            continue
        form = Form((header.rows, kv_heads, tokens, head_dim), dtype)
        yield f"{begin}keys", form
        yield f"{begin}values", form
        for name, tensor in _empty_metadata(layer, form).items():
            yield f"{begin}metadata.{name}", Form(tuple(tensor.shape), tensor.dtype)
        if queries is not None:
            states, total = form_of(f"{begin}queries.states"), form_of(f"{begin}queries.total")
            kept, rows = _within(states, 0, queries.end), (header.rows,)
            sums = [torch.promote_types(each, torch.float32) for each in after_rope]
            yield (
                f"{begin}queries.states",
                Form((*rows, layer.q_heads, kept, head_dim), one_of(after_rope, states.dtype)),
            )
            yield f"{begin}queries.counts", Form(rows, torch.int32)
            yield f"{begin}queries.total", Form((*rows, layer.q_heads, head_dim), one_of(sums, total.dtype))
            yield f"{begin}queries.number", Form(rows, torch.int32)


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


def _empty_metadata(layer: SparseLayer, keys: Form) -> dict[str, torch.Tensor]:
    """Return the metadata of a layer that would have such keys, without contents."""
    twin = copy.copy(layer)
    twin.storage = copy.copy(layer.storage)
    twin.storage.keys = torch.empty(keys.shape, dtype=keys.dtype, device="meta")
    return twin.method.init_metadata(twin)


def _within(found: Form, least: int, most: int) -> int:
    """Return how many tokens a tensor [batch, heads, tokens, head_dim] has, or the nearest number that is allowed."""
    return min(max(found.shape[2], least), most) if len(found.shape) == 4 else most


def _check_length(name: str, values: object, length: int | None) -> None:
    """Check that a value is a list, of a length if one is given."""
    if not isinstance(values, list) or length not in (None, len(values)):
        of_length = "" if length is None else f" of {length} entries"
        raise ValueError(f"{name} must be a list{of_length}, got {reprlib.repr(values)}")


def _check_between(name: str, value: object, least: int, most: int) -> None:
    if whole_number(name, value, least) > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r}")
