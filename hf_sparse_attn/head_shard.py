"""The part of a model's KV heads that one process has under tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class HeadShard:
    """The KV heads of every layer that this process has, and the group of processes that have the others.

    Tensor parallelism divides the heads evenly: rank ``r`` of ``size`` has the ``r``-th part of the KV heads, and the
    query heads that read them. Without it there is one rank. Nothing is then communicated, and tensors are returned
    unchanged.

    All ranks of the group must call :meth:`all_reduce`, :meth:`all_gather` and :meth:`all_true` equally often and in
    the same order. So a method may only branch on what is the same on every rank.
    """

    rank: int = 0
    """Place of this process in the group, from 0."""
    size: int = 1
    """Number of processes in the group."""
    group: ProcessGroup | None = None
    """The group; None for one rank."""

    @property
    def is_whole(self) -> bool:
        """Whether this process has all heads."""
        return self.size == 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, which have the same shape. Every rank gets the same bits."""
        if self.is_whole:
            return tensor
        summed = tensor.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(summed, group=self.group)
        return summed

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the ranks' tensors, which have the same shape, joined along ``dim`` in the order of the heads."""
        if self.is_whole:
            return tensor
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(parts, own, group=self.group)
        return torch.cat(parts, dim=dim)

    def all_true(self, flag: torch.Tensor) -> bool:
        """Return whether a bool scalar is True on every rank. Waits for the device."""
        return int(self.all_reduce((~flag).to(torch.int32))) == 0

    def slice(self, per_head: Any, dim: int = 0) -> Any:
        """Return this rank's part of a tensor, or of a sequence, with an entry for each head of the whole model."""
        if self.is_whole:
            return per_head
        if isinstance(per_head, torch.Tensor):
            return per_head.chunk(self.size, dim=dim)[self.rank]
        own = len(per_head) // self.size
        return per_head[self.rank * own : (self.rank + 1) * own]

    def own(self, heads: tuple[int, ...] | None, kv_heads: int) -> tuple[int, ...] | None:
        """Return those of the given KV heads that this rank has, numbered from its first; None, for all, stays None.

        ``kv_heads`` is the number of KV heads that a rank has.
        """
        if heads is None or self.is_whole:
            return heads
        first = self.rank * kv_heads
        return tuple(head - first for head in heads if first <= head < first + kv_heads)

    def require_whole(self, what: str) -> None:
        """Raise ``ValueError``, which names ``what`` needs all heads, if this process has a part of them only."""
        if not self.is_whole:
            raise ValueError(
                f"{what} is not supported under tensor parallelism: this process has the KV heads of rank {self.rank} "
                f"of {self.size} only; do it with the whole model in one process"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadShard:
        """Return the object itself: a copied cache communicates with the same processes."""
        return self


WHOLE = HeadShard()
"""All heads, in one process."""
