"""RaBitQCache: single tokens chosen by codes of one bit a key channel, until they hold a share of the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import select_tokens_by_mass

from hf_sparse_attn.methods.base import Selection, SelectionSize
from hf_sparse_attn.methods.coded import CodedMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class RaBitQCache(CodedMethod):
    """Read the fewest tokens that hold a share of the attention weight, estimated from one-bit codes (RaBitQCache).

    RaBitQCache (arXiv 2606.31519) codes a key k by its residual r = k - c from the mean c of the prompt's keys: the
    signs s of R r, with a fixed orthogonal matrix R, and the factor a of RaBitQ (arXiv 2405.12497). A step estimates
    q.k as ``q.c + m.r + a (R (q - m)).s``, where m is the mean of the prompt's queries, and the softmax weights from
    these. It reads the fewest coded tokens whose estimated weights add up to ``top_p``, so each KV head and step finds
    its own budget. Prefill stays dense.

    The authors select for each query head; here the query heads of a KV head share a selection, by the sum of their
    weights, and a query centre.

    Parameters
    ----------
    token_budget
        Maximum cached tokens that a KV head reads per step: at least ``sink_tokens`` and ``page_size``. Beyond it the
        lightest tokens are left out. None, as in the paper, for no maximum.
    top_p
        Share of the estimated weight of the coded tokens to read, in (0, 1]. 1 reads every token.
    page_size
        Tokens that are coded at a time, when so many have come; until then they are read. A multiple of 16; the
        authors' value is 128.
    sink_tokens
        First tokens, always read: a multiple of ``page_size``. The authors' value is 128.
    query_centre
        Keep the exact product of each residual with the mean query, 16 bits a token, as the authors do.
    dense_layers
        Number of first layers that attend to the whole cache; the authors' value is 2.

    Notes
    -----
    The default of ``top_p`` is that of the authors' example; their configurations of benchmarks have 0.65 to 0.85.
    """

    name: ClassVar[str] = "rabitqcache"
    summary: ClassVar[str] = "top-p tokens by codes of one bit a key channel"
    paper: ClassVar[str] = "arXiv 2606.31519"
    shared_centre: ClassVar[bool] = True

    token_budget: int | None = None  # type: ignore[assignment]  # None: no maximum
    dense_layers: int = 2
    top_p: float = 0.95
    page_size: int = 128
    sink_tokens: int = 128
    query_centre: bool = True

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        self._check_types()
        self._check_numbers("top_p")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require_page_size()
        is_multiple = self.sink_tokens >= 0 and self.sink_tokens % self.page_size == 0
        self._require("sink_tokens", is_multiple, f"0 or a multiple of page_size={self.page_size}")
        self._require("dense_layers", self.dense_layers >= 0, "0 or more")
        if self.token_budget is not None:
            least = self.sink_tokens + self.page_size
            self._require(
                "token_budget",
                self.token_budget >= least,
                f"None, or at least {least}: the first sink_tokens={self.sink_tokens} and a page of {self.page_size}",
            )

    def covers(self, length: int) -> bool:
        """Whether a row of ``length`` tokens has nothing to leave out."""
        may_read_all = self.token_budget is None or length <= self.token_budget
        return length <= self.sink_tokens + self.page_size or (self.top_p == 1 and may_read_all)

    @property
    def selection_size(self) -> SelectionSize:
        """Size of a step's selection: single tokens, whose number each step finds."""
        return SelectionSize(1, self.token_budget)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Estimate the weight of every coded token and keep the heaviest; see :meth:`SparseMethod.select`."""
        scores = self.estimate(query, layer, scale, "softmax", first_page=self.sink_tokens // self.page_size)
        block_indices, block_counts = select_tokens_by_mass(
            scores,
            layer.seq_start,
            layer.seq_end,
            top_p=self.top_p,
            sink_tokens=self.sink_tokens,
            page_size=self.page_size,
            max_tokens=self.token_budget,
        )
        return Selection(block_indices, block_counts, block_size=1)
