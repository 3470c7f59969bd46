"""H2O: the heavy hitters, which have got the most attention, and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.evicting import EvictingMethod, attention_weights, key_bytes, places, storage_of

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class H2O(EvictingMethod):
    """Keep the last tokens and the heavy hitters, which have got the most attention so far (H2O, arXiv 2306.14048).

    A token's score is the sum of the attention weights that all queries since have given it, its own included, in the
    prompt too (section 4.1). After each step the token of the least score goes (algorithm 1), unless it is one of the
    last ones, which sections 3.2 and 5.1 spare, not algorithm 1. Each KV head keeps tokens of its own, by the sum over
    its query heads.

    Parameters
    ----------
    token_budget
        Cached tokens that a step reads, its own included; one of them goes after the step.
    dense_layers
        Number of first layers that keep and read the whole cache.
    recent
        Last tokens that stay in any case, the current one included; None for half of the budget (section 5.1).

    Notes
    -----
    The prompt is prefilled densely, and its weights are computed a second time, since no attention op returns them:
    that takes longer than attention itself. A score keeps what queries gave that were removed by a crop.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "keeps the tokens of the most accumulated attention and the last ones; evicts one per step"
    paper: ClassVar[str] = "arXiv 2306.14048"
    needs_weights: ClassVar[bool] = True

    recent: int | None = None

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        if self.recent is None:
            return
        allowed = f"None, or between 0 and token_budget - 1 = {self.token_budget - 1}"
        self._require("recent", 0 <= self.recent < self.token_budget, allowed)

    @property
    def recent_tokens(self) -> int:
        """Last tokens that stay in any case."""
        return self.token_budget // 2 if self.recent is None else self.recent

    def watch(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> None:
        """Add the queries' weights to the scores (section 4.1); see :meth:`EvictingMethod.watch`."""
        got = sum(weights.sum((2, 3)) for weights in attention_weights(query, layer, scale))
        assert isinstance(got, torch.Tensor)
        storage_of(layer).add_weights(got, query.shape[2], layer.lengths)
        if query.shape[2] == 1:
            kept = layer.rows.seq_end - layer.rows.seq_start
            layer.counter.count_metadata(key_bytes(layer) + kept.sum() * (got.shape[1] * got.element_size()))

    def priority(self, layer: SparseLayer, query: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Return the scores, ``inf`` for the last tokens (algorithm 1); see :meth:`EvictingMethod.priority`."""
        scores = storage_of(layer).weights
        if scores is None or scores.shape[2] != storage_of(layer).slots(layer.lengths):
            raise ValueError(
                f"{self.name!r} needs the attention weights of all tokens, but some were fed by an unpatched model: "
                "patch the model first, and prefill a new cache"
            )
        is_recent = places(layer) >= (layer.row_lengths() - self.recent_tokens)[:, None, None]
        return scores.masked_fill(is_recent, torch.inf)
