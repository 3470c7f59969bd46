"""patch_model, unpatch_model, sparse_attention: with generation.py the files that know private names of Transformers.

A patched model differs from a stock one in three places, and unpatching puts all three back:

1. ``config._attn_implementation`` names our attention function, registered beside SDPA's mask function;
2. a forward pre-hook on the decoder hands the cache to that function, and refuses what would be silently wrong;
3. an instance-level ``_prepare_cache_for_generation`` makes ``generate()`` build a :class:`SparseCache`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_sparse_attn.attention import sparse_attention_forward
from hf_sparse_attn.cache import SparseCache
from hf_sparse_attn.generation import NO_ATTENTIONS, PrepareCache, check_cache
from hf_sparse_attn.methods import SparseMethod, make_method
from hf_sparse_attn.stats import LayerCounter, SparseAttentionStats

IMPLEMENTATION = "hf_sparse_attn"
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MAX_HEAD_DIM = 256


def _attention_mask(**arguments: Any) -> torch.Tensor | None:
    """SDPA's mask; a decode step never asks the device whether it needs one.

    None without padding, where the decoder hook has taken the mask away, and for a static cache, whose layers read by
    the device's row bounds: ``generate()`` comes here between compiled steps. Otherwise a tensor.
    """
    if arguments["q_length"] == 1:
        # Transformers lets no single query of a compileable cache go without a mask; no other cache is told apart so.
        for_static_cache = not arguments["allow_is_causal_skip"]
        if for_static_cache or arguments.get("attention_mask") is None:
            return None
        arguments["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


AttentionInterface.register(IMPLEMENTATION, sparse_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, _attention_mask)

_PATCH = "_hf_sparse_attn_patch"  # the attribute of a patched model that holds its _Patch
_PREPARE_CACHE = "_prepare_cache_for_generation"


@dataclass
class _Patch:
    method: SparseMethod
    stock_implementation: str
    stock_instance_attributes: dict[str, Any]
    """What ``_prepare_cache_for_generation`` was on the instance itself, where somebody had set it."""
    hook: RemovableHandle
    counters: Sequence[LayerCounter] = ()
    """Of the most recently used cache."""


def patch_model(
    model: PreTrainedModel, method: str | SparseMethod = "quest", **hyperparameters: Any
) -> PreTrainedModel:
    """Make a model's attention sparse. ``generate()`` and ``forward`` are called as before.

    Patching a patched model replaces its method. Whatever raises leaves the model as it was.

    Parameters
    ----------
    model
        A Llama, Mistral, Qwen2 or Qwen3 decoder in evaluation mode, on any device, in fp32, bf16 or fp16.
    method
        A name in ``METHODS``, or a method such as ``Quest(token_budget=1024)``.
    hyperparameters
        The method's parameters, where it is given by name.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    TypeError
        ``model`` or ``method`` is of the wrong type.
    ValueError
        The architecture, the model's state or a hyperparameter is not supported.

    Examples
    --------
    >>> patch_model(model, "quest", token_budget=1024)
    >>> model.generate(**inputs, max_new_tokens=100)
    >>> sparse_attention_stats(model).kv_fraction
    """
    made = make_method(method, **hyperparameters)
    _check_supported(model, made)
    if is_patched(model):
        unpatch_model(model)

    stock_implementation = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    patch = _Patch(
        method=made,
        stock_implementation=stock_implementation,
        stock_instance_attributes={k: v for k, v in model.__dict__.items() if k == _PREPARE_CACHE},
        hook=model.get_decoder().register_forward_pre_hook(_DecoderHook(model), with_kwargs=True),
    )
    setattr(model, _PATCH, patch)
    if hasattr(model, _PREPARE_CACHE):  # a bare decoder cannot generate
        setattr(model, _PREPARE_CACHE, PrepareCache(model, made))
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Put a patched model back exactly as it was before :func:`patch_model`, and return it.

    Raises
    ------
    ValueError
        The model is not patched.
    """
    patch = _get_patch(model)
    patch.hook.remove()
    model.__dict__.pop(_PREPARE_CACHE, None)
    model.__dict__.pop(_PATCH)
    model.__dict__.update(patch.stock_instance_attributes)
    model.set_attn_implementation(patch.stock_implementation)
    return model


@contextmanager
def sparse_attention(
    model: PreTrainedModel, method: str | SparseMethod = "quest", **hyperparameters: Any
) -> Iterator[PreTrainedModel]:
    """Patch a model for the length of a ``with`` block; takes what :func:`patch_model` takes.

    A model that was patched before gets its former method back.
    """
    former = patched_method(model) if is_patched(model) else None
    patch_model(model, method, **hyperparameters)
    try:
        yield model
    finally:
        if former is not None:
            patch_model(model, former)
        else:
            unpatch_model(model)


def is_patched(model: PreTrainedModel) -> bool:
    """Whether :func:`patch_model` is in force on this model."""
    return _PATCH in getattr(model, "__dict__", {})


