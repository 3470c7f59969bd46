"""Patch and unpatch models.

A patched model differs from a stock one in five places. Unpatching removes only what patching added.

1. ``config`` is a copy of the model's own, so models that share a configuration do not share the patch.
   ``config._attn_implementation`` names the sparse attention function, registered together with a mask function. In a
   multimodal model only the text decoder's configuration names it, and those that hold that one are copies too. The
   same is done for layers that have a configuration of their own, since they come from another model or are copies.
2. Hooks around the decoder pass the cache to that function, check the arguments, and feed long prompts in chunks if the
   method asks for it.
3. An instance-level ``_prepare_cache_for_generation`` makes ``generate()`` build a :class:`SparseCache`, and an
   instance-level ``init_continuous_batching`` raises, because continuous batching has a paged cache of its own.
4. If the method rehearses, a hook before each attention module makes a query from the previous module's input.
5. If the method caches keys before RoPE, a hook on the decoder's rotary module disables its rotation; if it changes
   RoPE, a hook replaces its rotation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_sparse_attn.attention import sparse_attention_forward
from hf_sparse_attn.head_shard import HeadShard
from hf_sparse_attn.methods import SparseMethod, make_method
from hf_sparse_attn.patch.generation import PrepareCache, RefuseContinuousBatching
from hf_sparse_attn.patch.hook import DecoderHooks
from hf_sparse_attn.patch.hook_ids import register
from hf_sparse_attn.patch.rehearsal import rehearse
from hf_sparse_attn.patch.support import check_supported, check_type, check_uncompiled, has_prefix
from hf_sparse_attn.patch.tensor_parallel import agreement, head_shard_of, ranks_of
from hf_sparse_attn.patched import (
    Patch,
    base_model,
    configs_of_layers,
    get_patch,
    is_patched,
    set_patch,
    text_model,
)
from hf_sparse_attn.rope import OtherRope, RopeTables, decoder_rotary, max_positions, rotate_nothing

if TYPE_CHECKING:
    from hf_sparse_attn.record import SelectionRecord

IMPLEMENTATION = "hf_sparse_attn"
UNMASKED_IMPLEMENTATION = "hf_sparse_attn_unmasked"  # for methods that use row bounds in the prefill too
IMPLEMENTATIONS = (IMPLEMENTATION, UNMASKED_IMPLEMENTATION)
STAND_INS = {
    "_prepare_cache_for_generation": PrepareCache,
    "init_continuous_batching": RefuseContinuousBatching,
}
"""Model methods that patching replaces, each by an instance of a class that takes the model and the method."""


def _attention_mask(**arguments: Any) -> torch.Tensor | None:
    """Return SDPA's mask. For a decode step, decide without reading the device whether one is needed.

    A decode step gets None if the decoder hook removed the mask, and for a static cache, whose layers read by the row
    bounds on the device. ``generate()`` calls this between compiled steps.
    """
    if arguments["q_length"] == 1:
        # Transformers disallows the skip exactly for single queries of a compileable cache.
        for_static_cache = not arguments["allow_is_causal_skip"]
        if for_static_cache or arguments.get("attention_mask") is None:
            return None
        arguments["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(**arguments)
    return mask


def _padding_mask(**arguments: Any) -> torch.Tensor | None:
    """Return the 2-D mask unchanged: the decoder hook reads the padding from it, and nothing attends under it."""
    mask: torch.Tensor | None = arguments.get("attention_mask")
    if arguments["q_length"] == 1:
        return mask if arguments["allow_is_causal_skip"] else None  # None for a static cache, as above
    if not arguments["allow_is_causal_skip"]:  # the mask is more than causal attention between tokens
        raise ValueError(
            "the model masks this prompt in a way of its own, such as attention to later tokens of an image, or texts "
            "in one row whose position_ids begin anew, and the method that it is patched with attends by causal rows "
            "alone; use another method, such as 'quest'"
        )
    return mask


AttentionInterface.register(IMPLEMENTATION, sparse_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, _attention_mask)
AttentionInterface.register(UNMASKED_IMPLEMENTATION, sparse_attention_forward)
AttentionMaskInterface.register(UNMASKED_IMPLEMENTATION, _padding_mask)


def patch_model(
    model: PreTrainedModel,
    method: str | SparseMethod = "quest",
    *,
    kv_storage: str = "device",
    **hyperparameters: Any,
) -> PreTrainedModel:
    """Make a model's attention sparse. ``generate()`` and ``forward`` are called as before.

    Patching a patched model replaces its method. If this raises, the model is unchanged.

    Parameters
    ----------
    model
        A model of a supported type (Llama, Qwen3, Gemma 3, ...; docs/compatibility.md lists them) in evaluation mode,
        on any device, in fp32, bf16 or fp16; or a PEFT model around one. Of a multimodal model (Qwen2.5-VL, LLaVA,
        ...), the text decoder's attention is made sparse; encoders of images and sound stay as they are.
    method
        A name in ``METHODS``, or a method such as ``Quest(token_budget=1024)``.
    kv_storage
        Where the caches that the model creates keep K and V: ``"device"``, or ``"host"`` for host memory, which
        the kernels of decode steps read themselves, so that a context need not fit into the device's memory. Methods
        whose steps read keys that they do not select are refused.
    hyperparameters
        The method's parameters, if ``method`` is a name.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    TypeError
        ``model`` or ``method`` has the wrong type.
    ValueError
        The architecture, the model's state, ``kv_storage`` or a hyperparameter is not supported. Under tensor
        parallelism: the number of ranks does not divide the heads, a rank could not be patched, or ranks differ in the
        method, its hyperparameters, ``kv_storage`` or versions. Every rank then raises.
    OSError
        A file that a hyperparameter names cannot be read.
    RuntimeError
        Under tensor parallelism: a rank did not patch its part of the model within a minute.

    Examples
    --------
    >>> patch_model(model, "quest", token_budget=1024)
    >>> model.generate(**inputs, max_new_tokens=100)
    >>> sparse_attention_stats(model).kv_fraction
    """
    check_uncompiled(model)
    inner = base_model(model)
    with agreement(ranks_of(inner)) as settings:
        checked = make_method(method, **hyperparameters)
        takes_prefix = has_prefix(model)
        check_type(inner)
        head_shard = head_shard_of(inner)
        check_supported(inner, checked, takes_prefix, kv_storage, head_shard)
        _check_patched_once(inner)
        settings |= {"method": repr(checked), "kv_storage": kv_storage}
    recorder = _take_out(inner).recorder if is_patched(inner) else None
    _put_in(inner, checked, kv_storage, takes_prefix, head_shard, recorder)
    return model


def _check_patched_once(model: PreTrainedModel) -> None:
    """Raise if a model's decoder, or a layer, is patched already as part of another model."""
    text = text_model(model)
    own = [config for _, config in get_patch(model).configs] if is_patched(model) else []
    for config in configs_of_layers(text):
        if config._attn_implementation in IMPLEMENTATIONS and not any(config is each for each in own):
            raise ValueError(
                f"a layer of this {type(model).__name__} is, or is a copy of, one of a model that is patched already: "
                "call unpatch_model on that model before its layers are taken"
            )
    for hook in text.get_decoder()._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, DecoderHooks) and owner.model is not model:
            raise ValueError(
                f"the decoder of this {type(model).__name__} is patched already, by patch_model of a "
                f"{type(owner.model).__name__} that shares it: call unpatch_model on that model first"
            )


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the patch of :func:`patch_model` from a model, and return the model.

    Other changes made since (hooks, attributes, the configuration) stay.

    Raises
    ------
    ValueError
        The model is not patched.
    """
    get_patch(model)
    _take_out(base_model(model))
    return model


@contextmanager
def sparse_attention(
    model: PreTrainedModel,
    method: str | SparseMethod = "quest",
    *,
    kv_storage: str = "device",
    **hyperparameters: Any,
) -> Iterator[PreTrainedModel]:
    """Patch a model inside a ``with`` block, with the arguments of :func:`patch_model`.

    A model that was patched before gets its former method, ``kv_storage`` and statistics back at the end.
    """
    former = get_patch(model) if is_patched(model) else None
    patch_model(model, method, kv_storage=kv_storage, **hyperparameters)
    try:
        yield model
    finally:  # no checks here: patch_model has checked the former state
        inner = base_model(model)
        recorder = _take_out(inner).recorder if is_patched(inner) else None
        if former is not None:
            _put_in(inner, former.method, former.kv_storage, has_prefix(model), former.head_shard, recorder)
            restored = get_patch(inner)
            restored.counters, restored.shared = former.counters, former.shared


def _put_in(
    model: PreTrainedModel,
    method: SparseMethod,
    kv_storage: str,
    takes_prefix: bool,
    head_shard: HeadShard,
    recorder: SelectionRecord | None,
) -> None:
    text = text_model(model)
    decoder = text.get_decoder()
    configs = _copied_configs(model, text)
    patch = Patch(
        method,
        configs=configs,
        copied=[dict(vars(own)) for _, own in configs],
        decoder=decoder,
        kv_storage=kv_storage,
        head_shard=head_shard,
        takes_prefix=takes_prefix,
        recorder=recorder,
    )
    for stock, own in patch.configs:
        _replace_config(model, stock, own)
    text.set_attn_implementation(IMPLEMENTATION if method.needs_mask else UNMASKED_IMPLEMENTATION)
    for config in configs_of_layers(text):
        config._attn_implementation_internal = text.config._attn_implementation
    set_patch(model, patch)
    hooks = DecoderHooks(model, IMPLEMENTATIONS)
    before = partial(decoder.register_forward_pre_hook, hooks.before, with_kwargs=True)
    after = partial(decoder.register_forward_hook, hooks.after, prepend=True, with_kwargs=True, always_call=True)
    patch.hooks += [register(decoder, "before", before), register(decoder, "after", after)]
    if method.rotates_keys:
        patch.rotary = rotary = decoder_rotary(text)
        patch.rope_tables = RopeTables(rotary, method.rope_slots(max_positions(text.config)))
        patch.hooks.append(register(rotary, "rotary", partial(rotary.register_forward_hook, rotate_nothing)))
    elif method.changes_rope:
        patch.rotary = rotary = decoder_rotary(text)
        other = OtherRope(rotary, method.rope_config(patch.configs[0][0]))
        hook = partial(rotary.register_forward_hook, other, with_kwargs=True)
        patch.hooks.append(register(rotary, "rotary", hook))
    for layer in decoder.layers if method.rehearses else ():
        attention = layer.self_attn
        hook = partial(attention.register_forward_pre_hook, rehearse, with_kwargs=True)
        patch.hooks.append(register(attention, "rehearsal", hook))
    for name, stand_in in STAND_INS.items():
        if hasattr(model, name):  # a bare decoder cannot generate
            if name in model.__dict__:
                patch.stock_attributes[name] = model.__dict__[name]
            setattr(model, name, stand_in(model, getattr(model, name)))


def _take_out(model: PreTrainedModel) -> Patch:
    """Take a patch out of a model and return it."""
    patch = get_patch(model)
    for hook in patch.hooks:
        hook.remove()
    for name, stand_in in STAND_INS.items():
        if isinstance(model.__dict__.get(name), stand_in):
            model.__dict__.pop(name)
            if name in patch.stock_attributes:
                model.__dict__[name] = patch.stock_attributes[name]
    for (stock, own), copied in zip(patch.configs, patch.copied, strict=True):
        _replace_config(model, own, _config_to_put_back(own, stock, copied, patch))
    for config in configs_of_layers(text_model(model)):  # copies of patched layers have copies of their configuration
        if config._attn_implementation in IMPLEMENTATIONS:
            _replace_config(model, config, patch.configs[0][0])
    set_patch(model, None)
    return patch


def _copied_configs(model: PreTrainedModel, text: PreTrainedModel) -> list[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """Return the configurations of ``Patch.configs`` with their copies, in which that of the text is a copy too."""
    text_config = text.config
    copied = [(text_config, copy.copy(text_config))]
    copied += [(config, copy.copy(config)) for config in configs_of_layers(text)]
    in_use = {id(config): config for module in model.modules() if (config := module.__dict__.get("config")) is not None}
    for config in in_use.values():
        held = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else config
        names = [name for name, value in vars(config).items() if value is held]
        if names and held.model_type == text_config.model_type:
            own = copy.copy(config)
            own.__dict__.update(dict.fromkeys(names, copied[0][1]))
            copied.append((config, own))
    return copied


def _replace_config(model: PreTrainedModel, old: PreTrainedConfig, new: PreTrainedConfig) -> None:
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new


def _config_to_put_back(
    patched: PreTrainedConfig, stock: PreTrainedConfig, copied: dict[str, Any], patch: Patch
) -> PreTrainedConfig:
    """Return the stock configuration, updated with changes made to the copy while the model was patched.

    What was set on the stock one meanwhile, as through another model that has it too, stays.
    """
    for name, value in patched.__dict__.items():
        is_ours = name == "_attn_implementation_internal" and value in IMPLEMENTATIONS
        is_ours |= any(value is own for _, own in patch.configs)
        if not is_ours and (name not in copied or copied[name] is not value):
            stock.__dict__[name] = value
    return stock
