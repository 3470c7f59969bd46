"""Full: dense attention, as a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import dense_decode

from hf_sparse_attn.dense import dense_attention, padding_mask
from hf_sparse_attn.methods.base import SparseMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class Full(SparseMethod):
    """Dense attention over the whole cache: the baseline, with the same cache and counters as the other methods.

    Dense layers run it, and so does every layer while the budget covers all rows. ``token_budget`` has no effect; it
    exists because every method has one.
    """

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "dense attention, the baseline"
    paper: ClassVar[str] = "arXiv 1706.03762"
    sparse_phases: ClassVar[tuple[str, ...]] = ()

    def covers(self, length: int) -> bool:
        """Whether dense attention costs no more: always True."""
        return True

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append the token and attend to the whole row; see :meth:`SparseMethod.decode`."""
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        layer.note(None)
        if layer.storage.reads_by_bounds():
            output, lse = dense_decode(
                query,
                layer.keys,
                layer.values,
                layer.seq_start,
                layer.seq_end,
                scale=scale,
                counter=layer.counter.totals,
                finished=layer.finished,
            )
            return layer.with_sinks(output, lse)
        batch, kv_heads = layer.keys.shape[:2]
        has_padding = layer.lengths.has_padding
        tokens = layer.row_lengths().sum() if has_padding else batch * layer.length
        layer.counter.count_dense(tokens * kv_heads)
        return dense_attention(query.unsqueeze(2), layer, scale, padding_mask(layer))[:, :, 0]
