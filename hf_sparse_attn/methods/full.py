"""Full: dense attention, as a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.base import Selection, SparseMethod

if TYPE_CHECKING:
    from hf_sparse_attn.layer import SparseLayer


@dataclass(frozen=True)
class Full(SparseMethod):
    """Read everything: the dense baseline of every paper's tables, through the same cache and the same counters.

    Attention takes the dense path at every length; ``token_budget`` is there so that one command line serves all
    methods, and has no effect.
    """

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "dense attention, the baseline"
    paper: ClassVar[str] = "arXiv 1706.03762"
    sparse_phases: ClassVar[tuple[str, ...]] = ()

    block_size: ClassVar[int] = 64

    def covers(self, length: int) -> bool:
        """Whether dense attention costs no more: always."""
        return True

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Select every block that holds a token."""
        kv_heads = layer.keys.shape[1]
        counts = (layer.row_lengths() + self.block_size - 1) // self.block_size
        blocks = torch.arange(layer.max_blocks(self.block_size), dtype=torch.int32, device=layer.keys.device)
        indices = torch.where(blocks < counts[:, None], blocks, -1)
        return Selection(
            indices[:, None].expand(-1, kv_heads, -1).contiguous(),
            counts[:, None].expand(-1, kv_heads).int().contiguous(),
            self.block_size,
        )
