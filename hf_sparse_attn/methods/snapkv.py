"""SnapKV: the prompt's tokens that its last queries attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import max_pool1d

from hf_sparse_attn.methods.evicting import EvictingMethod, attention_weights

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class SnapKV(EvictingMethod):
    """Keep the prompt's tokens that its last queries weigh most, and all generated tokens (SnapKV, arXiv 2404.14469).

    The last ``window`` tokens of the prompt observe the ones before: the attention weights of their queries are summed
    (section 4, equation 2), pooled over neighbouring tokens (section 4.3), and the tokens of the largest values stay
    beside the window (section 4.1, listing 1). The pooling keeps the neighbours of a token that stands out, so that
    what is kept can still be read. Each KV head keeps tokens of its own, by the mean over its query heads; in the paper
    every query head does. What follows is never evicted, generated or fed.

    Parameters
    ----------
    token_budget
        Tokens of the prompt that a KV head keeps, the window included. A step reads these and all later tokens.
    dense_layers
        Number of first layers that keep and read the whole cache.
    window
        Last tokens of the prompt, which observe the others and always stay.
    kernel
        Width, an odd number, of the max-pooling; 1 for none.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "keeps the prompt's tokens that its last queries weigh most, and what is generated"
    paper: ClassVar[str] = "arXiv 2404.14469"
    keeps_generated: ClassVar[bool] = True

    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        allowed = f"between 1 and token_budget - 1 = {self.token_budget - 1}"
        self._require("window", 1 <= self.window < self.token_budget, allowed)
        self._require("kernel", self.kernel >= 1 and self.kernel % 2 == 1, "an odd number of neighbours")

    @property
    def keeps_queries(self) -> int:
        """The window."""
        return self.window

    def priority(self, layer: SparseLayer, query: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Return the pooled sums of the window's weights (listing 1); see :meth:`EvictingMethod.priority`."""
        queries = layer.prompt_queries
        if queries is None or not queries.states.shape[2]:
            raise ValueError(
                f"{self.name!r} needs the last queries of the prompt, but an unpatched model fed it or a crop removed "
                "them: feed the end of the prompt to the patched model"
            )
        window = queries.states[:, :, -self.window :]
        got = sum(weights.sum(3).mean(2) for weights in attention_weights(window, layer, queries.scale))
        assert isinstance(got, torch.Tensor)
        at = torch.arange(got.shape[2], device=got.device)
        observers = queries.counts.clamp_max(window.shape[2])[:, None, None]
        is_observer = at >= got.shape[2] - observers
        is_before_row = at < layer.rows.seq_start[:, None, None]
        votes = got.masked_fill(is_observer | is_before_row, -torch.inf)
        pooled = max_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.masked_fill(is_observer, torch.inf)
