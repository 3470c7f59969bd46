"""The record of a patched model. Both the patching and the cache import it, so neither imports the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_sparse_attn.cache.lengths import Shared
from hf_sparse_attn.head_shard import WHOLE, HeadShard
from hf_sparse_attn.identity import offload_hooks
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.rope import RopeTables
from hf_sparse_attn.stats import LayerCounter, SparseAttentionStats

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_sparse_attn.record import SelectionRecord

_ATTRIBUTE = "_hf_sparse_attn_patch"


@dataclass
class Patch:
    """Everything that patching put into a model, and the stock state to restore."""

    method: SparseMethod
    configs: list[tuple[PreTrainedConfig, PreTrainedConfig]]
    """The model's own configuration objects, which other models may share, each with the copy that the patched model
    uses: that of its text model first, then those of layers that have another, and those that hold it in a multimodal
    model."""
    copied: list[dict[str, Any]]
    """The attributes of each copy when it was made: those that have changed since were set on the patched model."""
    decoder: torch.nn.Module
    """The text model's decoder, which runs the hooks."""
    rotary: torch.nn.Module | None = None
    """The decoder's rotary module, if the method replaces its output."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    stock_attributes: dict[str, Any] = field(default_factory=dict)
    """Instance attributes that patching replaced."""
    rope_tables: RopeTables | None = None
    """Rotations for a method that caches keys before RoPE."""
    kv_storage: str = "device"
    """Where the caches that ``generate()`` and ``forward`` create keep K and V: ``"device"`` or ``"host"``."""
    head_shard: HeadShard = WHOLE
    """The part of the KV heads that this process has, under tensor parallelism."""
    takes_prefix: bool = False
    """Whether the model belongs to a PEFT model that passes a learned prefix in a ``DynamicCache``."""
    counters: Sequence[LayerCounter] = ()
    """Counters of the most recently used cache."""
    recorder: SelectionRecord | None = None
    """Receives the selections of decode steps inside ``record_selections``."""
    shared: Shared | None = None
    """Row lengths of that cache, without its keys and values."""


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the Transformers model inside a PEFT model or what ``torch.compile`` returns, or any other as it is."""
    model = getattr(model, "_orig_mod", model)
    get_base_model = getattr(model, "get_base_model", None)
    if get_base_model is None:
        return model
    inner: PreTrainedModel = get_base_model()
    return inner


def check_model_type(model: object) -> None:
    """Raise ``TypeError`` unless this is a Transformers model, or what PEFT or ``torch.compile`` make of one."""
    inner = base_model(model) if isinstance(model, torch.nn.Module) else model  # type: ignore[arg-type]
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"model must be a Transformers model, got {type(model).__name__}")


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that patching makes sparse: a multimodal model's text decoder, else the whole model.

    A PEFT model's is that of the Transformers model inside it.
    """
    inner = base_model(model)
    config = inner.config
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is config:
        return inner
    decoder: PreTrainedModel = inner.get_decoder()
    return decoder


def is_multimodal(model: PreTrainedModel) -> bool:
    """Whether a model reads more than text, and holds the text decoder beside encoders of the rest."""
    return text_model(model) is not base_model(model)


def configs_of_layers(text: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configurations of a text model's layers that are not the model's own object.

    Layers taken from another model, or copied, have them: attention reads its implementation there.
    """
    others: dict[int, PreTrainedConfig] = {}
    for module in text.get_decoder().modules():
        config = module.__dict__.get("config")
        if config is not text.config and getattr(config, "model_type", None) == text.config.model_type:
            others[id(config)] = config
    return list(others.values())


def layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Return the device that runs each layer, that of its parameters, in the order of the layers' numbers."""
    devices: dict[int, torch.device] = {}
    whole = base_model(model)
    of_decoder = set(whole.get_decoder().modules())  # decoders have different names for their layers
    for path, module in whole.named_modules():
        number, named = module.__dict__.get("layer_idx"), next(module.named_parameters(path), None)
        if isinstance(number, int) and named is not None and module in of_decoder:
            devices.setdefault(number, _running_device(whole, *named))
    return [devices[number] for number in sorted(devices)]


def _running_device(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> torch.device:
    """Return the device of a parameter, or that to which accelerate loads an offloaded one."""
    if parameter.is_meta:
        for hook, _ in offload_hooks(model, name):
            device = getattr(hook, "execution_device", None)
            if getattr(hook, "offload", False) and device is not None:
                return torch.device(device)
    return parameter.device


def is_patched(model: PreTrainedModel) -> bool:
    """Whether the model is patched."""
    return _ATTRIBUTE in getattr(base_model(model), "__dict__", {})


def get_patch(model: PreTrainedModel) -> Patch:
    """Return the record of a patched model.

    Raises
    ------
    TypeError
        This is no Transformers model.
    ValueError
        The model is not patched.
    """
    if not is_patched(model):
        check_model_type(model)
        raise ValueError(f"this {type(model).__name__} is not patched; call patch_model(model) first")
    patch: Patch = base_model(model).__dict__[_ATTRIBUTE]
    return patch


def set_patch(model: PreTrainedModel, patch: Patch | None) -> None:
    """Set the record of a model, or remove it if ``patch`` is None."""
    if patch is None:
        model.__dict__.pop(_ATTRIBUTE)
    else:
        model.__dict__[_ATTRIBUTE] = patch


def patched_method(model: PreTrainedModel) -> SparseMethod:
    """Return the method that a model is patched with.

    Raises
    ------
    ValueError
        The model is not patched.
    """
    return get_patch(model).method


def sparse_attention_stats(model: PreTrainedModel) -> SparseAttentionStats:
    """Return what decode steps of the most recently used cache read, per layer and in total.

    ``generate()`` creates a new cache for each call; counts of a cache of your own add up over calls. This function
    waits for the device; counting itself does not. Under tensor parallelism it counts the KV heads of this process.

    Raises
    ------
    ValueError
        The model is not patched, or the mask of a decode step on CUDA hid cached tokens, which had no effect.
    """
    patch = get_patch(model)
    if patch.shared is not None:
        patch.shared.check_masks()
    return SparseAttentionStats.from_counters(patch.counters)
