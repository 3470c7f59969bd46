"""Quest: query-aware page selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import append_and_select, page_bounds, page_scores, select_blocks

from hf_sparse_attn.methods.base import Selection, SparseMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

GROUP_REDUCTIONS = ("softmax", "mean", "max")
BOUNDS_DTYPES = ("int8", "model")
MIN_PAGES = 3


@dataclass(frozen=True)
class Quest(SparseMethod):
    """Read the pages whose keys could score highest (Quest, arXiv 2406.10774, section 3).

    Each page keeps the elementwise minimum m and maximum M of its keys after RoPE. A page's score,
    ``sum_i max(q_i m_i, q_i M_i)``, is an upper bound of q.k for every key in it (algorithm 1). A step reads the
    ``K = max(3, token_budget // page_size)`` best pages. Prefill stays dense, and so do the first layers.

    Parameters
    ----------
    token_budget
        Cached tokens that a KV head reads per step; at least three pages are read, as in the paper.
    page_size
        Tokens in a page: a power of two. The paper's value is 16.
    dense_layers
        Number of first layers that attend to the whole cache; the paper's value is 2.
    sink_tokens
        The pages of the first ``sink_tokens`` tokens are always read and count in the budget. The paper's value is 0:
        it reads them only if they score high. Attention sinks often score low, and forcing them costs one page.
    group_reduce
        Reduction of the scores of the query heads that share a KV head. ``"softmax"`` (default) normalises each head's
        scores over the pages before summing, so no head dominates; it keeps the most attention mass on real weights.
        ``"mean"`` and ``"max"`` reduce the raw scores. With one query head per KV head, as in the paper, all three
        choose the same pages.
    bounds_dtype
        Precision of the bounds. ``"int8"`` (default) keeps 8-bit levels with one exponent per page and one per channel.
        They are rounded outwards, so a score stays an upper bound. A step reads half the bytes; on real weights the
        selection keeps the same attention mass. ``"model"`` keeps exact bounds in the model's dtype, as in the paper.

    Notes
    -----
    The page being filled is always read and counts in the budget.
    """

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = "top-k pages by an upper bound of q.k from each page's key range"
    paper: ClassVar[str] = "arXiv 2406.10774"

    token_budget: int = 1024
    page_size: int = 16
    dense_layers: int = 2
    sink_tokens: int = 16
    group_reduce: str = "softmax"
    bounds_dtype: str = "int8"

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a whole number and is not.
        ValueError
            A value is out of range.
        """
        super().__post_init__()
        is_power_of_two = self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0
        self._require("page_size", is_power_of_two, "a power of two, such as 16")
        self._require(
            "token_budget", self.token_budget >= self.page_size, f"at least one page ({self.page_size} tokens)"
        )
        most_sink_tokens = (self.num_pages - 1) * self.page_size  # the page being filled takes one
        self._require(
            "sink_tokens",
            0 <= self.sink_tokens <= most_sink_tokens,
            f"between 0 and {most_sink_tokens} (token_budget={self.token_budget} minus the page being filled)",
        )
        self._require("group_reduce", self.group_reduce in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")
        self._require("bounds_dtype", self.bounds_dtype in BOUNDS_DTYPES, f"one of {', '.join(BOUNDS_DTYPES)}")

    @property
    def num_pages(self) -> int:
        """Number of pages K that a KV head reads per step (section 4.1)."""
        return max(MIN_PAGES, self.token_budget // self.page_size)

    def covers(self, length: int) -> bool:
        """Whether a step would read all pages of ``length`` tokens."""
        return length <= self.num_pages * self.page_size

    @property
    def sink_pages(self) -> int:
        """Number of first pages, which are always read."""
        return -(-self.sink_tokens // self.page_size)

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the page bounds under the names of the ops' arguments.

        ``page_min`` and ``page_max`` are [batch, kv_heads, pages, head_dim]. 8-bit bounds add ``page_exponent``, int8
        [batch, kv_heads, pages], and ``channel_exponent``, int8 [batch, kv_heads, head_dim].
        """
        batch, kv_heads, capacity, head_dim = layer.keys.shape
        pages = -(-capacity // self.page_size)
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
            page_size=self.page_size,
            num_new=num_new,
            **layer.metadata,
        )

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Recompute the last page, which may have lost tokens. Pages after it are never scored."""
        self.update_metadata(layer, num_new=1)

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append, score and select in one op, then attend; see :meth:`SparseMethod.decode`."""
        block_indices, block_counts = append_and_select(
            query,
            new_key,
            new_value,
            layer.keys,
            layer.values,
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self.page_size,
            max_blocks=self.num_pages,
            sink_blocks=self.sink_pages,
            recent_blocks=1,
            scale=scale,
            group_reduce=self.group_reduce,
            num_pages=layer.max_blocks(self.page_size),
            counter=layer.counter.totals,
            finished=layer.finished,
            **layer.metadata,
        )
        return self.attend(query, layer, Selection(block_indices, block_counts, self.page_size), scale)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Score every page and keep the best; see :meth:`SparseMethod.select` for the arguments."""
        scores = page_scores(
            query,
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self.page_size,
            scale=scale,
            group_reduce=self.group_reduce,
            num_pages=layer.max_blocks(self.page_size),
            **layer.metadata,
        )
        block_indices, block_counts = select_blocks(
            scores,
            layer.seq_start,
            layer.seq_end,
            block_size=self.page_size,
            max_blocks=self.num_pages,
            sink_blocks=self.sink_pages,
            recent_blocks=1,
        )
        return Selection(block_indices, block_counts, self.page_size)

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor:
        """Bytes of both bounds, with their exponents, of every page that holds a token."""
        _, kv_heads, _, head_dim = layer.keys.shape
        pages = (layer.row_lengths() + self.page_size - 1) // self.page_size  # [batch]
        if self.bounds_dtype == "model":
            return pages.sum() * (2 * kv_heads * head_dim * layer.keys.element_size())
        return pages.sum() * (kv_heads * (2 * head_dim + 1)) + (pages > 0).sum() * (kv_heads * head_dim)
