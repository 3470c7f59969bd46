"""KeyCodes: single tokens chosen by codes of one or two bits a key channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hf_sparse_attn_kernels import append_and_attend_tokens, append_and_select_tokens, select_tokens_by_score

from hf_sparse_attn.methods.base import Selection, SelectionSize, SparseMethod
from hf_sparse_attn.methods.coded import CodedMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

BITS = (1, 2)
GROUP_REDUCTIONS = ("softmax", "max")
CORRECTIONS = ("unbiased", "least_squares")


@dataclass(frozen=True)
class KeyCodes(CodedMethod):
    """Read the tokens whose keys score highest by codes of one or two bits a channel (RaBitQ, arXiv 2405.12497).

    Each full page keeps the mean c of its keys after RoPE, in 8 bits. The code of a key k is that of its residual
    r = k - c, rotated by a fixed orthogonal matrix R: a symbol of ``bits`` bits for each channel of R r, and a factor a
    with which a s, s being the symbols, estimates R r. A step estimates q.k of every coded token as
    ``q.c + m.r + a (R (q - m)).s``, where m is the mean of the prompt's queries and m.r is kept exactly. It reads the
    tokens with the highest estimates, the first ``sink_tokens``, and the page of the newest token. Prefill stays dense.

    RaBitQCache (arXiv 2606.31519) brought such codes to KV caches. Ours differ: a centre for each page instead of one
    for the prompt, one selection for each KV head, a fixed budget, and no dense layers.

    Parameters
    ----------
    token_budget
        Cached tokens that a KV head reads per step: at least ``sink_tokens`` and one page.
    bits
        Bits of a channel's symbol, 1 or 2. With 2 the codes take twice the bytes and estimate more accurately.
    page_size
        Tokens that share a centre: a multiple of 16. A page is coded when it is full; until then it is read whole.
    group_reduce
        Reduction of the estimates of the query heads that share a KV head. ``"softmax"`` normalises each head's
        estimates over all coded tokens, the sinks among them, before summing, so no head dominates. ``"max"`` takes the
        greatest.
    sink_tokens
        First tokens, always read.
    query_centre
        Keep the exact product of each residual with the mean query, 16 bits a token. The codes then estimate only what
        is left of the query. The mean is that of the prompt's queries when a row's first page is coded.
    dense_layers
        Number of first layers that attend to the whole cache.
    correction
        The factor a. ``"unbiased"`` is RaBitQ's |r|² / (R r).s: estimates have no bias along R r, but vary most for the
        residuals that their symbols fit worst. ``"least_squares"`` is (R r).s / s.s, with which a s is nearest to R r.
        It is the other one times the squared cosine between R r and s, so estimates are too small, most where the
        symbols fit worst, and fewer tokens are chosen for a large error alone.

    Notes
    -----
    The budget counts everything that is read. Generated tokens are coded too.
    """

    name: ClassVar[str] = "keycodes"
    summary: ClassVar[str] = "top-k tokens by codes of one or two bits a key channel"
    paper: ClassVar[str] = "arXiv 2405.12497"

    token_budget: int = 1024
    dense_layers: int = 0
    bits: int = 1
    page_size: int = 64
    group_reduce: str = "softmax"
    sink_tokens: int = 4
    query_centre: bool = True
    correction: str = "unbiased"

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        self._require("bits", self.bits in BITS, f"one of {', '.join(map(str, BITS))}")
        self._require_page_size()
        self._require("group_reduce", self.group_reduce in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")
        self._require("sink_tokens", self.sink_tokens >= 0, "0 or more")
        always_read = self.sink_tokens + self.page_size
        self._require(
            "token_budget",
            self.token_budget >= always_read,
            f"at least {always_read}: the first sink_tokens={self.sink_tokens} and a page of {self.page_size}",
        )
        self._require("correction", self.correction in CORRECTIONS, f"one of {', '.join(CORRECTIONS)}")

    @property
    def selection_size(self) -> SelectionSize:
        """Size of a step's selection: single tokens."""
        return SelectionSize(1, self.token_budget)

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append, code, select and attend in one op, or attend apart from it; see :meth:`SparseMethod.decode`."""
        newest = layer.newest
        tensors = (query, new_key, new_value, newest.keys, newest.values)
        options: dict[str, Any] = {
            "seq_start": newest.seq_start,
            "seq_end": newest.seq_end,
            "page_size": self.page_size,
            "max_tokens": self.token_budget,
            "sink_tokens": self.sink_tokens,
            "bits": self.bits,
            "correction": self.correction,
            "scale": scale,
            "group_reduce": self.group_reduce,
            "num_tokens": self.scored_tokens(layer),
            "counter": layer.counter.totals,
            **layer.metadata,
        }
        if not layer.keeps_rows or type(self).attend is not SparseMethod.attend:
            block_indices, block_counts = append_and_select_tokens(*tensors, **options)
            return self.attend(query, layer, Selection(block_indices, block_counts, block_size=1), scale)
        options |= {"finished": layer.finished}
        output, lse, block_indices, block_counts = append_and_attend_tokens(*tensors, **options)
        layer.note(Selection(block_indices, block_counts, block_size=1))
        return layer.with_sinks(output, lse)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Estimate the score of every coded token and keep the best; see :meth:`SparseMethod.select`."""
        scores = self.estimate(query, layer, scale, self.group_reduce)
        block_indices, block_counts = select_tokens_by_score(
            scores,
            layer.seq_start,
            layer.seq_end,
            max_tokens=self.token_budget,
            sink_tokens=self.sink_tokens,
            page_size=self.page_size,
        )
        return Selection(block_indices, block_counts, block_size=1)
