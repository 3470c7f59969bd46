"""Inputs of a decode step's ops: coded rows with room for more tokens, and the tokens."""

from typing import Any

import torch

from tests.ops.codes.inputs import Coded, make_coded
from tests.ops.helpers import POISON, device


def add_room(coded: Coded, extra: int = 40) -> None:
    """Copy rows and metadata into buffers with room for more tokens, with NaN or poison in what no token has."""
    rows, size = coded.rows, coded.page_size
    capacity = rows.capacity + extra

    def enlarged(tensor: torch.Tensor, length: int) -> torch.Tensor:
        poison = float("nan") if tensor.is_floating_point() else POISON
        larger = tensor.new_full((*tensor.shape[:2], length, *tensor.shape[3:]), poison)
        larger[:, :, : tensor.shape[2]] = tensor
        return larger

    rows.keys, rows.values = (enlarged(buffer, capacity) for buffer in (rows.keys, rows.values))
    for name, tensor in coded.metadata.items():
        coded.metadata[name] = enlarged(tensor, -(-capacity // size) * (size if name in ("codes", "factors") else 1))


def new_tokens(coded: Coded, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw a query, a key and a value for every row."""
    batch, kv_heads, _, head_dim = coded.rows.keys.shape
    generator = torch.Generator().manual_seed(seed)
    heads = (coded.rows.query.shape[1], kv_heads, kv_heads)
    drawn = (torch.randn(batch, 2, n, head_dim, generator=generator)[:, 1] for n in heads)
    return tuple(tensor.to(device, coded.rows.keys.dtype) for tensor in drawn)


def prefilled(lengths: list[int], **options: Any) -> Coded:
    """Return coded rows with room for more tokens."""
    coded = make_coded(lengths, **options)
    coded.encode(impl="reference")
    add_room(coded)
    return coded


def step_arguments(coded: Coded, token: tuple[torch.Tensor, ...], lengths: list[int]) -> dict[str, Any]:
    """Return the arguments of a step that appends `token`, after which the rows have `lengths`."""
    rows = coded.rows
    buffers = {"keys": rows.keys, "values": rows.values, **coded.metadata, "coded": coded.coded}
    named = dict(zip(("query", "new_key", "new_value"), token, strict=True))
    options = {name: coded.options[name] for name in ("page_size", "bits", "query_centre")}
    return {**named, **buffers, **coded.ends(lengths), **options, "correction": coded.correction}
