"""Numbers and widths of a model's attention heads, which configurations state in different ways."""

from __future__ import annotations

from transformers import PreTrainedConfig


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the width of a head, which older configurations do not state."""
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


def kv_heads_of(config: PreTrainedConfig) -> int:
    """Return the KV heads of a layer: one for each query head where the configuration states no number."""
    kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return kv_heads


def query_heads_of(config: PreTrainedConfig) -> list[int]:
    """Return the query heads of each layer, which are as many in all layers of most models."""
    by_layer = getattr(config, "num_attention_heads_per_layer", None)
    return list(by_layer or [config.num_attention_heads] * config.num_hidden_layers)
