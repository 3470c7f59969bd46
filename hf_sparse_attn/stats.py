"""What decoding really read, against what dense attention would have read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.buffers import mark_static

if TYPE_CHECKING:
    from hf_sparse_attn.layer import SparseLayer


class LayerCounter:
    """Counts one layer's reads on its device, so that decoding never waits for the host.

    The ops of the decode step add to :attr:`totals` themselves. It holds no keys or values: the counts outlive the
    cache that they are of.
    """

    totals: torch.Tensor
    """int64 [4]: tokens read, tokens that dense attention would have read, metadata bytes read, decode steps."""

    selections: torch.Tensor
    """int64 [2]: times that a row kept an earlier selection, and times that it needed one."""

    def __init__(self) -> None:
        self._token_bytes = 0
        # Where the host knows what a step reads, no op need count it.
        self._host_tokens = 0
        self._host_steps = 0

    def allocate(self, layer: SparseLayer) -> None:
        """Make :attr:`totals` beside the layer's buffers; later buffers of the same layer go on with the counts."""
        if not hasattr(self, "totals"):
            self.totals = torch.zeros(4, dtype=torch.int64, device=layer.keys.device)
            self.selections = torch.zeros(2, dtype=torch.int64, device=layer.keys.device)
            if layer.is_static:
                mark_static(self.totals)
                mark_static(self.selections)
        self._token_bytes = (layer.keys.shape[-1] + layer.values.shape[-1]) * layer.keys.element_size()

    def count_dense(self, layer: SparseLayer) -> None:
        """Add one decode step of dense attention that no op of ours counts."""
        batch, kv_heads = layer.keys.shape[:2]
        self._host_steps += 1
        if layer.rows.has_padding:
            self.totals[:2] += layer.row_lengths().sum() * kv_heads
        else:
            self._host_tokens += layer.length * batch * kv_heads

    def count_metadata(self, read: torch.Tensor | int) -> None:
        """Add bytes of metadata that a decode step reads."""
        self.totals[2] += read

    def read(self) -> LayerStats:
        """Wait for the device and return the totals."""
        if not hasattr(self, "totals"):
            return LayerStats()
        tokens, dense_tokens, metadata_bytes, steps = self.totals.tolist()
        selections_kept, selections = self.selections.tolist()
        return LayerStats(
            decode_steps=steps + self._host_steps,
            tokens_read=tokens + self._host_tokens,
            kv_bytes=(tokens + self._host_tokens) * self._token_bytes,
            metadata_bytes=metadata_bytes,
            dense_bytes=(dense_tokens + self._host_tokens) * self._token_bytes,
            selections=selections,
            selections_kept=selections_kept,
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
    selections: int = 0
    """Where a method keeps selections (TokenSelect): times that a row needed one, summed over steps."""
    selections_kept: int = 0
    """Of these, the times that an earlier selection was kept."""

    @property
    def selection_hit_rate(self) -> float:
        """The share of selections that were kept; 0.0 where none was needed."""
        return self.selections_kept / self.selections if self.selections else 0.0

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
            selections=sum(layer.selections for layer in layers),
            selections_kept=sum(layer.selections_kept for layer in layers),
            layers=layers,
        )
