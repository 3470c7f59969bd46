"""Feeds tokens to a model over the cache of one sequence, single ones by a CUDA graph where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn import SparseCache
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.cli.greedy import forward, forward_all
from hf_sparse_attn.patch import pass_graph
from hf_sparse_attn.patched import is_patched

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Feed:
    """Forward passes of a model over a cache.

    A pass over a single token takes the host longer than the device if the model is small: it launches hundreds of
    kernels. As a CUDA graph it is one launch, of the same kernels.

    Parameters
    ----------
    model : PreTrainedModel
        Patched or not.
    cache : SparseCache
        Of one sequence.
    cuda_graph : bool
        Record the passes over single tokens. Those of an unpatched model, and of methods whose steps need the host, run
        one by one anyway.
    """

    def __init__(self, model: PreTrainedModel, cache: SparseCache, cuda_graph: bool = False) -> None:
        self._model, self._cache = model, cache
        can_record = cuda_graph and _can_record(model, cache)
        self._graph = pass_graph.PassGraph(cache, model, fuse=False) if can_record else None
        self._has_begun = False
        self._single = 0
        """Passes over single tokens that went through the graph: the first one still runs, as it will be recorded."""

    @property
    def is_recorded(self) -> bool:
        """Whether passes over single tokens were replays."""
        return self._single > 1

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Feed tokens and return the last one's logits, [vocabulary]."""
        if (graph := self._graph_for(token_ids)) is None:
            return forward(self._model, self._cache, token_ids)
        return self._replay(graph, token_ids)

    def all(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Feed tokens and return the logits of all, [tokens, vocabulary]."""
        if (graph := self._graph_for(token_ids)) is None:
            return forward_all(self._model, self._cache, token_ids)
        return self._replay(graph, token_ids)[None]

    def _graph_for(self, token_ids: Sequence[int]) -> pass_graph.PassGraph | None:
        """Return the graph for a pass; None for the first one, which the patch checks, and for more than a token."""
        has_begun, self._has_begun = self._has_begun, True
        return self._graph if has_begun and len(token_ids) == 1 else None

    def _replay(self, graph: pass_graph.PassGraph, token_ids: Sequence[int]) -> torch.Tensor:
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        inputs = {"input_ids": input_ids, "use_cache": True, "logits_to_keep": 1, CACHE: self._cache}
        self._single += 1
        with torch.inference_mode():
            return graph(inputs)[0, -1].clone()  # the next pass overwrites it


def _can_record(model: PreTrainedModel, cache: SparseCache) -> bool:
    if not is_patched(model):
        return False
    try:
        pass_graph.check_recordable(model, model.device, cache)
    except ValueError:
        return False
    return True
