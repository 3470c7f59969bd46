"""Tokens and bytes that decoding read, compared with dense attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.traffic import Traffic


class LayerCounter:
    """Counter of one layer's reads, kept on its device so that decoding never waits for the host.

    The ops of the decode step add to :attr:`totals` themselves. A counter holds no keys or values, so it can outlive
    its cache.

    Parameters
    ----------
    names
        Names of the method's own counts; see ``SparseMethod.counts``.
    traffic
        What moves between host and device, if keys and values lie on the host.
    """

    totals: torch.Tensor
    """int64 [4]: tokens read, tokens that dense attention would have read, metadata bytes read, decode steps."""

    own: torch.Tensor
    """int64 [len(names)]: the method's own counts, in the order of ``names``."""

    def __init__(self, names: tuple[str, ...] = (), traffic: Traffic | None = None) -> None:
        self._names = names
        self._traffic = traffic
        self._token_bytes = 0
        # No op counts the reads that the host knows.
        self._host_tokens = 0
        self._host_dense_tokens = 0
        self._host_steps = 0

    def allocate(self, device: torch.device, pin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Create the counts on the layer's device; keep existing ones when a layer is reallocated."""
        if not hasattr(self, "totals"):
            with lasting_tensors():
                self.totals = pin(torch.zeros(4, dtype=torch.int64, device=device))
                self.own = pin(torch.zeros(len(self._names), dtype=torch.int64, device=device))

    def set_token_bytes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set the size of one token's K and V in one KV head from tensors [..., head_dim]."""
        self._token_bytes = (keys.shape[-1] + values.shape[-1]) * keys.element_size()

    def count_dense(self, tokens: torch.Tensor | int) -> None:
        """Add one dense decode step that no op counts; ``tokens`` are summed over rows and KV heads."""
        if isinstance(tokens, int):
            self.count_read(tokens, tokens)
        else:
            self._host_steps += 1
            self.totals[:2] += tokens

    def count_read(self, tokens: int, dense_tokens: int, steps: int = 1) -> None:
        """Add a decode step that no op counts, with the tokens it reads and those that dense attention would."""
        self._host_steps += steps
        self._host_tokens += tokens
        self._host_dense_tokens += dense_tokens

    def count_rows(self, tokens: torch.Tensor, dense_tokens: torch.Tensor) -> None:
        """Add a decode step that no op counts, as :meth:`count_read`, by numbers on the device."""
        self._host_steps += 1
        self.totals[:2] += torch.stack((tokens, dense_tokens))

    def count_metadata(self, read: torch.Tensor | int) -> None:
        """Add the bytes of metadata that a decode step reads."""
        self.totals[2] += read

    def read(self) -> LayerStats:
        """Wait for the device and return the totals."""
        tokens, dense_tokens, metadata_bytes, steps = self.totals.tolist() if hasattr(self, "totals") else (0, 0, 0, 0)
        kv_bytes = (tokens + self._host_tokens) * self._token_bytes
        own = self.own.tolist() if hasattr(self, "own") else [0] * len(self._names)
        return LayerStats(
            decode_steps=steps + self._host_steps,
            tokens_read=tokens + self._host_tokens,
            kv_bytes=kv_bytes,
            metadata_bytes=metadata_bytes,
            dense_bytes=(dense_tokens + self._host_dense_tokens) * self._token_bytes,
            method_counts=dict(zip(self._names, own, strict=True)),
            **({} if self._traffic is None else self._traffic.totals(kv_bytes)),
        )


@dataclass(frozen=True)
class LayerStats:
    """Reads of the decode steps in one layer, or in all layers.

    Only single-token steps count, not prefill. Padding is excluded, also from dense attention's bytes. Under tensor
    parallelism all counts are those of this process's KV heads.
    """

    decode_steps: int = 0
    """Single-token steps; a step of a batch counts once."""
    tokens_read: int = 0
    """Cached tokens whose K and V were read, summed over steps, rows and KV heads."""
    kv_bytes: int = 0
    """Bytes of K and V read."""
    metadata_bytes: int = 0
    """Bytes of the method's metadata read."""
    dense_bytes: int = 0
    """Bytes of K and V that dense attention would have read; only the window's in a sliding-window layer."""
    method_counts: dict[str, int] = field(default_factory=dict)
    """The method's own counts, keyed by the names in ``SparseMethod.counts``."""
    blocks_read: int = 0
    """With K and V in host memory, full blocks that steps read by way of the device's pool or slots, summed over steps,
    rows and KV heads."""
    blocks_hit: int = 0
    """Those of :attr:`blocks_read` that the device already held; the others were loaded."""
    bytes_loaded: int = 0
    """Bytes of K and V copied from host memory to the device, in prompts too, and ahead of steps that stop earlier."""
    step_bytes_loaded: int = 0
    """Those of :attr:`bytes_loaded` that decode steps loaded, or that were loaded ahead of them."""
    bytes_stored: int = 0
    """Bytes of K and V copied to host memory."""
    stall_seconds: float = 0.0
    """Time in which the model waited for loads."""

    @property
    def hit_rate(self) -> float:
        """Share of the blocks looked up that the device held; 1.0 if none was looked up."""
        return self.blocks_hit / self.blocks_read if self.blocks_read else 1.0

    @property
    def loaded_per_step(self) -> float:
        """Bytes of K and V that a decode step loaded from host memory, on average; 0.0 before the first one."""
        return self.step_bytes_loaded / self.decode_steps if self.decode_steps else 0.0

    @property
    def kv_fraction(self) -> float:
        """KV and metadata bytes read, divided by dense attention's; 1.0 before the first decode step."""
        return (self.kv_bytes + self.metadata_bytes) / self.dense_bytes if self.dense_bytes else 1.0


@dataclass(frozen=True)
class SparseAttentionStats(LayerStats):
    """Totals over all layers, dense ones included, and the stats of each layer."""

    layers: tuple[LayerStats, ...] = field(default=())
    """Stats of each layer of the model, in order."""

    @classmethod
    def from_counters(cls, counters: Sequence[LayerCounter]) -> SparseAttentionStats:
        """Sum the layers' counters. Waits for the device."""
        layers = tuple(counter.read() for counter in counters)
        counts: Counter[str] = Counter()
        for layer in layers:
            counts.update(layer.method_counts)
        summed = {each.name for each in fields(LayerStats)} - {"decode_steps", "method_counts"}
        return cls(
            decode_steps=max((layer.decode_steps for layer in layers), default=0),
            method_counts=dict(counts),
            layers=layers,
            **{name: sum(getattr(layer, name) for layer in layers) for name in summed},
        )
