"""StreamingLLM: the first tokens and the last ones, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.evicting import EvictingMethod, places

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class StreamingLLM(EvictingMethod):
    """Keep the first tokens and a sliding window of the last ones (StreamingLLM, arXiv 2309.17453, section 3.2).

    The first tokens are attention sinks: heads that need nothing of a text put their weight there, so without them the
    output changes, whatever they mean. Everything between them and the window is evicted, and its memory freed. Which
    tokens are kept depends on their places alone.

    Parameters
    ----------
    token_budget
        Cached tokens that a step reads: the sinks, and a window of ``token_budget - sink_tokens`` tokens that includes
        the current one.
    dense_layers
        Number of first layers that keep and read the whole cache.
    sink_tokens
        First tokens, always kept; the paper's value is 4.

    Notes
    -----
    The prompt is prefilled densely, and evicted from when it is complete. Tokens keep the positions at which they were
    rotated. The paper gives them positions by their places in the cache, which differs only once a text is longer than
    the trained positions.
    """

    name: ClassVar[str] = "streaming_llm"
    summary: ClassVar[str] = "keeps the first tokens and the last ones; evicts the rest"
    paper: ClassVar[str] = "arXiv 2309.17453"

    sink_tokens: int = 4

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        allowed = f"between 0 and token_budget - 1 = {self.token_budget - 1}"
        self._require("sink_tokens", 0 <= self.sink_tokens < self.token_budget, allowed)

    def priority(self, layer: SparseLayer, query: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Return each token's place, and ``inf`` for the sinks; see :meth:`EvictingMethod.priority`."""
        place = places(layer)
        return place.float().masked_fill(place < self.sink_tokens, torch.inf)
