"""Numbers and widths of a model's attention heads, which configurations state in different ways."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig


class HeadsOfLayers(NamedTuple):
    """The shape of a model's attention."""

    q_heads: tuple[int, ...]
    """Of each layer."""
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        """Return it in words."""
        q_heads = "/".join(map(str, dict.fromkeys(self.q_heads)))
        return (
            f"{len(self.q_heads)} layers of {q_heads} query heads and {self.kv_heads} KV heads, of {self.head_dim} "
            "channels each"
        )


def heads_of_layers(config: PreTrainedConfig) -> HeadsOfLayers:
    """Return the shape of the attention of a model with this configuration.

    Raises
    ------
    ValueError
        Layers differ in the KV heads or in their width.
    """
    return HeadsOfLayers(tuple(query_heads_of(config)), kv_heads_of(config), head_dim_of(config))


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the width of a head, which older configurations do not state.

    Raises
    ------
    ValueError
        Layers differ in it.
    """
    _check_uniform(config, "head_dim")
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


def kv_heads_of(config: PreTrainedConfig) -> int:
    """Return the KV heads of a layer: one for each query head where the configuration states no number.

    Raises
    ------
    ValueError
        Layers differ in it.
    """
    _check_uniform(config, "num_key_value_heads")
    kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return kv_heads


def query_heads_of(config: PreTrainedConfig) -> list[int]:
    """Return the query heads of each layer, which are as many in all layers of most models."""
    by_layer = getattr(config, "num_attention_heads_per_layer", None)
    if by_layer is not None:
        return list(by_layer)
    if config.is_heterogeneous:
        return [layer.num_attention_heads for layer in config.per_layer_config]
    return [config.num_attention_heads] * config.num_hidden_layers


def _check_uniform(config: PreTrainedConfig, name: str) -> None:
    if name in (config.per_layer_attributes or ()):
        raise ValueError(
            f"the layers of this model (model type {config.model_type!r}) differ in {name}, which is not supported; "
            "allowed: one number for all layers"
        )
