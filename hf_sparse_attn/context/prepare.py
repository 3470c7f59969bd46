"""Preparation of a fixed context: prefill, clustering and calibration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tqdm.auto import tqdm

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.prefix import Prefix, hash_token_ids
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.checks import one_text, token_ids, whole_number
from hf_sparse_attn.clusters.thresholds import thresholds
from hf_sparse_attn.context.fixed import FixedContext, first_rows, with_thresholds
from hf_sparse_attn.context.times import PreparationSeconds
from hf_sparse_attn.identity import ModelIdentity
from hf_sparse_attn.methods import Squeezed, make_method
from hf_sparse_attn.methods.clustered import index_bytes
from hf_sparse_attn.patch.chunked import without_single_token
from hf_sparse_attn.patch.patch import sparse_attention
from hf_sparse_attn.patch.support import check_type
from hf_sparse_attn.patch.tensor_parallel import head_shard_of
from hf_sparse_attn.patched import base_model, is_multimodal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def prepare_context(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[int],
    method: Squeezed | None = None,
    *,
    chunk_size: int = 8192,
    progress: bool | Progress = True,
    **hyperparameters: Any,
) -> FixedContext:
    """Prefill a fixed context, cluster its keys, and calibrate the threshold (arXiv 2411.09688).

    The model is afterwards as it was before, patched or not.

    Parameters
    ----------
    model
        A model that :func:`patch_model` supports, without sliding-window layers.
    input_ids
        The context's token ids, [tokens] or [1, tokens]; more than ``sink_tokens + window`` tokens.
    method
        The method; default: ``Squeezed(**hyperparameters)``.
    chunk_size
        Tokens of the context in a forward pass: more take more memory. The passes take a few more if one would be
        left with a single token.
    progress
        Whether to show progress bars on stderr; or a function that gets the parts of a stage and its name,
        ``"Prefill"`` or ``"Clustering"``, and yields the parts one by one.
    hyperparameters
        Fields of :class:`Squeezed`: ``target_sparsity``, ``clusters``, ``levels`` and others.

    Returns
    -------
    FixedContext

    Raises
    ------
    TypeError
        ``model`` is no Transformers model, ``input_ids`` or ``chunk_size`` are not whole numbers, ``method`` is not a
        :class:`Squeezed`, or ``progress`` is neither a bool nor a function.
    ValueError
        A hyperparameter or a token id is out of range, the context is not longer than ``sink_tokens + window`` or
        longer than the model's positions, or the model is not supported, multimodal, or divided by tensor parallelism.

    Examples
    --------
    >>> context = prepare_context(model, tokenizer(novel, return_tensors="pt").input_ids, target_sparsity=0.9)
    >>> patch_model(model, context.method)
    >>> cache = context.cache(max_cache_len=512)
    >>> model.generate(**tokenizer(question, return_tensors="pt"), past_key_values=cache, max_new_tokens=200)
    """
    check_type(model)
    if is_multimodal(model):
        raise ValueError(
            f"prepare_context does not support multimodal models, got {type(base_model(model)).__name__}; allowed: "
            "models of text alone"
        )
    head_shard_of(base_model(model)).require_whole("prepare_context")
    chosen = make_method("squeezed" if method is None else method, **hyperparameters)
    if not isinstance(chosen, Squeezed):
        raise TypeError(f"method must be a Squeezed, got {chosen!r}")
    ids = token_ids("input_ids", input_ids, base_model(model).config.vocab_size).to(base_model(model).device)
    ids = _checked(ids, chosen)
    chunk_size = whole_number("chunk_size", chunk_size, 1)
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress must be True, False or a function, got {progress!r}")
    tokens, device = ids.shape[1], ids.device
    started = _now(device)
    with torch.no_grad(), sparse_attention(model, chosen):
        config = base_model(model).config
        cache = SparseCache(config, chosen, initial_capacity=tokens)
        decoder = base_model(model).get_decoder()
        parts = torch.split(ids, without_single_token(chunk_size, tokens), dim=1)
        for part in _shown(parts, "Prefill", progress):
            decoder(input_ids=part, use_cache=True, **{CACHE: cache})
    prefilled = _now(device)
    queries = [chosen.observed(layer, 0) for layer in cache.sparse_layers]
    layers = [_packed(layer, chosen) for layer in _shown(cache.sparse_layers, "Clustering", progress)]
    clustered = _now(device)
    indices = [first_rows(layer.metadata) for layer in layers]
    found = thresholds(queries, indices, chosen.target_sparsity)
    layers = [with_thresholds(layer, found) for layer in layers]
    seconds = PreparationSeconds(prefilled - started, clustered - prefilled, _now(device) - clustered)
    return FixedContext(
        method=chosen,
        config=base_model(model).config,
        identity=ModelIdentity.of(model),
        token_ids_hash=hash_token_ids(ids),
        layers=layers,
        queries=queries,
        seconds=seconds,
    )


def _now(device: torch.device) -> float:
    """Return the time at which the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _checked(ids: torch.Tensor, method: Squeezed) -> torch.Tensor:
    """Return the ids of one text as [1, tokens]."""
    ids = one_text(ids)
    if ids.shape[1] <= method.sink_tokens + method.window:
        raise ValueError(
            f"input_ids must have more than sink_tokens + window = {method.sink_tokens + method.window} tokens, which "
            f"are not clustered, got {ids.shape[1]}"
        )
    return ids


def _packed(layer: SparseLayer, method: Squeezed) -> Prefix:
    """Cluster a layer's tokens, copy them in cluster order, and free its buffers."""
    keys, values = layer.keys[0, :, : layer.length], layer.values[0, :, : layer.length]
    index = method.cluster(keys, recent=method.window)
    order = index["token_order"]
    places = order.long()[..., None].expand(-1, -1, keys.shape[2])
    sorted_keys, sorted_values = keys.gather(1, places), values.gather(1, places)
    layer.storage.keys, layer.storage.values = layer.keys[:, :, :0].clone(), layer.values[:, :, :0].clone()
    metadata = {name: tensor[None] for name, tensor in index.items()}
    metadata["context_start"] = order.new_zeros(1)
    metadata["context_lengths"] = order.new_tensor([order.shape[1]])
    metadata["index_bytes"] = torch.tensor([index_bytes(index)], device=keys.device)
    return Prefix(sorted_keys[None], sorted_values[None], metadata)


def _shown(parts: Sequence[T], description: str, progress: bool | Progress) -> Iterable[T]:
    if callable(progress):
        return progress(parts, description)
    shown: Iterable[T] = tqdm(parts, desc=description, disable=not progress)
    return shown
