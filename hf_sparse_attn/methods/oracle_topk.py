"""Oracle top-k: the tokens that truly have the most attention, an upper bound for methods that estimate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.methods.scores import GROUP_REDUCTIONS, best_tokens, reduce_group, token_scores

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class OracleTopK(SparseMethod):
    """Read the tokens with the most attention, found by scoring every key exactly (top-k attention, arXiv 2106.06899).

    A step computes q.k of every cached key, and reads the ``token_budget`` tokens with the highest scores, per KV head,
    as ``nocache_attention/nocache_attention.py`` of the paper's code (ag1988/top_k_attention 1f0e736) does per query.
    This is the upper bound of methods that estimate scores and read as many tokens. It saves no time: finding the
    tokens reads all keys, which count as metadata. Prefill stays dense.

    Parameters
    ----------
    token_budget
        Cached tokens that a KV head reads per step. None is read in any case, not even the newest.
    dense_layers
        Number of first layers that attend to the whole cache.
    group_reduce
        Reduction of the scores of the query heads that share a KV head. ``"softmax"`` (default) sums their attention
        weights, so the chosen tokens hold the most attention that so many tokens can hold. ``"mean"`` and ``"max"``
        reduce the raw scores. With one query head per KV head all three choose the same tokens.

    Notes
    -----
    The paper selects for each query head. Here the query heads of a KV head share a selection, as in every method of
    this package, so that the bound is that of methods which keep the saving of GQA.
    """

    name: ClassVar[str] = "oracle_topk"
    summary: ClassVar[str] = "top-k tokens by exact scores, the upper bound of methods that estimate them"
    paper: ClassVar[str] = "arXiv 2106.06899"

    token_budget: int = 1024
    dense_layers: int = 0
    group_reduce: str = "softmax"

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        self._require("group_reduce", self.group_reduce in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Score every key and keep the best; see :meth:`SparseMethod.select`."""
        scores = token_scores(query, layer.keys, layer, scale)
        return best_tokens(reduce_group(scores, self.group_reduce), layer, self.token_budget)

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor:
        """Bytes of all keys, which the choice reads."""
        _, kv_heads, _, head_dim = layer.keys.shape
        return layer.row_lengths().sum() * (kv_heads * head_dim * layer.keys.element_size())
