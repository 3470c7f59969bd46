"""Checks of models before patching, and of a patched model's inputs; they change nothing."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.head_shard import WHOLE, HeadShard
from hf_sparse_attn.heads import head_dim_of
from hf_sparse_attn.methods import FULL, SparseMethod
from hf_sparse_attn.patch.families import DECODERS, FAMILIES, MULTIMODAL, in_short, refusal
from hf_sparse_attn.patch.generation import NO_ATTENTIONS
from hf_sparse_attn.patch.tensor_parallel import ranks_of
from hf_sparse_attn.patched import is_multimodal, text_model
from hf_sparse_attn.rope import max_positions

MAX_HEAD_DIM = 256
NO_TRAINING = "the model is in training mode; sparse attention is for inference: call model.eval() first"


def check_uncompiled(model: PreTrainedModel) -> None:
    """Raise if a model is what ``torch.compile`` returned: what it has compiled would not see the patch."""
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            f"model must be a Transformers model, got {type(model).__name__}, which torch.compile returns: patch the "
            "model itself, and compile it afterwards"
        )


def check_type(model: PreTrainedModel) -> None:
    """Raise if a model is not of a supported type, or holds a text decoder of one that is not."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a Transformers model ({in_short()}), got {type(model).__name__}")
    kind, supported = model.config.model_type, FAMILIES | DECODERS
    if kind in supported:
        return
    who = f"{type(model).__name__} (model type {kind!r})"
    if kind not in MULTIMODAL:
        raise ValueError(f"{who} is not supported: {refusal(kind, _text_type(model))}; supported: {in_short()}")
    text = text_model(model)
    text_kind = text.config.model_type
    if text_kind not in supported:
        raise ValueError(
            f"{who} is not supported with a text decoder of model type {text_kind!r}: {refusal(text_kind)}; "
            f"supported: {in_short()}"
        )
    if text is model or not hasattr(text.get_decoder(), "layers"):
        raise ValueError(f"{who} holds no text decoder: patch the model that does")


def _text_type(model: PreTrainedModel) -> str | None:
    """Return the model type of a model's text; None if its configuration has several."""
    try:
        kind: str = model.config.get_text_config(decoder=True).model_type
    except ValueError:
        return None
    return kind


def check_supported(
    model: PreTrainedModel,
    method: SparseMethod,
    takes_prefix: bool = False,
    kv_storage: str = "device",
    head_shard: HeadShard = WHOLE,
) -> None:
    """Raise if a model, of a type that :func:`check_type` allows, cannot be patched with the method."""
    if takes_prefix and method.rotates_keys:
        raise ValueError(
            f"method {method.name!r} caches keys before RoPE, which does not work with a learned prefix (PEFT's prefix "
            "tuning); use a method that caches keys after RoPE, such as 'quest'"
        )
    if takes_prefix and method.needs_weights:
        raise ValueError(
            f"method {method.name!r} adds up the attention weights of every query, and a learned prefix (PEFT's prefix "
            "tuning) has keys without queries; use another method, such as 'tova'"
        )
    if is_multimodal(model):
        _check_multimodal(model, takes_prefix)
    text = text_model(model)
    config = text.config
    _check_family(model, config, method)
    if model.training or text.training or text.get_decoder().training:
        raise ValueError(NO_TRAINING)
    if model.config.output_attentions or config.output_attentions:
        raise ValueError(NO_ATTENTIONS)
    head_dim = head_dim_of(config)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{type(model).__name__} has head_dim {head_dim}; at most {MAX_HEAD_DIM} is supported")
    method.check_model(text)
    cache = SparseCache(config, method, kv_storage=kv_storage, head_shard=head_shard)
    _check_layer_numbers(text, len(cache.layers))
    full_attention = cache.sparse_layers
    if (method.rotates_keys or not method.needs_mask) and len(full_attention) < len(cache.layers):
        raise ValueError(
            f"method {method.name!r} does not support sliding-window layers, and "
            f"{len(cache.layers) - len(full_attention)} of this {type(model).__name__}'s {len(cache.layers)} layers "
            f"have one (sliding_window={_window(config)})"
        )
    if not full_attention:
        raise ValueError(
            f"every layer of this {type(model).__name__} has sliding-window attention "
            f"(sliding_window={_window(config)}); there is nothing to make sparse"
        )
    if method.dense_layers and all(layer.method is FULL for layer in full_attention):
        raise ValueError(
            f"dense_layers must leave at least one layer to make sparse, got {method.dense_layers} for a model of "
            f"{config.num_hidden_layers} layers"
        )
    cache.check_rows(1)


