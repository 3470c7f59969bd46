"""Common parts of the methods that score pages of keys by their bounds."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import torch
from hf_sparse_attn_kernels import page_bounds, page_scores

from hf_sparse_attn.methods.base import Offload, SparseMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

GROUP_REDUCTIONS = ("softmax", "mean", "max")
BOUNDS_DTYPES = ("int8", "model")
EVICTION_POLICIES = ("lru", "fifo")


@dataclass(frozen=True)
class PagedMethod(SparseMethod, partial=True):
    """A method that keeps bounds of the keys of every page, and scores pages by them.

    A page is a block of ``_page_size`` tokens that follow one another, counted from the row's first token. A subclass
    has the fields ``group_reduce`` and ``bounds_dtype``, says how many tokens a page has, and chooses pages by
    :meth:`score_pages`, or by an op that takes the layer's metadata. It calls :meth:`_require_offload` in its checks.

    Parameters
    ----------
    offload
        Keep K and V in host memory, and load the selected pages: a context then need not fit into the device's memory.
        Metadata and dense layers stay on the device. A keyword argument, like the next two.
    gpu_cache_tokens
        Only with ``offload``: tokens, of all offloaded layers and KV heads, whose K and V the device has room for
        beside each row's newest page. The rows of a batch share it.
    eviction
        Which page makes room for another: ``"lru"``, the one read least recently, or ``"fifo"``, the one loaded first.
    """

    _: KW_ONLY
    offload: bool = False
    gpu_cache_tokens: int | None = None
    eviction: str = "lru"

    @property
    def offloading(self) -> Offload | None:
        """How the cache keeps K and V in host memory; None to keep them on the device."""
        if not self.offload or self.gpu_cache_tokens is None:
            return None
        return Offload(self._page_size, *self._pages_at_once, self.gpu_cache_tokens, self.eviction)

    @property
    def resident(self) -> PagedMethod:
        """The same method with K and V on the device."""
        return replace(self, offload=False, gpu_cache_tokens=None)

    @property
    def _pages_at_once(self) -> tuple[int, str]:
        """Maximum number of full pages that a KV head must hold at once in a step, and what they are."""
        raise NotImplementedError(f"{type(self).__name__} must define _pages_at_once")

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

    def _require_offload(self) -> None:
        """Check the three parameters of offloading.

        Raises
        ------
        TypeError
            A value has the wrong type.
        ValueError
            A value is out of range, or is given without ``offload``.
        """
        tokens = self.gpu_cache_tokens
        self._require("eviction", self.eviction in EVICTION_POLICIES, f"one of {', '.join(EVICTION_POLICIES)}")
        if not self.offload:
            self._require("gpu_cache_tokens", tokens is None, "None without offload=True")
            return
        least = f"at least {self._page_size} (one page) with offload=True"
        self._require("gpu_cache_tokens", tokens is not None and tokens >= self._page_size, least)

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
        rows = layer.newest if num_new == 1 else layer.rows
        page_bounds(
            rows.keys,
            seq_start=rows.seq_start,
            seq_end=rows.seq_end,
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
