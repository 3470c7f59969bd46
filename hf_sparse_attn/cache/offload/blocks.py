"""The device's share of an offloaded cache: slots for blocks, each row's newest block, and room for one whole layer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.offload.pool import BlockPool, Ints
from hf_sparse_attn.cache.offload.transfers import Transfers

if TYPE_CHECKING:
    from hf_sparse_attn.cache.offload.storage import OffloadStorage
    from hf_sparse_attn.methods.base import Offload


KeysAndValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Shape(NamedTuple):
    """Determines the layout of the device's memory."""

    batch: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        """Number of pairs of a row and a KV head."""
        return self.batch * self.kv_heads


class RowBounds(NamedTuple):
    """Row bounds of a step, int32 [batch] each, on the device."""

    newest_start: torch.Tensor
    """Start of the row relative to its newest block: zero or negative."""
    newest_end: torch.Tensor
    """Tokens in the row's newest block."""
    pool_start: torch.Tensor
    """Zeros."""
    pool_ends: torch.Tensor
    """int32 [layers, batch]: end of the layer's newest block, in tokens from the start of the pool."""


class DeviceBlocks:
    """Memory of one device that the offloaded layers of a cache, and of its forks, share.

    The blocks lie one after another in one tensor for keys and one for values: first the slots, then the newest block
    of every pair of row and KV head, layer by layer. Attention sees this tensor as the buffer of each pair, by strides:
    the buffer of pair p begins p blocks after the first one, so that the newest block of every pair of a layer has the
    same index there, behind all slots. An op then reads any choice of slots, and the newest block up to its last token,
    as one row.

    Parameters
    ----------
    offload
        Size of the blocks and of the pool.
    layers
        Number of layers that are offloaded.
    kv_heads
        Number of KV heads of a layer.
    device
        The device.
    """

    def __init__(self, offload: Offload, layers: int, kv_heads: int, device: torch.device) -> None:
        self.offload, self.layers, self.device = offload, layers, device
        self.transfers = Transfers(device)
        self.shape: Shape | None = None
        self.memory = self.staging = _nothing(device)
        self.pool = BlockPool(offload.slots(layers, kv_heads), offload.eviction)
        self.filled_by: Ints = np.zeros(self.pool.slots, np.int64)
        """Number of the load that fills each slot."""
        self.staged: tuple[weakref.ref[OffloadStorage], int] | None = None
        """The storage whose tokens the staging buffers hold, and how many."""
        self._bounds: tuple[Any, RowBounds] | None = None
        self._owners: list[weakref.ref[OffloadStorage] | None] = [None] * layers

    def lay_out(self, shape: Shape, capacity: int) -> None:
        """Make the memory fit rows of such a shape and capacity. Other shapes lose their blocks, not their tokens.

        Raises
        ------
        RuntimeError
            The pool does not fit into the device's memory.
        """
        blocks = -(-capacity // self.offload.block_size)
        if shape == self.shape:
            self.pool.reserve(blocks)
            if capacity > self.staging[0].shape[2]:
                self._make_staging(capacity)
            return
        self.release()
        self.first_slot = shape.pairs - 1
        self.first_newest = self.first_slot + self.pool.slots
        total = self.first_newest + self.layers * shape.pairs
        size = (total, self.offload.block_size, shape.head_dim)
        self.memory = self._allocate(f"the pool of gpu_cache_tokens={self.offload.gpu_cache_tokens}", size, shape.dtype)
        self.shape = shape
        self._make_staging(capacity)
        self.pool.lay_out(shape.pairs, blocks)

    def release(self) -> None:
        """Free the memory. The storages that share it lose their blocks, not their tokens."""
        for index in range(self.layers):
            self._release_newest(index)
        self.transfers.finish()
        self.shape, self.staged, self._bounds = None, None, None
        self.memory = self.staging = _nothing(self.device)

    def _make_staging(self, capacity: int) -> None:
        assert self.shape is not None
        self.transfers.finish()
        self.staging, self.staged = _nothing(self.device), None
        size = (self.shape.batch, self.shape.kv_heads, capacity, self.shape.head_dim)
        self.staging = self._allocate(f"one layer of {capacity} tokens", size, self.shape.dtype)

    def _allocate(self, what: str, size: tuple[int, ...], dtype: torch.dtype) -> KeysAndValues:
        try:
            with lasting_tensors():
                keys, values = (self.transfers.lend(device_empty(size, dtype, self.device)) for _ in range(2))
                return keys, values
        except torch.OutOfMemoryError as error:
            gib = 2 * np.prod(size, dtype=np.float64) * dtype.itemsize / 2**30
            self.shape, self.memory, self.staging = None, _nothing(self.device), _nothing(self.device)
            raise RuntimeError(
                f"offload: {what} takes {gib:.2f} GiB for keys and values, more than {self.device} has left: lower "
                "gpu_cache_tokens, the batch or the context"
            ) from error

    def newest(self, index: int) -> KeysAndValues:
        """Return keys and values of a layer's newest blocks, [batch, kv_heads, block_size, head_dim]."""
        assert self.shape is not None
        first = self.first_newest + index * self.shape.pairs
        size = (self.shape.batch, self.shape.kv_heads, self.offload.block_size, self.shape.head_dim)
        keys, values = (tensor[first : first + self.shape.pairs].view(size) for tensor in self.memory)
        return keys, values

    def newest_index(self, index: int) -> int:
        """Index of a layer's newest blocks in the buffers of :meth:`buffers`."""
        assert self.shape is not None
        return self.first_newest + index * self.shape.pairs

    def buffers(self, index: int) -> KeysAndValues:
        """Return keys and values as the buffers of a layer, [batch, kv_heads, tokens, head_dim], by strides.

        Slot s is block ``first_slot + s - p`` of pair p.
        """
        assert self.shape is not None
        block = self.offload.block_size * self.shape.head_dim
        size = (self.shape.batch, self.shape.kv_heads, (self.newest_index(index) + 1) * self.offload.block_size)
        strides = (self.shape.kv_heads * block, block, self.shape.head_dim, 1)
        keys, values = (tensor.as_strided((*size, self.shape.head_dim), strides) for tensor in self.memory)
        return keys, values

    def block_rows(self, index: int, blocks: int) -> KeysAndValues:
        """Return the buffers of a layer with each row ``blocks`` times, so that an op attends to single blocks.

        [batch * blocks, kv_heads, tokens, head_dim], all at the address of the first row: the blocks of row b are those
        of :meth:`buffers`, counted from position ``b * kv_heads * block_size``.
        """
        assert self.shape is not None
        block = self.offload.block_size * self.shape.head_dim
        tokens = (self.newest_index(index) + self.shape.pairs - self.shape.kv_heads + 1) * self.offload.block_size
        size = (self.shape.batch * blocks, self.shape.kv_heads, tokens, self.shape.head_dim)
        keys, values = (tensor.as_strided(size, (0, block, self.shape.head_dim, 1)) for tensor in self.memory)
        return keys, values

    def forget_all(self) -> None:
        """Empty the pool, after a load that may not have filled its slots."""
        self.pool.forget_all()
        self.filled_by.fill(self.transfers.last_load)

    def bounds(self, lengths: Lengths) -> RowBounds:
        """Return the row bounds of a step. All layers of a device share them."""
        key = (lengths.length, lengths.starts)
        if self._bounds is None or self._bounds[0] != key:
            size = self.offload.block_size
            held = np.maximum(lengths.length - np.array(lengths.starts), 0)
            before = newest_blocks(held, size) * size
            first = np.array([[self.newest_index(index)] for index in range(self.layers)]) * size
            rows = np.concatenate(([-before], [held - before], [np.zeros_like(held)], first + held - before))
            with lasting_tensors():
                sent = self.transfers.send(rows.astype(np.int32))
            self._bounds = key, RowBounds(sent[0], sent[1], sent[2], sent[3:])
        return self._bounds[1]

    def claim_newest(self, storage: OffloadStorage, index: int) -> bool:
        """Let a storage use a layer's newest blocks; return whether they are its own from before."""
        owner = self._owners[index]
        if owner is not None and owner() is storage:
            return True
        self._release_newest(index)
        self._owners[index] = weakref.ref(storage)
        return False

    def _release_newest(self, index: int) -> None:
        reference, self._owners[index] = self._owners[index], None
        owner = None if reference is None else reference()
        if owner is not None:
            owner.leave_newest()

    def unstage(self, storage: OffloadStorage) -> None:
        """Forget the staged tokens if they are those of a storage."""
        if self.staged is not None and self.staged[0]() is storage:
            self.staged = None


class SharedBlocks:
    """The memory of an offloaded cache, device by device.

    Parameters
    ----------
    offload
        Size of the blocks and of the pool, by the method.
    kv_heads
        Number of the model's KV heads.
    """

    def __init__(self, offload: Offload, kv_heads: int) -> None:
        self.offload, self.kv_heads = offload, kv_heads
        self.layers = 0
        self._devices: dict[torch.device, DeviceBlocks] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBlocks:
        """Return the object itself: a copied cache shares the device's memory, as a fork does."""
        return self

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled: the memory belongs to this process."""
        raise TypeError("a cache with offload=True cannot be pickled; cache.save(path) writes it to a file")

    def add_layer(self) -> int:
        """Count a layer and return its index among the offloaded ones."""
        self.layers += 1
        return self.layers - 1

    def on(self, device: torch.device) -> DeviceBlocks:
        """Return the memory of a device."""
        if device not in self._devices:
            self._devices[device] = DeviceBlocks(self.offload, self.layers, self.kv_heads, device)
        return self._devices[device]

    def check_rows(self, rows: int, step: Offload) -> None:
        """Raise ``ValueError`` if the pool is smaller than what a method's step needs in one layer for so many rows."""
        pool = self.offload
        needed = rows * self.kv_heads * step.blocks_at_once
        slots = pool.slots(self.layers, self.kv_heads)
        if slots < needed:
            per_layer = -(-needed // (self.layers * self.kv_heads))
            raise ValueError(
                f"gpu_cache_tokens={pool.gpu_cache_tokens} gives the {self.layers} offloaded layers a pool of {slots} "
                f"blocks of {pool.block_size} tokens, but a step of one layer needs {needed} ({rows} rows x "
                f"{self.kv_heads} KV heads x {step.blocks_at_once} blocks: {step.held_at_once}); gpu_cache_tokens must "
                f"be at least {per_layer * pool.block_size}"
            )


def newest_blocks(held: Ints, block_size: int) -> Ints:
    """Return the index of the block that holds the last of ``held`` tokens; 0 for none."""
    newest: Ints = (np.maximum(held, 1) - 1) // block_size
    return newest


def device_empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate device memory."""
    return torch.empty(size, dtype=dtype, device=device)


def _nothing(device: torch.device) -> KeysAndValues:
    return torch.empty(0, device=device), torch.empty(0, device=device)
