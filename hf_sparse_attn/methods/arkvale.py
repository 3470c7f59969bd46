"""ArkVale: pages selected by a box tighter than the range of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_sparse_attn.methods.quest import Quest


@dataclass(frozen=True)
class ArkVale(Quest):
    """Read the pages that score highest by a tight box around their keys (ArkVale, NeurIPS 2024).

    Each page keeps the cuboid mean of its keys after RoPE: the box ``c - delta`` to ``c + delta``, where
    ``c = (M + m) / 2`` lies halfway between the elementwise minimum m and maximum M, and ``delta`` is the mean of
    ``|c - k|`` over the page's keys. A page's score is ``sum_i max(q_i (c_i - delta_i), q_i (c_i + delta_i))``. A step
    reads the ``K = max(3, token_budget // page_size)`` pages with the highest scores. Prefill stays dense, and so do
    the first layers.

    It differs from :class:`~hf_sparse_attn.Quest` in this box and in the page size. Quest's box, m to M, holds every
    key, so its score is an upper bound of q.k, but a loose one. The cuboid mean lies within it, and is half as wide if
    the keys are spread evenly. Its score is an estimate: keys outside the box may score higher.

    Parameters
    ----------
    token_budget
        Cached tokens that a KV head reads per step; at least three pages are read.
    page_size
        Tokens in a page: a power of two.
    dense_layers
        Number of first layers that attend to the whole cache.
    sink_tokens
        The pages of the first ``sink_tokens`` tokens are always read and count in the budget.
    group_reduce
        Reduction of the scores of the query heads that share a KV head: ``"softmax"``, ``"mean"`` or ``"max"``, as in
        Quest.
    bounds_dtype
        Precision of the box: ``"int8"`` (default) keeps 8-bit levels, rounded outwards, with one exponent per page and
        one per channel; ``"model"`` keeps the model's dtype, rounded to nearest.
    offload
        Keep K and V in host memory, beside a pool of blocks on the device. A keyword argument, as the next two.
    gpu_cache_tokens
        Tokens of each layer and KV head that the pool has room for on average, in all rows together.
    eviction
        How blocks make room for others in the pool: ``"lru"``, the least recently used first, or ``"fifo"``.

    Notes
    -----
    The page being filled is always read and counts in the budget. Its box is computed again for every new token. The
    paper's system keeps pages that are not selected in host memory; so does this one with ``offload=True``.
    """

    name: ClassVar[str] = "arkvale"
    summary: ClassVar[str] = "top-k pages by q.k with the cuboid mean, a tight box around each page's keys"
    paper: ClassVar[str] = "NeurIPS 2024"

    page_size: int = 32

    @property
    def _statistic(self) -> str:
        return "cuboid_mean"
