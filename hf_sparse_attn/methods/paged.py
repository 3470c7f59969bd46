"""What methods share that score pages of keys by their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hf_sparse_attn_kernels import page_bounds, page_scores

from hf_sparse_attn.methods.base import SparseMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

GROUP_REDUCTIONS = ("softmax", "mean", "max")
BOUNDS_DTYPES = ("int8", "model")


@dataclass(frozen=True)
class PagedMethod(SparseMethod, partial=True):
    """A method that keeps bounds of the keys of every page, and scores pages by them.

    A page is a block of ``_page_size`` tokens that follow one another, counted from the row's first token. A subclass
    has the fields ``group_reduce`` and ``bounds_dtype``, says how many tokens a page has, and chooses pages by
    :meth:`score_pages`, or by an op that takes the layer's metadata.
    """

    @property
    def _page_size(self) -> int:
        """Tokens in a page: a power of two."""
        raise NotImplementedError(f"{type(self).__name__} must define _page_size")

    @property
    def _statistic(self) -> str:
        """Statistic of a page's keys that the bounds hold, as ``page_bounds`` names it."""
        return "minmax"

    @property
    def group_reduce(self) -> str:
        """Reduction of the scores over the query heads of a group, a field of every subclass."""
        raise NotImplementedError(f"{type(self).__name__} must have the field group_reduce")

    @property
    def bounds_dtype(self) -> str:
        """Precision of the bounds, ``"int8"`` or ``"model"``, a field of every subclass."""
        raise NotImplementedError(f"{type(self).__name__} must have the field bounds_dtype")

    def _require_page_size(self, parameter: str) -> None:
        """Raise ``ValueError`` unless the field ``parameter``, the tokens in a page, is a power of two."""
        size = getattr(self, parameter)
        self._require(parameter, size >= 1 and size & (size - 1) == 0, "a power of two, such as 16")

    def _require_scoring(self) -> None:
        """Raise ``ValueError`` unless ``group_reduce`` and ``bounds_dtype`` are names that the ops know."""
        self._require("group_reduce", self.group_reduce in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")
        self._require("bounds_dtype", self.bounds_dtype in BOUNDS_DTYPES, f"one of {', '.join(BOUNDS_DTYPES)}")

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the page bounds under the names of the ops' arguments.

        ``page_min`` and ``page_max`` are [batch, kv_heads, pages, head_dim]. 8-bit bounds add ``page_exponent``, int8
        [batch, kv_heads, pages], and ``channel_exponent``, int8 [batch, kv_heads, head_dim].
        """
        batch, kv_heads, capacity, head_dim = layer.keys.shape
        pages = -(-capacity // self._page_size)
        dtype = torch.int8 if self.bounds_dtype == "int8" else layer.keys.dtype
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("page_min", "page_max"), (batch, kv_heads, pages, head_dim))
        if self.bounds_dtype == "int8":
            shapes |= {"page_exponent": (batch, kv_heads, pages), "channel_exponent": (batch, kv_heads, head_dim)}
        return {name: torch.empty(shape, dtype=dtype, device=layer.keys.device) for name, shape in shapes.items()}

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Update the bounds of the pages that hold the last ``num_new`` tokens.

        Channel exponents adapt to every call of a prompt: fixed by a short first call, such as a chat's first turn,
        they would fit later text badly. A decode step keeps them, and a page with larger keys raises its own exponent.
        """
        page_bounds(
            layer.keys,
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self._page_size,
            num_new=num_new,
            statistic=self._statistic,
            **layer.metadata,
        )

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Recompute the last page, which may have lost tokens. Pages after it are never scored."""
        self.update_metadata(layer, num_new=1)

    def score_pages(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> torch.Tensor:
        """Score every page of the layer, float32 [batch, kv_heads, pages]; see :meth:`select` for the arguments."""
        return page_scores(
            query,
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self._page_size,
            scale=scale,
            group_reduce=self.group_reduce,
            num_pages=layer.max_blocks(self._page_size),
            **layer.metadata,
        )

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor:
        """Bytes of both bounds, with their exponents, of every page that holds a token."""
        _, kv_heads, _, head_dim = layer.keys.shape
        pages = (layer.row_lengths() + self._page_size - 1) // self._page_size  # [batch]
        if self.bounds_dtype == "model":
            return pages.sum() * (2 * kv_heads * head_dim * layer.keys.element_size())
        return pages.sum() * (kv_heads * (2 * head_dim + 1)) + (pages > 0).sum() * (kv_heads * head_dim)
