"""A decode step recorded as a CUDA graph, without compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.patch.answer import Answer
from hf_sparse_attn.patch.generation import is_step_one_graph
from hf_sparse_attn.patched import get_patch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_recordable(model: PreTrainedModel, device: torch.device, cache: SparseCache) -> None:
    """Raise ``ValueError`` if a model's decode steps over a cache cannot be recorded on a device."""
    if not is_step_one_graph(model):
        raise ValueError(
            f"cuda_graph=True is not supported by this {type(model).__name__}: a decode step of it needs the host, or "
            "several devices"
        )
    if not can_record(device) or not cache.is_compileable:
        raise ValueError(
            "cuda_graph=True needs a CUDA device and a static cache (cache_implementation='static', or "
            f"SparseCache.for_model(model, max_cache_len=...)), got {str(device)!r} and a "
            f"{'static' if cache.is_compileable else 'growing'} cache"
        )


def can_record(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda"


class StepGraph:
    """Decode steps of one answer, repeated by a CUDA graph.

    The first step runs as it will be recorded, so that all kernels are loaded. The second step is recorded, and it and
    all later ones are replays. A replay repeats the device's work alone: the cache's lengths and counts advance on the
    device.

    Parameters
    ----------
    answer
        The answer, whose prompt has been processed.

    Raises
    ------
    ValueError
        ``record_selections`` is active, whose records the host makes; or the cache is full before the answer is, is not
        static, or lies on several devices.
    """

    def __init__(self, answer: Answer) -> None:
        if get_patch(answer.model).recorder is not None:
            raise ValueError("record_selections cannot record the steps of a CUDA graph: leave cuda_graph=True out")
        with answer.cache.captured():
            pass  # raises if the cache does not allow it
        room, needed = answer.cache.max_cache_len - answer.cache.length, answer.remaining - 1
        if room < needed:
            raise ValueError(
                f"{needed} more tokens may be cached, but past_key_values has room for {room}, and a CUDA graph cannot "
                "tell that it is full: create a larger cache, or generate fewer tokens"
            )
        self._answer = answer
        self._inputs: dict[str, Any] = {}
        self._logits: torch.Tensor | None = None
        self._replay: Callable[[], object] | None = None

    def step(self) -> torch.Tensor:
        """Feed the last tokens; return a float32 copy of their logits, [batch, vocabulary]."""
        inputs = self._answer.next_inputs()
        if not self._inputs:
            self._inputs = {
                name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
            }
            return self._answer.exact(self._run())
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                self._inputs[name].copy_(value)
        if self._replay is None:
            self._replay, self._logits = record(self._run, self._answer.ids.device)
        self._replay()
        assert self._logits is not None
        return self._answer.exact(self._logits)

    def _run(self) -> torch.Tensor:
        with self._answer.cache.captured():
            logits: torch.Tensor = self._answer.model(**self._inputs, return_dict=True).logits[:, -1]
        return logits


def record(function: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], object], torch.Tensor]:
    """Record what a function does on a CUDA device, without doing it.

    Returns
    -------
    tuple
        A function that does it, and the tensor that holds the result then.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        result = function()
    return graph.replay, result
