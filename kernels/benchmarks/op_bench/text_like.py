"""Keys whose attention is spread as in a text, where those of other workloads are drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from op_bench.entry import Family
from op_bench.shapes import Settings, Shape

SUFFIX = ", text"
"""Of the variants of entries whose layers have such keys."""
PAGE = 64
"""Tokens that have a part of their logits in common."""
SPREAD, SPREAD_OF_PAGE = 1.5, 1.5
"""Standard deviations of the logits, of tokens and of pages."""
FIRST = 14.0
"""By which the logit of the first token exceeds the mean, on average over the heads."""
RECENT, RECENT_TOKENS = 8.0, 256.0
"""By which those of the last tokens do, and the distance in which that falls to 1 / e."""
PASSAGE, PASSAGE_TOKENS, PASSAGE_PLACE = 6.0, 256, 0.6
"""By which those of a passage do, its length, and its place in the row."""
CHUNK = 1 << 16
OWN_SEEDS = 1 << 20
"""Added to a seed: from the same one, logits would be of the random numbers that a layer's keys are made of."""


def make_text_like(query: torch.Tensor, keys: torch.Tensor, seed: int = 0) -> None:
    """Change keys so that the logits of attention are like those in a text.

    The first token has much weight, as the sinks of models have, and so do the last ones and those of a passage; tokens
    of a page are alike. How much each counts differs between heads. A key changes in the span of its group's queries.

    Parameters
    ----------
    query : tensor
        [batch, q_heads, head_dim].
    keys : tensor
        [batch, kv_heads, length, head_dim], changed.
    seed : int, default 0
        Of the random numbers.
    """
    batch, kv_heads, length, head_dim = keys.shape
    group, device = query.shape[1] // kv_heads, keys.device
    generator = torch.Generator(device).manual_seed(OWN_SEEDS + seed)
    for row in range(batch):
        for head in range(kv_heads):
            queries = query[row, head * group : (head + 1) * group].float() * head_dim**-0.5
            to_keys = torch.linalg.pinv(queries)  # [head_dim, group]
            strength = 0.5 + torch.rand(3, group, device=device, generator=generator)
            of_pages = SPREAD_OF_PAGE * torch.randn(length // PAGE + 1, group, device=device, generator=generator)
            for first in range(0, length, CHUNK):
                of_chunk = keys[row, head, first : first + CHUNK]
                tokens = torch.arange(first, first + len(of_chunk), device=device)
                logits = of_pages[tokens // PAGE]
                logits += SPREAD * torch.randn(len(tokens), group, device=device, generator=generator)
                in_passage = (tokens - PASSAGE_PLACE * length).abs() < PASSAGE_TOKENS / 2
                logits += FIRST * strength[0] * (tokens == 0)[:, None]
                logits += RECENT * strength[1] * torch.exp((tokens - length) / RECENT_TOKENS)[:, None]
                logits += PASSAGE * strength[2] * in_passage[:, None]
                wanted = logits - of_chunk.float() @ queries.T
                of_chunk.copy_(of_chunk.float() + wanted @ to_keys.T)


def on_text(family: Family, shapes: tuple[Shape, ...], summarize: Callable[[Any, str | None], None]) -> Family:
    """Return a family whose layers have keys as in a text, with its entries but without their details.

    Parameters
    ----------
    family : Family
        Its layers are of type `Layer`.
    shapes : tuple of Shape
        Where it is measured.
    summarize : callable
        Computes a layer's metadata from its keys, given the layer and `impl`.
    """

    def make_layer(
        shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
    ) -> Any:
        layer = family.make_layer(shape, settings, device, seed, impl)
        make_text_like(layer.query, layer.keys, seed)
        layer.new_key.copy_(layer.keys[:, :, -1])
        summarize(layer, impl)
        return layer

    entries = (replace(entry, variant=entry.variant + SUFFIX, details=lambda layers: {}) for entry in family.entries)
    return replace(
        family,
        name=f"{family.name}, keys as in a text",
        shapes=shapes,
        entries=tuple(entries),
        make_layer=make_layer,
        more_tuned=(),
    )