def patched_method(model: PreTrainedModel) -> SparseMethod:
    """Return the method that a model is patched with.

    Raises
    ------
    ValueError
        The model is not patched.
    """
    return _get_patch(model).method


def sparse_attention_stats(model: PreTrainedModel) -> SparseAttentionStats:
    """Tell what the decode steps of the most recently used cache read, per layer and in total.

    ``generate()`` makes a new cache for each call; with a cache of your own the counts go on over its calls. This call
    waits for the device; counting itself does not.

    Raises
    ------
    ValueError
        The model is not patched.
    """
    return SparseAttentionStats.from_counters(_get_patch(model).counters)


def _get_patch(model: PreTrainedModel) -> _Patch:
    if not is_patched(model):
        raise ValueError(f"this {type(model).__name__} is not patched; call patch_model(model) first")
    patch: _Patch = model.__dict__[_PATCH]
    return patch


class _DecoderHook:
    """Runs before the decoder: refuses what would be silently wrong, and hands on the cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.parameters = list(inspect.signature(model.get_decoder().forward).parameters)

    def __call__(
        self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the decoder's arguments with ``sparse_cache`` among them."""
        kwargs = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        cache, tokens = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        is_decode_step = tokens is not None and tokens.shape[1] == 1
        if torch.compiler.is_compiling() and is_decode_step and isinstance(cache, SparseCache) and cache.is_static:
            # The prefill was checked. What is looked at here, the compiled step would look at every time.
            cache.announce_step()
            return (), {**kwargs, "sparse_cache": cache}
        config, patch = self.model.config, _get_patch(self.model)
        if self.model.training:
            raise ValueError(_NO_TRAINING)
        wants_attentions = kwargs.get("output_attentions")
        if wants_attentions or (wants_attentions is None and config.output_attentions):
            raise ValueError(NO_ATTENTIONS)

        if cache is not None:
            check_cache(cache, patch.method)
        if tokens is None:
            return (), kwargs  # the decoder itself says what is missing
        query_length = tokens.shape[1]
        _check_positions(config, patch.method, query_length, 0 if cache is None else cache.get_seq_length())
        if cache is None:
            use_cache = kwargs.get("use_cache")
            if not (config.use_cache if use_cache is None else use_cache):
                return (), kwargs  # nothing cached, nothing to read sparsely: dense
            cache = kwargs["past_key_values"] = SparseCache(config, patch.method)
        mask = kwargs.get("attention_mask")
        cache.prepare(mask.get("full_attention") if isinstance(mask, dict) else mask, query_length)
        cache.announce_step()
        if query_length == 1 and not cache.needs_decode_mask:
            kwargs["attention_mask"] = None  # Transformers would ask the device at every step whether it is all ones
        patch.counters = [layer.counter for layer in cache.sparse_layers]
        kwargs["sparse_cache"] = cache
        return (), kwargs


_NO_TRAINING = "the model is in training mode; sparse attention is for inference: call model.eval() first"


def _check_supported(model: PreTrainedModel, method: SparseMethod) -> None:
    """Raise where the model cannot be patched with the method; looks only, changes nothing."""
    supported = ", ".join(SUPPORTED_MODEL_TYPES)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a Transformers model ({supported}), got {type(model).__name__}")
    config = model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"{type(model).__name__} (model type {config.model_type!r}) is not supported; supported: {supported}"
        )
    if model.training:
        raise ValueError(_NO_TRAINING)
    if config.output_attentions:
        raise ValueError(NO_ATTENTIONS)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{type(model).__name__} has head_dim {head_dim}; at most {MAX_HEAD_DIM} is supported")
    full_attention = SparseCache(config, method).sparse_layers
    if not full_attention:
        raise ValueError(
            f"every layer of this {type(model).__name__} has sliding-window attention "
            f"(sliding_window={config.sliding_window}); there is nothing to make sparse"
        )
    if all(layer.is_dense for layer in full_attention):
        raise ValueError(
            f"dense_layers must leave a layer to make sparse: got {method.dense_layers}, "
            f"and the model has {config.num_hidden_layers} layers"
        )


def _check_positions(config: PreTrainedConfig, method: SparseMethod, query_length: int, cached: int) -> None:
    """Raise where a prompt goes past the positions that the model knows; single decode steps are let through."""
    limit = max_positions(config)
    if query_length > 1 and cached + query_length > limit and not method.extends_positions:
        raise ValueError(
            f"the prompt has {cached + query_length} tokens, but the model has {limit} positions "
            f"(max_position_embeddings={config.max_position_embeddings}); {method.name} does not extend them"
        )


def max_positions(config: PreTrainedConfig) -> int:
    """Return how many positions a model can tell apart, with RoPE scaling counted in where the config leaves it out."""
    rope = getattr(config, "rope_parameters", None) or {}
    limit: int = config.max_position_embeddings
    if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        trained = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(trained * rope.get("factor", 1.0)))
    return limit
