"""The record of a patched model. Below both the patching and the cache, so that neither needs the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from hf_sparse_attn.cache.lengths import Shared
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.rope import RopeTables
from hf_sparse_attn.stats import LayerCounter, SparseAttentionStats

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_sparse_attn.record import SelectionRecord

_ATTRIBUTE = "_hf_sparse_attn_patch"


@dataclass
class Patch:
    """All that patching put into a model, and what it takes to take it out."""

    method: SparseMethod
    stock_config: PreTrainedConfig
    """The model's own configuration object, which other models may share."""
    config: PreTrainedConfig
    """The copy of it that the model has while it is patched."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    stock_attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes of the instance that patching replaced."""
    rope_tables: RopeTables | None = None
    """Of a method that caches keys before RoPE."""
    takes_prefix: bool = False
    """Whether the model is a PEFT model's that puts a prefix of its own into a ``DynamicCache``."""
    counters: Sequence[LayerCounter] = ()
    """Of the most recently used cache."""
    recorder: SelectionRecord | None = None
    """Takes the selections of decode steps, inside ``record_selections``."""
    shared: Shared | None = None
    """The rows' lengths of that cache, without its keys and values."""


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the Transformers model in a PEFT model; any other model as it is."""
    get_base_model = getattr(model, "get_base_model", None)
    if get_base_model is None:
        return model
    inner: PreTrainedModel = get_base_model()
    return inner


def is_patched(model: PreTrainedModel) -> bool:
    """Whether ``patch_model`` is in force on this model."""
    return _ATTRIBUTE in getattr(base_model(model), "__dict__", {})


def get_patch(model: PreTrainedModel) -> Patch:
    """Return the record of a patched model.

    Raises
    ------
    ValueError
        The model is not patched.
    """
    if not is_patched(model):
        raise ValueError(f"this {type(model).__name__} is not patched; call patch_model(model) first")
    patch: Patch = base_model(model).__dict__[_ATTRIBUTE]
    return patch


def set_patch(model: PreTrainedModel, patch: Patch | None) -> None:
    """Write the record to a model, or take it away."""
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
    """Tell what the decode steps of the most recently used cache read, per layer and in total.

    ``generate()`` makes a new cache for each call; with a cache of your own the counts go on over its calls. This call
    waits for the device; counting itself does not.

    Raises
    ------
    ValueError
        The model is not patched, or the mask of a decode step on CUDA hid cached tokens, which had no effect.
    """
    patch = get_patch(model)
    if patch.shared is not None:
        patch.shared.check_masks()
    return SparseAttentionStats.from_counters(patch.counters)
