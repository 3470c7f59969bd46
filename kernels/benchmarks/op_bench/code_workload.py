"""One layer's buffers for decode steps in which key codes choose the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import hf_sparse_attn_kernels as ops
import torch

from op_bench.shapes import Settings, Shape
from op_bench.workload import DTYPE, Layer

SPARE_PAGES = 1
"""Pages that the codes have room for beyond the tokens.

The codes of a static cache have such room, so their capacity is seldom a multiple of a kernel's large tiles.
"""


@dataclass
class CodedLayer(Layer):
    """A layer with coded keys; a block is one token."""

    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    """The metadata, as arguments of the ops, with room for `SPARE_PAGES` after the tokens."""
    coded: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """int32 [batch, kv_heads]: pages coded so far."""
    query_centre: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """float32 [batch, kv_heads, head_dim]."""

    @property
    def row_bounds(self) -> dict[str, torch.Tensor]:
        """Bounds of the rows, as arguments of the ops."""
        return {"seq_start": self.seq_start, "seq_end": self.seq_end}

    @property
    def code_options(self) -> dict[str, Any]:
        """Options that coding and scoring share."""
        settings = self.settings
        return {"page_size": settings.code_page, "bits": settings.code_bits, "query_centre": self.query_centre}

    @property
    def choice(self) -> dict[str, int]:
        """Options of the choice."""
        settings = self.settings
        return {
            "max_tokens": settings.code_budget,
            "sink_tokens": settings.code_sinks,
            "page_size": settings.code_page,
        }

    def encode(self, first_page: int, max_pages: int | None, impl: str | None) -> None:
        """Code the pages from `first_page` on."""
        self.coded.fill_(first_page)
        ops.encode_keys(
            self.keys,
            **self.codes,
            coded=self.coded,
            **self.row_bounds,
            max_pages=max_pages,
            **self.code_options,
            impl=impl,
        )

    def codes_of(self, first_page: int, end_page: int | None = None) -> dict[str, torch.Tensor]:
        """Return views of the metadata from a page up to another, by default to the end of the room."""
        pages = self.codes["centres"].shape[2]
        end_page = pages if end_page is None else end_page
        views = {}
        for name, tensor in self.codes.items():
            size = tensor.shape[2] // pages  # 1, or the tokens of a page
            views[name] = tensor[:, :, first_page * size : end_page * size]
        return views

    def spoil(self, first_page: int = 0) -> None:
        """Fill the metadata from a page on with what no key has."""
        for tensor in self.codes_of(first_page).values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def in_tokens(settings: Settings) -> Settings:
    """Return the settings with pages of one token and the budget of the key codes, as attention sees them."""
    return replace(settings, page_size=1, token_budget=settings.code_budget)


def code_bytes(shape: Shape, settings: Settings, pages: int) -> int:
    """Return the bytes of the codes, factors and centres of so many pages, over rows and KV heads."""
    token_bytes = settings.code_bits * shape.head_dim // 8 + 4
    return shape.batch * shape.kv_heads * pages * (settings.code_page * token_bytes + shape.head_dim + 2)


def code_layer_bytes(shape: Shape, settings: Settings) -> int:
    """Return the bytes of a layer's buffers."""
    vectors = 2 * shape.batch * shape.kv_heads * shape.length * shape.head_dim * DTYPE.itemsize
    return vectors + code_bytes(shape, settings, shape.length // settings.code_page + SPARE_PAGES)


def make_code_layer(
    shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
) -> CodedLayer:
    """Create a layer of normally distributed queries, keys and values, all pages coded.

    Raises
    ------
    ValueError
        ``shape.length`` is not a whole number of pages, or not more than the budget.
    """
    page = settings.code_page
    if shape.length % page or shape.length <= settings.code_budget:
        raise ValueError(f"length={shape.length}; allowed: whole pages of {page}, above {settings.code_budget} tokens")
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(*size, dtype=dtype, device=device, generator=generator)

    pair, pages = (shape.batch, shape.kv_heads), shape.length // page + SPARE_PAGES
    keys, values = (normal(*pair, shape.length, shape.head_dim) for _ in range(2))
    start = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    nothing = torch.empty(0, device=device)
    empty = {
        "codes": torch.empty(*pair, pages * page, settings.code_bits, shape.head_dim // 8, dtype=torch.uint8),
        "factors": torch.empty(*pair, pages * page, 2, dtype=torch.float16),
        "centres": torch.empty(*pair, pages, shape.head_dim, dtype=torch.int8),
        "centre_scale": torch.empty(*pair, pages, dtype=torch.float16),
    }
    layer = CodedLayer(
        shape,
        in_tokens(settings),
        query=normal(shape.batch, shape.q_heads, shape.head_dim),
        new_key=keys[:, :, -1].clone(),
        new_value=values[:, :, -1].clone(),
        keys=keys,
        values=values,
        bounds={},
        scores=nothing,
        block_indices=nothing,
        block_counts=nothing,
        seq_start=start,
        context_end=torch.full_like(start, shape.length - 1),
        seq_end=torch.full_like(start, shape.length),
        counter=torch.zeros(4, dtype=torch.int64, device=device),
        finished=torch.zeros(pair, dtype=torch.int32, device=device),
        codes={name: tensor.to(device) for name, tensor in empty.items()},
        coded=torch.zeros(pair, dtype=torch.int32, device=device),
        query_centre=normal(*pair, shape.head_dim, dtype=torch.float32),
    )
    code(layer, impl)
    return layer


def code(layer: CodedLayer, impl: str | None) -> None:
    """Code all pages of a layer, and from the codes compute scores and a selection."""
    layer.spoil()
    layer.encode(0, None, impl)
    layer.scores = ops.code_scores(layer.query, **layer.codes, **layer.row_bounds, **layer.code_options, impl=impl)
    selection = ops.select_tokens_by_score(layer.scores, **layer.row_bounds, **layer.choice, impl=impl)
    layer.block_indices, layer.block_counts = selection
