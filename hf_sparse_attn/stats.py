"""What decoding really read, against what dense attention would have read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_sparse_attn.cache import SparseLayer
    from hf_sparse_attn.methods import Selection


class LayerCounter:
    """Counts one layer's reads on its device, so that decoding never waits for the host.

    It holds no keys or values: the counts outlive the cache that they are of.
    """

    def __init__(self) -> None:
        # tokens read, tokens that dense attention would have read, metadata bytes read, decode steps
        self._totals: torch.Tensor | None = None
        self._token_bytes = 0

    def count(self, layer: SparseLayer, selection: Selection | None) -> None:
        """Add one decode step: what ``selection`` reads, or everything where it is None."""
        if self._totals is None:
            self._totals = torch.zeros(4, dtype=torch.int64, device=layer.keys.device)
            self._token_bytes = (layer.keys.shape[-1] + layer.values.shape[-1]) * layer.keys.element_size()
        lengths = layer.row_lengths()
        dense_tokens = lengths.sum() * layer.keys.shape[1]
        tokens: torch.Tensor = dense_tokens
        metadata_bytes: torch.Tensor | int = 0
        if selection is not None:
            first_tokens = selection.block_indices * selection.block_size
            held = (lengths[:, None, None] - first_tokens).clamp(0, selection.block_size)
            tokens = torch.where(selection.block_indices >= 0, held, 0).sum()
            metadata_bytes = layer.method.metadata_bytes_read(layer)
        self._totals[0] += tokens
        self._totals[1] += dense_tokens
        self._totals[2] += metadata_bytes
        self._totals[3] += 1

    def read(self) -> LayerStats:
        """Wait for the device and return the totals."""
        if self._totals is None:
            return LayerStats()
        tokens, dense_tokens, metadata_bytes, steps = self._totals.tolist()
        return LayerStats(
            decode_steps=steps,
            tokens_read=tokens,
            kv_bytes=tokens * self._token_bytes,
            metadata_bytes=metadata_bytes,
            dense_bytes=dense_tokens * self._token_bytes,
        )


@dataclass(frozen=True)
class LayerStats:
    """What decode steps read in one layer, or in all of them together.

    Only single-token steps count; a prefill, dense or not, does not. Padding is counted on neither side.
    """

    decode_steps: int = 0
    """Single-token steps, whatever the batch size."""
    tokens_read: int = 0
    """Cached tokens whose K and V were read, summed over steps, rows and KV heads."""
    kv_bytes: int = 0
    """Bytes of K and V read."""
    metadata_bytes: int = 0
    """Bytes of the method's metadata read."""
    dense_bytes: int = 0
    """Bytes of K and V that dense attention would have read."""

    @property
    def kv_fraction(self) -> float:
        """All bytes read over dense attention's; 1.0 where nothing was decoded yet."""
        return (self.kv_bytes + self.metadata_bytes) / self.dense_bytes if self.dense_bytes else 1.0


@dataclass(frozen=True)
class SparseAttentionStats(LayerStats):
    """The totals over all layers, dense ones included, and each layer's own."""

    layers: tuple[LayerStats, ...] = field(default=())

    @classmethod
    def from_counters(cls, counters: Sequence[LayerCounter]) -> SparseAttentionStats:
        """Read the layers' counters and sum them up. Waits for the device."""
        layers = tuple(counter.read() for counter in counters)
        return cls(
            decode_steps=max((layer.decode_steps for layer in layers), default=0),
            tokens_read=sum(layer.tokens_read for layer in layers),
            kv_bytes=sum(layer.kv_bytes for layer in layers),
            metadata_bytes=sum(layer.metadata_bytes for layer in layers),
            dense_bytes=sum(layer.dense_bytes for layer in layers),
            layers=layers,
        )
