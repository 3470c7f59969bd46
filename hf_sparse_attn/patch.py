"""patch_model, unpatch_model, sparse_attention: the only file that knows private names of Transformers.

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
from hf_sparse_attn.methods import SparseMethod, make_method
from hf_sparse_attn.stats import LayerCounter, SparseAttentionStats

IMPLEMENTATION = "hf_sparse_attn"
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MAX_HEAD_DIM = 256


def _attention_mask(**arguments: Any) -> torch.Tensor | None:
    """SDPA's mask; for a decode step always a tensor, since finding out that none is needed waits for the device.

    Decode steps without padding do not come here with a mask: the decoder hook has taken it away.
    """
    if arguments["q_length"] == 1 and arguments.get("attention_mask") is not None:
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
        setattr(model, _PREPARE_CACHE, _PrepareCache(model))
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


class _PrepareCache:
    """Stands in for ``model._prepare_cache_for_generation``: ``generate()`` gets a :class:`SparseCache`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        **kwargs: Any,
    ) -> None:
        """Write the cache to ``model_kwargs``, as the method that it stands in for does."""
        if generation_config.use_cache is False:
            raise ValueError("use_cache=False leaves nothing to make sparse: unpatch the model, or drop the argument")
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} does not go with a patched model, "
                "which builds its own SparseCache; it must be None"
            )
        if generation_config.output_attentions:
            raise ValueError(_NO_ATTENTIONS)
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            cache = SparseCache(self.model.config, patched_method(self.model), initial_capacity=max_cache_length)
            model_kwargs["past_key_values"] = cache
        else:
            _check_cache(cache, patched_method(self.model))
            cache._is_user_defined = True  # generate() does not feed the cached tokens again
        if generation_config.is_assistant:
            cache.activate_past_recording()


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
        config, patch = self.model.config, _get_patch(self.model)
        if self.model.training:
            raise ValueError(_NO_TRAINING)
        wants_attentions = kwargs.get("output_attentions")
        if wants_attentions or (wants_attentions is None and config.output_attentions):
            raise ValueError(_NO_ATTENTIONS)

        cache = kwargs.get("past_key_values")
        if cache is not None:
            _check_cache(cache, patch.method)
        tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if tokens is None:
            return (), kwargs  # the decoder itself says what is missing
        query_length = tokens.shape[1]
        _check_positions(config, patch.method, query_length, 0 if cache is None else cache.get_seq_length())
        if cache is None:
            use_cache = kwargs.get("use_cache")
            if not (config.use_cache if use_cache is None else use_cache):
                return (), kwargs  # nothing cached, nothing to read sparsely: dense
            cache = kwargs["past_key_values"] = SparseCache(config, patch.method)
        cache.prepare(kwargs.get("attention_mask"), query_length)
        if query_length == 1 and not cache.has_padding:
            kwargs["attention_mask"] = None  # all ones: Transformers would ask the device at every step
        patch.counters = [layer.counter for layer in cache.sparse_layers]
        kwargs["sparse_cache"] = cache
        return (), kwargs


_NO_TRAINING = "the model is in training mode; sparse attention is for inference: call model.eval() first"
_NO_ATTENTIONS = "output_attentions=True is not supported: sparse attention computes no full attention weights"


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
        raise ValueError(_NO_ATTENTIONS)
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


def _check_cache(cache: Any, method: SparseMethod) -> None:
    if not isinstance(cache, SparseCache):
        raise TypeError(
            f"past_key_values must be a SparseCache for a patched model, got {type(cache).__name__}; "
            "make one with SparseCache.for_model(model)"
        )
    if cache.method != method:
        raise ValueError(f"past_key_values was made for {cache.method}, but the model is patched with {method}")


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
