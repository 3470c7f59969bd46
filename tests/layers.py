"""Layers of a cache without a model."""

from __future__ import annotations

import pytest
import torch

from hf_sparse_attn import SparseMethod
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.padding import Padding
from hf_sparse_attn.cache.storage import GrowingStorage, StaticStorage
from hf_sparse_attn.methods.base import Selection


def make_layer(
    method: SparseMethod, max_cache_len: int | None = None, q_heads: int = 1, padding: list[int] | None = None
) -> SparseLayer:
    """Create an empty layer; ``padding`` holds the rows' left padding."""
    storage = GrowingStorage() if max_cache_len is None else StaticStorage(max_cache_len)
    layer = SparseLayer(method, storage, q_heads=q_heads)
    if padding is not None:
        layer._shared.padding = Padding(torch.tensor(padding), min(padding), max(padding) > 0)
    return layer


def hand_over(layer: SparseLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    """Feed a decode step's token, [batch, kv_heads, head_dim] each, as a patched model does."""
    layer.lengths.expects_step = True
    layer.update(key.unsqueeze(2), value.unsqueeze(2))
    assert layer.take_token() is not None


def noted_selections(monkeypatch: pytest.MonkeyPatch) -> list[Selection]:
    """Return a list to which every layer's decode step adds its selection from now on."""
    selections: list[Selection] = []
    monkeypatch.setattr(SparseLayer, "note", lambda self, selection: selections.append(selection))
    return selections


def step(layer: SparseLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Decode one token, [batch, heads, head_dim] each."""
    hand_over(layer, key, value)
    output = layer.method.decode(query, layer, key, value, scale)
    layer.mark_written()
    return output