def _check_layer_numbers(text: PreTrainedModel, cached: int) -> None:
    """Raise if a model has no layer for one of its cache, as after pruning: it would never be filled."""
    modules = text.get_decoder().modules()
    numbers = {number for module in modules if isinstance(number := module.__dict__.get("layer_idx"), int)}
    missing = sorted(set(range(cached)) - numbers)
    if numbers and missing:
        raise ValueError(
            f"this {type(text).__name__} has no layer of layer_idx {', '.join(map(str, missing))}, but its "
            f"configuration asks for {cached} (num_hidden_layers={text.config.num_hidden_layers}): number its layers "
            "from 0 on, and set num_hidden_layers, and layer_types if it has them, to match"
        )


def _check_multimodal(model: PreTrainedModel, takes_prefix: bool) -> None:
    """Raise if a multimodal model is used in a way that has not been checked."""
    who = f"the multimodal {type(model).__name__}"
    if takes_prefix:
        raise ValueError(f"a learned prefix (PEFT's prefix tuning) is not supported by {who}")
    if not ranks_of(model).is_whole:
        raise ValueError(f"tensor parallelism is not supported by {who}; allowed: one process")


def _check_family(model: PreTrainedModel, config: PreTrainedConfig, method: SparseMethod) -> None:
    """Raise if the model type or its text's configuration does not allow the method, or attends otherwise."""
    family = (FAMILIES | DECODERS)[config.model_type]
    inside = f", text decoder {config.model_type!r}" if is_multimodal(model) else ""
    who = f"{type(model).__name__} (model type {model.config.model_type!r}{inside})"
    if method.rotates_keys and family.rotation is not None:
        raise ValueError(
            f"method {method.name!r} caches keys before RoPE and rotates them itself, which {who} does not allow: "
            f"{family.rotation}; use a method that caches keys after RoPE, such as 'quest'"
        )
    if method.rehearses and family.rehearsal is not None:
        raise ValueError(
            f"method {method.name!r} makes a layer's query from the input of the layer before, which {who} does not "
            f"allow: {family.rehearsal}; use another method, such as 'quest'"
        )
    if method.changes_rope and family.other_rope is not None:
        raise ValueError(
            f"method {method.name!r} replaces the model's RoPE, which {who} does not allow: {family.other_rope}; use "
            "another method, such as 'quest'"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{who} caps its attention scores (attn_logit_softcapping={config.attn_logit_softcapping}); allowed: None"
        )
    if getattr(config, "add_cross_attention", None):
        raise ValueError(f"{who} attends to an encoder's output (add_cross_attention=True); allowed: False")
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(
            f"{who} attends to later tokens too (use_bidirectional_attention={config.use_bidirectional_attention}); "
            "only causal attention is supported"
        )


def _window(config: PreTrainedConfig) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    return window


def check_positions(
    config: PreTrainedConfig, method: SparseMethod, query_length: int, cached: int, is_dense: bool = False
) -> None:
    """Raise if a prompt exceeds the positions that the model supports. Decode steps always pass."""
    if query_length == 1:
        return
    limit = max_positions(method.rope_config(config)) if is_dense else method.prompt_limit(config)
    if limit is None or cached + query_length <= limit:
        return
    how, own = "dense attention" if is_dense else method.name, max_positions(config)
    raise ValueError(
        f"the prompt has {cached + query_length} tokens, but the model has {own} positions "
        f"(max_position_embeddings={config.max_position_embeddings}); {how} "
        + (f"extends them to {limit} tokens" if limit > own else "does not extend them")
    )


def check_consecutive(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, method: SparseMethod
) -> None:
    """Raise if a prompt's positions, [batch or 1, tokens], are not consecutive: slots could not represent them.

    Padding of the mask, [batch, cached + new tokens], may have any positions. Waits for the device.
    """
    if position_ids is None:
        return
    follows = position_ids.diff(dim=-1) == 1
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        is_token = attention_mask[:, -position_ids.shape[-1] :] != 0
        follows = follows | ~(is_token[:, 1:] & is_token[:, :-1])
    if not bool(follows.all()):
        row, token = (~follows).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids must increase by one from token to token, since method {method.name!r} assigns positions "
            f"itself; got {position_ids[row % len(position_ids), token : token + 2].tolist()} in row {row}"
        )


def has_prefix(model: PreTrainedModel) -> bool:
    """Whether a model is a PEFT model with a learned prefix of keys and values (prefix tuning)."""
    peft_config = getattr(model, "active_peft_config", None)
    return str(getattr(peft_config, "peft_type", "")).endswith("PREFIX_TUNING")
