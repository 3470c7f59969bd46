"""Bytes and tokens that decoding really read, beside those that dense attention would have read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


class LayerCounter:
    """Counts one layer's reads on its device, so that decoding never waits for the host.

    The ops of the decode step add to :attr:`totals` themselves. It holds no keys or values: the counts outlive the
    cache that they are of.

    Parameters
    ----------
    names
        The method's own counts; see ``SparseMethod.counts``.
    """

    totals: torch.Tensor
    """int64 [4]: tokens read, tokens that dense attention would have read, metadata bytes read, decode steps."""

    own: torch.Tensor
    """int64 [names]: the method's own counts, in the order of their names."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._names = names
        self._token_bytes = 0
        # Where the host knows what a step reads, no op need count it.
        self._host_tokens = 0
        self._host_steps = 0

    def allocate(self, device: torch.device, pin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make the counts on the layer's device; a layer that is allocated anew goes on with those it has."""
        if not hasattr(self, "totals"):
            self.totals = pin(torch.zeros(4, dtype=torch.int64, device=device))
            self.own = pin(torch.zeros(len(self._names), dtype=torch.int64, device=device))

    def set_token_bytes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the size of one token's K and V in one KV head from tensors [..., head_dim]."""
        self._token_bytes = (keys.shape[-1] + values.shape[-1]) * keys.element_size()

    def count_dense(self, tokens: torch.Tensor | int) -> None:
        """Add one decode step that no op counts, of dense attention over so many tokens of all rows and KV heads."""
        self._host_steps += 1
        if isinstance(tokens, int):
            self._host_tokens += tokens
        else:
            self.totals[:2] += tokens

    def count_metadata(self, read: torch.Tensor | int) -> None:
        """Add bytes of metadata that a decode step reads."""
        self.totals[2] += read

    def read(self) -> LayerStats:
        """Wait for the device and return the totals."""
        tokens, dense_tokens, metadata_bytes, steps = self.totals.tolist() if hasattr(self, "totals") else (0, 0, 0, 0)
        own = self.own.tolist() if hasattr(self, "own") else [0] * len(self._names)
        return LayerStats(
            decode_steps=steps + self._host_steps,
            tokens_read=tokens + self._host_tokens,
            kv_bytes=(tokens + self._host_tokens) * self._token_bytes,
            metadata_bytes=metadata_bytes,
            dense_bytes=(dense_tokens + self._host_tokens) * self._token_bytes,
            method_counts=dict(zip(self._names, own, strict=True)),
        )


@dataclass(frozen=True)
class LayerStats:
    """Reads of the decode steps in one layer, or in all of them together.

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
    """Bytes of K and V that dense attention would have read; in a sliding-window layer, those of its window."""
    method_counts: dict[str, int] = field(default_factory=dict)
    """The method's own counts, by the names in ``SparseMethod.counts``."""

    @property
    def kv_fraction(self) -> float:
        """All bytes read over dense attention's; 1.0 where nothing was decoded yet."""
        return (self.kv_bytes + self.metadata_bytes) / self.dense_bytes if self.dense_bytes else 1.0


@dataclass(frozen=True)
class SparseAttentionStats(LayerStats):
    """The totals over all layers, dense ones included, and each layer's own."""

    layers: tuple[LayerStats, ...] = field(default=())
    """One for each layer of the model, in its order."""

    @classmethod
    def from_counters(cls, counters: Sequence[LayerCounter]) -> SparseAttentionStats:
        """Read the layers' counters and sum them up. Waits for the device."""
        layers = tuple(counter.read() for counter in counters)
        counts: Counter[str] = Counter()
        for layer in layers:
            counts.update(layer.method_counts)
        return cls(
            decode_steps=max((layer.decode_steps for layer in layers), default=0),
            tokens_read=sum(layer.tokens_read for layer in layers),
            kv_bytes=sum(layer.kv_bytes for layer in layers),
            metadata_bytes=sum(layer.metadata_bytes for layer in layers),
            dense_bytes=sum(layer.dense_bytes for layer in layers),
            method_counts=dict(counts),
            layers=layers,
        )
