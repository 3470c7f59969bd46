"""Blocks that decode steps have chosen, kept on the device for the next step that chooses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from hf_sparse_attn_kernels import keep_chosen

from hf_sparse_attn.cache.host.traffic import HostTraffic
from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.storage import Present

if TYPE_CHECKING:
    from hf_sparse_attn.methods.base import Selection, SelectionSize
    from hf_sparse_attn.stats import LayerCounter

MOST_SLOTS_IN_16_BITS = torch.iinfo(torch.int16).max


class KeptBlocks:
    """The device's slots of one layer: as many for each row and KV head as a step chooses blocks, and one more.

    The additional slot is for the newest block until it is full. The slots describe the rows as long as these only
    grow; see ``keep_chosen``.

    Parameters
    ----------
    keys
        The layer's keys, [batch, kv_heads, capacity, head_dim], whose shape, dtype and device decide.
    size
        Maximum size of a selection.
    blocks
        Maximum number of blocks of a selection, from ``size``.
    pin
        Marks lasting tensors for compiled steps; the second argument names the sizes that depend on the capacity.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        size: SelectionSize,
        blocks: int,
        pin: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor],
    ) -> None:
        batch, kv_heads, capacity, head_dim = keys.shape
        self._block_size = size.block_size
        slots = (batch, kv_heads, (blocks + 1) * size.block_size, head_dim)
        table = (batch, kv_heads, -(-capacity // size.block_size))
        table_dtype = torch.int16 if blocks <= MOST_SLOTS_IN_16_BITS else torch.int32
        with lasting_tensors():
            self._keys, self._values = (pin(keys.new_empty(slots), ()) for _ in "kv")
            self._slot_blocks = pin(keys.new_full((batch, kv_heads, blocks + 1), -1, dtype=torch.int32), ())
            self._block_slots = pin(keys.new_empty(table, dtype=table_dtype), (2,))
            self._start = pin(keys.new_zeros(batch, dtype=torch.int32), ())

    def empty(self) -> None:
        """Forget all blocks, after tokens were changed or removed."""
        self._slot_blocks.fill_(-1)

    def take(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        selection: Selection,
        lengths: Lengths,
        counter: LayerCounter,
        traffic: HostTraffic,
    ) -> Present:
        """Load the selected blocks that no slot has, and return where they all are; count the step."""
        slot_indices, end = keep_chosen(
            keys,
            values,
            self._keys,
            self._values,
            self._slot_blocks,
            self._block_slots,
            selection.block_indices,
            selection.block_counts,
            lengths.seq_start,
            lengths.seq_end,
            block_size=self._block_size,
            counter=counter.totals,
            traffic=traffic.counts,
        )
        counts = selection.block_counts.expand(-1, keys.shape[1])
        return Present(self._keys, self._values, slot_indices, counts, self._start, end, counter=None)
