"""TOVA: the tokens that the newest query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.evicting import EvictingMethod, attention_weights, key_bytes

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class TOVA(EvictingMethod):
    """Evict the token that the newest query weighs least (TOVA, token omission via attention, arXiv 2401.06104).

    After each step the newest query's attention weights are averaged over all heads, and the token of the least average
    goes, the same one in every head of the layer (section 4, equation 9 of version 2). Of a prompt the tokens of the
    largest averages are kept, by the weights of its last query, as in ``tova_cache.py`` of the released code (275cf5f).

    Parameters
    ----------
    token_budget
        Cached tokens that a step reads, its own included; one of them goes after the step.
    dense_layers
        Number of first layers that keep and read the whole cache.
    per_head
        Average over the query heads of each KV head instead, so that KV heads keep tokens of their own. Section 4 has
        both kinds, and finds one average for all heads better.

    Notes
    -----
    The prompt is prefilled densely. If its last query is not known, because an unpatched model fed it or it was
    cropped, the first decode step reads every token and evicts by its own weights.
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "keeps the tokens that the newest query weighs most; evicts one per step"
    paper: ClassVar[str] = "arXiv 2401.06104"

    per_head: bool = False

    @property
    def keeps_queries(self) -> int:
        """The prompt's last query."""
        return 1

    def priority(self, layer: SparseLayer, query: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """Return the newest query's mean weights (section 4); see :meth:`EvictingMethod.priority`."""
        if query is not None:
            layer.counter.count_metadata(key_bytes(layer))
            newest = query.unsqueeze(2)
        elif layer.prompt_queries is not None and layer.prompt_queries.states.shape[2]:
            newest, scale = layer.prompt_queries.states[:, :, -1:], layer.prompt_queries.scale
        else:
            return None
        (weights,) = attention_weights(newest, layer, scale)
        mean = weights[:, :, :, 0].mean(2)
        if self.per_head:
            return mean
        shard = layer.head_shard
        return shard.all_reduce(mean.mean(1, keepdim=True)) / shard.size
