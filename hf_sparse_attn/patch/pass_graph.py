"""Forward passes recorded as a CUDA graph, without compilation of the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.checks import boolean
from hf_sparse_attn.patch.combinations import Combinations
from hf_sparse_attn.patch.fused import fused
from hf_sparse_attn.patch.generation import is_step_one_graph
from hf_sparse_attn.patched import get_patch

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer


def check_loop(streamer: BaseStreamer | None, cuda_graph: bool, fuse: bool) -> None:
    """Check the arguments of a loop for ``generate()``.

    Raises
    ------
    TypeError
        ``streamer`` is no streamer, or another argument no bool.
    """
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end, or be None, got {streamer!r}")
    boolean("cuda_graph", cuda_graph)
    boolean("fuse", fuse)


def check_recordable(model: PreTrainedModel, device: torch.device, cache: SparseCache) -> None:
    """Raise ``ValueError`` if a model's passes over a cache cannot be recorded on a device."""
    if not is_step_one_graph(model):
        raise ValueError(
            f"cuda_graph=True is not supported by this {type(model).__name__}: a decode step of it needs the host, or "
            "several devices, or it reads images and Transformers is older than 5.23"
        )
    group = get_patch(model).head_shard.group
    if group is not None and torch.distributed.get_backend(group) != "nccl":
        raise ValueError(
            "cuda_graph=True needs the NCCL backend under tensor parallelism, got "
            f"{torch.distributed.get_backend(group)!r}"
        )
    if get_patch(model).recorder is not None:
        raise ValueError("record_selections cannot record the steps of a CUDA graph: leave cuda_graph=True out")
    if not can_record(device) or not cache.is_compileable:
        raise ValueError(
            "cuda_graph=True needs a CUDA device and a static cache (cache_implementation='static', or "
            f"SparseCache.for_model(model, max_cache_len=...)), got {str(device)!r} and a "
            f"{'static' if cache.is_compileable else 'growing'} cache"
        )


def can_record(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda"


class PassGraph:
    """Forward passes of a model, of one shape and over one cache, repeated by a CUDA graph.

    The first pass runs as it will be recorded, so that all kernels are loaded. The second pass is recorded; it and all
    later ones are replays. A replay repeats the device's work alone: the cache's lengths and counts advance there.

    Parameters
    ----------
    cache
        A static cache, which holds a prompt.
    model
        A model that is patched for the cache.
    fuse
        Whether to compile parts of it (:func:`~hf_sparse_attn.patch.fused.fused`).
    """

    def __init__(self, cache: SparseCache, model: PreTrainedModel, fuse: bool) -> None:
        self._cache, self._model, self._fuse = cache, model, fuse
        self._inputs: dict[str, Any] = {}
        self._held: list[Any] = []
        """The values in the arguments, at any depth."""
        self._logits: torch.Tensor | None = None
        self._replay: Callable[[], object] | None = None
        self._combinations = Combinations()

    def __call__(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Run a pass by the model's arguments; return its logits, which the next pass overwrites.

        Tensors in the arguments, such as a mask for each kind of layers, have the shapes of the first pass, and others
        its values.

        Raises
        ------
        RuntimeError
            The pass cannot be recorded.
        """
        if not self._inputs:
            self._inputs = tree_map_only(torch.Tensor, torch.clone, inputs)
            self._held = tree_leaves(self._inputs)
            return self._run()
        for held, value in zip(self._held, tree_leaves(inputs), strict=True):
            if isinstance(value, torch.Tensor):
                held.copy_(value)
        if self._replay is None:
            self._replay, self._logits = self._record(inputs["input_ids"].device)
        self._replay()
        self._cache.note_replay()
        assert self._logits is not None
        return self._logits

    def _record(self, device: torch.device) -> tuple[Callable[[], object], torch.Tensor]:
        try:
            return record(self._run, device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"the pass cannot be recorded as a CUDA graph: {error}. If it makes the host wait, as that of a model "
                "with experts_implementation='eager' does, leave cuda_graph=True out"
            ) from error

    def _run(self) -> torch.Tensor:
        with self._cache.captured(), fused(self._model, self._combinations) if self._fuse else nullcontext():
            logits: torch.Tensor = self._model(**self._inputs, return_dict=True).logits
        return logits


def record(function: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], object], torch.Tensor]:
    """Record what a function does on a CUDA device, without doing it.

    Returns
    -------
    tuple
        A function that does it, and the tensor that holds the result then.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on with what a recording does not allow, such as allocations. This one may not collect
    # garbage, since freeing an earlier graph would spoil the recording.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = function()
    finally:
        if collects:
            gc.enable()
    return graph.replay, result
