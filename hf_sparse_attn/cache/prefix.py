"""Tokens that precede every row of a cache and are stored once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Prefix:
    """One layer's share of a prefix: keys and values before those of every row, without a copy for each.

    The cache counts, crops and masks the tokens after the prefix only. Methods with ``reads_prefix`` attend to both. A
    layer holds the prefix expanded to its rows, with a batch stride of 0.
    """

    keys: torch.Tensor
    """[1 or batch, kv_heads, tokens, head_dim], after RoPE, in any order."""
    values: torch.Tensor
    """[1 or batch, kv_heads, tokens, head_dim], in the order of ``keys``."""
    metadata: dict[str, Any]
    """The method's own tensors, batch dimension first. Typed ``Any`` so that ops take them as arguments."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.keys.shape[2]

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefix:
        """Return the object itself: it is never written, and copies of a cache are made to be extended."""
        return self

    def expand(self, batch: int) -> Prefix:
        """Return views for ``batch`` rows."""
        return self.map(lambda tensor: tensor[:1].expand(batch, *tensor.shape[1:]))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Prefix:
        """Apply a function to every tensor."""
        metadata = {name: change(tensor) for name, tensor in self.metadata.items()}
        return replace(self, keys=change(self.keys), values=change(self.values), metadata=metadata)


def hash_token_ids(token_ids: torch.Tensor) -> str:
    """Return the SHA-256 of token ids, one after another whatever their shape. Waits for the device."""
    return hashlib.sha256(token_ids.flatten().to("cpu", torch.int64).numpy().astype("<i8").tobytes()).hexdigest()
