"""One layer's buffers: random keys and values, their metadata, and the token that the step appends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import hf_sparse_attn_kernels as ops
import torch

from op_bench.shapes import Settings, Shape

DTYPE = torch.bfloat16
STATISTICS = {"int8": "minmax", "bf16": "minmax", "int8 cuboid mean": "cuboid_mean"}
"""Kinds of page bounds, 8-bit levels with exponents or in the keys' dtype, and the statistic that they hold."""
BOUNDS = tuple(STATISTICS)


@dataclass
class Bounds:
    """Page bounds, [batch, kv_heads, pages, head_dim], with the exponents of 8-bit ones."""

    page_min: torch.Tensor
    page_max: torch.Tensor
    page_exponent: torch.Tensor | None = None
    """int8 [batch, kv_heads, pages]."""
    channel_exponent: torch.Tensor | None = None
    """int8 [batch, kv_heads, head_dim]."""

    @classmethod
    def empty(cls, shape: Shape, settings: Settings, kind: str, device: torch.device) -> Bounds:
        """Allocate bounds of a kind in ``BOUNDS``."""
        heads = (shape.batch, shape.kv_heads)
        size = (*heads, settings.pages(shape), shape.head_dim)
        if kind == "bf16":
            lower, upper = (torch.empty(size, dtype=DTYPE, device=device) for _ in range(2))
            return cls(lower, upper)
        sizes = (size, size, size[:3], (*heads, shape.head_dim))
        return cls(*(torch.empty(each, dtype=torch.int8, device=device) for each in sizes))

    @property
    def exponents(self) -> dict[str, torch.Tensor | None]:
        """Exponents as keyword arguments of the ops."""
        return {"page_exponent": self.page_exponent, "channel_exponent": self.channel_exponent}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the bounds."""
        every = (self.page_min, self.page_max, self.page_exponent, self.channel_exponent)
        return [tensor for tensor in every if tensor is not None]

    def clone(self) -> Bounds:
        """Copy all tensors."""
        return Bounds(*(tensor.clone() for tensor in self.tensors))

    def of_head(self, head: int) -> Bounds:
        """Return views of one KV head."""
        return Bounds(*(tensor[:, head : head + 1] for tensor in self.tensors))


@dataclass
class Layer:
    """Tensors that a step of one layer reads and writes.

    Buffers and metadata already hold the newest token. A step writes the same token again, so it can be repeated.
    """

    shape: Shape
    settings: Settings
    query: torch.Tensor
    """[batch, q_heads, head_dim]."""
    new_key: torch.Tensor
    """[batch, kv_heads, head_dim]."""
    new_value: torch.Tensor
    keys: torch.Tensor
    """[batch, kv_heads, length, head_dim]."""
    values: torch.Tensor
    bounds: dict[str, Bounds]
    scores: torch.Tensor
    """float32 [batch, kv_heads, pages], from the bounds in bf16; like the selection empty in a layer without them."""
    block_indices: torch.Tensor
    block_counts: torch.Tensor
    seq_start: torch.Tensor
    context_end: torch.Tensor
    """int32 [batch]: end of the rows without the newest token."""
    seq_end: torch.Tensor
    """int32 [batch]: end of the rows, including the newest token."""
    counter: torch.Tensor
    """int64 [4], added to by the ops."""
    finished: torch.Tensor
    """int32 [batch, kv_heads]: zero between ops."""
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    """Results that checks computed once."""

    def context_bounds(self, kind: str, num_new: int, impl: str | None) -> None:
        """Recompute the bounds as they were before the newest token."""
        bounds = self.bounds[kind]
        ops.page_bounds(
            self.keys,
            bounds.page_min,
            bounds.page_max,
            self.seq_start,
            self.context_end,
            page_size=self.settings.page_size,
            num_new=num_new,
            statistic=STATISTICS[kind],
            **bounds.exponents,
            impl=impl,
        )


def layer_bytes(shape: Shape, settings: Settings, kinds: Sequence[str] = BOUNDS) -> int:
    """Bytes that a layer's buffers take."""
    heads = shape.batch * shape.kv_heads
    token_vectors = 2 * heads * shape.length * shape.head_dim * DTYPE.itemsize
    bound_bytes = sum(DTYPE.itemsize if kind == "bf16" else 1 for kind in kinds)
    bounds = 2 * heads * settings.pages(shape) * shape.head_dim * bound_bytes
    return token_vectors + bounds + 8 * heads * settings.pages(shape)


def make_layer(
    shape: Shape,
    settings: Settings,
    device: torch.device,
    seed: int = 0,
    impl: str | None = None,
    kinds: Sequence[str] = BOUNDS,
) -> Layer:
    """Make a layer of normally distributed queries, keys and values, with page bounds of some kinds.

    Raises
    ------
    ValueError
        ``shape.length`` is not a whole number of pages: the step's last page is to be full.
    """
    if shape.length % settings.page_size:
        raise ValueError(f"length={shape.length}; allowed: whole pages of page_size={settings.page_size}")
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=DTYPE, device=device, generator=generator)

    keys, values = (normal(shape.batch, shape.kv_heads, shape.length, shape.head_dim) for _ in range(2))
    start = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    nothing = torch.empty(0, device=device)
    layer = Layer(
        shape,
        settings,
        query=normal(shape.batch, shape.q_heads, shape.head_dim),
        new_key=keys[:, :, -1].clone(),
        new_value=values[:, :, -1].clone(),
        keys=keys,
        values=values,
        bounds={kind: Bounds.empty(shape, settings, kind, device) for kind in kinds},
        scores=nothing,
        block_indices=nothing,
        block_counts=nothing,
        seq_start=start,
        context_end=torch.full_like(start, shape.length - 1),
        seq_end=torch.full_like(start, shape.length),
        counter=torch.zeros(4, dtype=torch.int64, device=device),
        finished=torch.zeros(shape.batch, shape.kv_heads, dtype=torch.int32, device=device),
    )
    summarize(layer, impl)
    return layer


def summarize(layer: Layer, impl: str | None) -> None:
    """Compute the page bounds of a layer's keys, and from those in bf16 scores and a selection."""
    shape, settings = layer.shape, layer.settings
    row_bounds = (layer.seq_start, layer.seq_end)
    for kind, bounds in layer.bounds.items():
        layer.context_bounds(kind, shape.length, impl)
        levels = (bounds.page_min, bounds.page_max)
        page = {"page_size": settings.page_size, "statistic": STATISTICS[kind], "impl": impl}
        ops.page_bounds(layer.keys, *levels, *row_bounds, num_new=1, **bounds.exponents, **page)
    if "bf16" not in layer.bounds:
        return
    levels = (layer.bounds["bf16"].page_min, layer.bounds["bf16"].page_max)
    layer.scores = ops.page_scores(layer.query, *levels, *row_bounds, page_size=settings.page_size, impl=impl)
    layer.block_indices, layer.block_counts = ops.select_blocks(
        layer.scores,
        *row_bounds,
        block_size=settings.page_size,
        **settings.budget,
        impl=impl,
    )
