"""Quest: query-aware page selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hf_sparse_attn_kernels import append_and_attend, append_and_select, select_blocks

from hf_sparse_attn.methods.base import Selection, SelectionSize
from hf_sparse_attn.methods.paged import PagedMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

MIN_PAGES = 3


@dataclass(frozen=True)
class Quest(PagedMethod):
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
    offload
        Keep K and V in host memory, beside a pool of blocks on the device. A keyword argument, as the next two.
    gpu_cache_tokens
        Tokens of each layer and KV head that the pool has room for on average, in all rows together.
    eviction
        How blocks make room for others in the pool: ``"lru"``, the least recently used first, or ``"fifo"``.

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
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        self._require_page_size("page_size")
        self._require(
            "token_budget", self.token_budget >= self.page_size, f"at least one page ({self.page_size} tokens)"
        )
        most_sink_tokens = (self.num_pages - 1) * self.page_size  # the page being filled takes one
        self._require(
            "sink_tokens",
            0 <= self.sink_tokens <= most_sink_tokens,
            f"between 0 and {most_sink_tokens} (token_budget={self.token_budget} minus the page being filled)",
        )
        self._require_scoring()
        self._require_offload()

    @property
    def _page_size(self) -> int:
        return self.page_size

    @property
    def _pages_at_once(self) -> tuple[int, str]:
        return self.num_pages - 1, "the selection without the newest"

    @property
    def selection_size(self) -> SelectionSize:
        """Size of a step's selection: pages."""
        return SelectionSize(self.page_size, self.num_pages)

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

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append, score, select and attend in one op, or attend apart from it; see :meth:`SparseMethod.decode`."""
        newest = layer.newest
        tensors = (query, new_key, new_value, newest.keys, newest.values)
        options: dict[str, Any] = {
            "seq_start": newest.seq_start,
            "seq_end": newest.seq_end,
            "page_size": self.page_size,
            "max_blocks": self.num_pages,
            "sink_blocks": self.sink_pages,
            "recent_blocks": 1,
            "scale": scale,
            "group_reduce": self.group_reduce,
            "num_pages": layer.max_blocks(self.page_size),
            "counter": layer.counter.totals,
            "finished": layer.finished,
            "statistic": self._statistic,
            **layer.metadata,
        }
        if not layer.keeps_rows:
            block_indices, block_counts = append_and_select(*tensors, **options)
            return self.attend(query, layer, Selection(block_indices, block_counts, self.page_size), scale)
        output, lse, block_indices, block_counts = append_and_attend(*tensors, **options)
        layer.note(Selection(block_indices, block_counts, self.page_size))
        return layer.with_sinks(output, lse)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Score every page and keep the best; see :meth:`SparseMethod.select` for the arguments."""
        block_indices, block_counts = select_blocks(
            self.score_pages(query, layer, scale),
            layer.seq_start,
            layer.seq_end,
            block_size=self.page_size,
            max_blocks=self.num_pages,
            sink_blocks=self.sink_pages,
            recent_blocks=1,
        )
        return Selection(block_indices, block_counts, self.page_size)
