"""patch_model, unpatch_model, sparse_attention: with generation.py the files that know private names of Transformers.

A patched model differs from a stock one in three places, with some methods in five, and unpatching puts all back:

1. ``config._attn_implementation`` names our attention function, registered beside SDPA's mask function;
2. a forward pre-hook on the decoder hands the cache to that function, and refuses what would be silently wrong;
3. an instance-level ``_prepare_cache_for_generation`` makes ``generate()`` build a :class:`SparseCache`;
4. where a method caches keys before RoPE, the decoder's rotary module is wrapped in one that rotates nothing;
5. where a method attends in the prefill, the decoder's ``forward`` feeds long prompts in chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_sparse_attn.attention import sparse_attention_forward
from hf_sparse_attn.cache import SparseCache
from hf_sparse_attn.chunked import ChunkedForward
from hf_sparse_attn.generation import NO_ATTENTIONS, PrepareCache, check_cache
from hf_sparse_attn.methods import SparseMethod, make_method
from hf_sparse_attn.rope import RawRotary, RopeTables, head_dim_of, max_positions
from hf_sparse_attn.stats import LayerCounter, SparseAttentionStats
from hf_sparse_attn.support import NO_TRAINING, check_consecutive, check_positions, check_supported

IMPLEMENTATION = "hf_sparse_attn"
UNMASKED_IMPLEMENTATION = "hf_sparse_attn_unmasked"  # of methods that attend by the rows' bounds in the prefill too


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


def _padding_mask(**arguments: Any) -> torch.Tensor | None:
    """The 2-D mask as it is, for the decoder hook to find the padding in: nothing attends under a mask."""
    mask: torch.Tensor | None = None if arguments["q_length"] == 1 else arguments.get("attention_mask")
    return mask


AttentionInterface.register(IMPLEMENTATION, sparse_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, _attention_mask)
AttentionInterface.register(UNMASKED_IMPLEMENTATION, sparse_attention_forward)
AttentionMaskInterface.register(UNMASKED_IMPLEMENTATION, _padding_mask)

_PATCH = "_hf_sparse_attn_patch"  # the attribute of a patched model that holds its _Patch
_PREPARE_CACHE = "_prepare_cache_for_generation"


@dataclass
class _Patch:
    method: SparseMethod
    stock_implementation: str
    stock_instance_attributes: dict[str, Any]
    """What ``_prepare_cache_for_generation`` was on the instance itself, where somebody had set it."""
    stock_decoder_attributes: dict[str, Any]
    """What ``forward`` was on the decoder itself, likewise."""
    hook: RemovableHandle
    rope_tables: RopeTables | None = None
    """Of a method that caches keys before RoPE."""
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
    check_supported(model, made)
    if is_patched(model):
        unpatch_model(model)

    stock_implementation = model.config._attn_implementation
    model.set_attn_implementation(UNMASKED_IMPLEMENTATION if made.prefills else IMPLEMENTATION)
    decoder = model.get_decoder()
    patch = _Patch(
        method=made,
        stock_implementation=stock_implementation,
        stock_instance_attributes={k: v for k, v in model.__dict__.items() if k == _PREPARE_CACHE},
        stock_decoder_attributes={k: v for k, v in decoder.__dict__.items() if k == "forward"},
        hook=decoder.register_forward_pre_hook(_DecoderHook(model), with_kwargs=True),
    )
    setattr(model, _PATCH, patch)
    positions = max_positions(model.config)
    if made.rotates_keys:
        patch.rope_tables = RopeTables(decoder.rotary_emb, made.rope_slots(positions))
        decoder.rotary_emb = RawRotary(decoder.rotary_emb, head_dim_of(model.config)).eval()
    if made.prefills:
        decoder.forward = ChunkedForward(decoder.forward, made.prefill_chunk(positions))
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
    decoder = model.get_decoder()
    decoder.__dict__.pop("forward", None)
    decoder.__dict__.update(patch.stock_decoder_attributes)
    if isinstance(decoder.rotary_emb, RawRotary):
        decoder.rotary_emb = decoder.rotary_emb.rotary
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
            raise ValueError(NO_TRAINING)
        wants_attentions = kwargs.get("output_attentions")
        if wants_attentions or (wants_attentions is None and config.output_attentions):
            raise ValueError(NO_ATTENTIONS)

        if cache is not None:
            check_cache(cache, patch.method)
        if tokens is None:
            return (), kwargs  # the decoder itself says what is missing
        query_length = tokens.shape[1]
        check_positions(config, patch.method, query_length, 0 if cache is None else cache.get_seq_length())
        if cache is None:
            use_cache = kwargs.get("use_cache")
            if not (config.use_cache if use_cache is None else use_cache):
                if patch.method.prefills:
                    raise ValueError(
                        f"use_cache=False does not go with {patch.method.name}, which attends to the cache"
                    )
                return (), kwargs  # nothing cached, nothing to read sparsely: dense
            cache = kwargs["past_key_values"] = SparseCache(config, patch.method)
        mask = kwargs.get("attention_mask")
        mask = mask.get("full_attention") if isinstance(mask, dict) else mask
        if patch.rope_tables is not None and query_length > 1:
            check_consecutive(kwargs.get("position_ids"), mask, patch.method)
        cache.prepare(mask, query_length)
        cache.announce_step()
        if patch.rope_tables is not None:
            cache.use_rope(patch.rope_tables)
        if patch.method.prefills or (query_length == 1 and not cache.needs_decode_mask):
            kwargs["attention_mask"] = None  # Transformers would ask the device at every step whether it is all ones
        patch.counters = [layer.counter for layer in cache.sparse_layers]
        kwargs["sparse_cache"] = cache
        return (), kwargs
