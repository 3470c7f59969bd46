"""A layer's keys and values in host memory, read and written there by the kernels of decode steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_attn.cache.host.kept import KeptBlocks
from hf_sparse_attn.cache.host.memory import HostTokens, host_bytes, host_tokens
from hf_sparse_attn.cache.host.prompts import PromptStage, PromptStages
from hf_sparse_attn.cache.host.room import check_host_room
from hf_sparse_attn.cache.host.traffic import HostTraffic
from hf_sparse_attn.cache.lasting import lasting_tensors, mark_static
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.storage import GrowingStorage, Present, Rows, StaticStorage, Storage

if TYPE_CHECKING:
    from hf_sparse_attn.cache.parked import Exchange
    from hf_sparse_attn.methods.base import Selection, SelectionSize
    from hf_sparse_attn.stats import LayerCounter

COPIED_TOKENS = 4096
"""Tokens of a row that pass through the device at once when rows are copied or reordered."""


@torch.library.custom_op(
    "hf_sparse_attn::write_to_host",
    mutates_args=("keys", "values"),
    schema="(Tensor(a!) keys, Tensor(b!) values, Tensor positions, Tensor key_states, Tensor value_states) -> ()",
)
def _write_to_host(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
) -> None:
    """Write tokens at int64 [n] positions, as one node of a compiled step.

    The compiler takes what ``index_copy_`` has written to for a tensor without gaps. Keys lie between values here, so
    it would copy all of them to the device for the next op.
    """
    keys.index_copy_(2, positions, key_states)
    values.index_copy_(2, positions, value_states)


@_write_to_host.register_fake
def _(*arguments: torch.Tensor) -> None:
    return None


class HostStorage(Storage):
    """Buffers in host memory, under the addresses that the device's kernels use for them.

    Mixed into a kind of storage, which it gives other memory: :attr:`keys` and :attr:`values` are tensors of the
    device, but their contents lie on the host. A decode step writes and reads them there, so neither the host nor a
    copy takes part in it. A pass over several tokens reads :meth:`rows`, which are on the device.

    Parameters
    ----------
    stages
        The memory of the cache's devices for passes over several tokens.
    size
        Size of the selections of the layer's method. With a maximum, the blocks of the last steps' selections are kept
        on the device, and a step reads the others in host memory; without one it reads all of them there.
    room
        Arguments of the kind of storage.
    """

    keeps_rows = False
    traffic: HostTraffic

    def __init__(self, stages: PromptStages, size: SelectionSize | None, *room: Any) -> None:
        super().__init__(*room)
        self._size = size
        self._kept: KeptBlocks | None = None
        self.traffic = HostTraffic()
        self._stages = stages
        self._reserved: HostTokens | None = None
        self._written: int | None = 0  # tokens of a row; None if the host would have to wait for the device
        self.on_host: torch.Tensor
        """The buffers as a tensor of the host, [batch, kv_heads, capacity, 2, head_dim]: keys beside values."""

    @property
    def _stage(self) -> PromptStage:
        return self._stages.on(self.keys.device)

    def reserve_first(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffers that :meth:`allocate` takes for tokens of this kind, [batch, kv_heads, n, head_dim]."""
        self._reserved = host_tokens(self._first_shape(shape), dtype, device)

    def drop_reserved(self) -> None:
        """Free what :meth:`reserve_first` has allocated, if no tokens have come."""
        self._reserved = None

    def first_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that :meth:`reserve_first` allocates."""
        return host_bytes(self._first_shape(shape), dtype)

    def _first_shape(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        batch, kv_heads, tokens, head_dim = shape
        return batch, kv_heads, self.first_capacity(tokens), head_dim

    def release(self) -> None:
        """Free the buffers, the metadata and the slots of a layer without tokens, as before its first ones."""
        self.drop_reserved()
        if hasattr(self, "keys"):
            self._stage.drop(self)
            del self.keys, self.values, self.on_host
        self._kept, self._written, self.metadata = None, 0, {}

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create buffers of zeros in host memory, unless those that were reserved serve."""
        shape, dtype, device = self._first_shape(key_states.shape), key_states.dtype, key_states.device
        reserved, self._reserved = self._reserved, None
        if reserved is None or not _serves(reserved, shape, dtype, device):
            reserved = None  # before more is allocated
            reserved = host_tokens(shape, dtype, device)
        self._place(reserved)

    def allocate_metadata(self, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Replace the metadata by ``make(self)``, and allocate what decode steps need on the device."""
        super().allocate_metadata(make)  # type: ignore[safe-super]  # of the kind that it is mixed into
        with lasting_tensors():
            self.traffic.allocate(self.keys, self.pin)
        self._keep_blocks()

    def _keep_blocks(self) -> None:
        """Create empty slots for the blocks of selections, if these have a maximum size."""
        self._kept = None
        if self._size is not None and self._size.blocks is not None:
            self._kept = KeptBlocks(self.keys, self._size, self._size.blocks, self._mark)
        self.traffic.reads_all = self._kept is None

    def _mark(self, tensor: torch.Tensor, dynamic_dims: tuple[int, ...]) -> torch.Tensor:
        return mark_static(tensor, dynamic_dims) if self.is_compileable else tensor

    def clear_metadata(self, make: Callable[[Storage], dict[str, torch.Tensor]], kept: Collection[str] = ()) -> None:
        """Reset the metadata to that of empty rows, as when rows begin elsewhere: then blocks do too."""
        super().clear_metadata(make, kept)
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        if self._kept is not None:
            self._kept.empty()

    def _place(self, tokens: HostTokens) -> None:
        self.on_host, *buffers = tokens
        self.keys, self.values = (self._mark(buffer, (2,)) for buffer in buffers)
        self._stage.drop(self)

    def _replace_buffers(self, shape: Sequence[int], order: torch.Tensor | None = None) -> None:
        """Move the tokens to new buffers; row ``b`` becomes row ``order[b]`` of the old ones."""
        self._stage.drop()
        twin = copy.copy(self)
        batch, kv_heads, capacity, head_dim = shape
        twin._place(host_tokens((batch, kv_heads, capacity, head_dim), self.keys.dtype, self.keys.device))
        with lasting_tensors():
            for target, source in ((twin.keys, self.keys), (twin.values, self.values)):
                self._copy_tokens(target, source, order)
        if twin._kept is not None:
            twin._keep_blocks()
        self.__dict__.update(twin.__dict__)

    def enlarge(self, capacity: int) -> None:
        """Move the tokens to larger buffers.

        Raises
        ------
        RuntimeError
            The host has no room for them beside the present ones, or they cannot be pinned.
        """
        batch, kv_heads, held, head_dim = self.keys.shape
        larger = (batch, kv_heads, capacity, head_dim)
        check_host_room(host_bytes(larger, self.keys.dtype), capacity, replaced=held)
        self._replace_buffers(larger)

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: Lengths) -> None:
        """Write a decode step's token to host memory; stage several tokens on the device, and store them."""
        num_new = key_states.shape[2]
        if num_new > 1 and lengths.known_length is not None:
            self._stage.take(self, key_states, value_states, lengths.length)
        elif torch.compiler.is_compiling():
            positions = lengths.seq_end[:1] + torch.arange(-num_new, 0, device=self.keys.device)
            _write_to_host(self.keys, self.values, positions, key_states, value_states)
        else:
            super().write(key_states, value_states, lengths)  # type: ignore[safe-super]

    def mark_written(self, lengths: Lengths) -> None:
        """Note how many tokens there are, for copies of the rows."""
        self._written = lengths.known_length

    def present(self, selection: Selection, lengths: Lengths, counter: LayerCounter) -> Iterable[Present]:
        """Return the slots of the selected blocks; without slots the host memory, where the op then reads."""
        if self._kept is not None:
            return (self._kept.take(self.keys, self.values, selection, lengths, counter, self.traffic),)
        self._count_token()
        return super().present(selection, lengths, counter)

    def present_rows(self, lengths: Lengths) -> Rows:
        """Return the host memory, where the op then reads."""
        self._count_token()
        return super().present_rows(lengths)

    def _count_token(self) -> None:
        """Count the step's token, which was written to host memory."""
        batch, kv_heads = self.keys.shape[:2]
        self.traffic.counts[3:] += batch * kv_heads

    def rows(self, lengths: Lengths) -> Rows:
        """Return all tokens on the device; in host memory if a pass is compiled."""
        if lengths.known_length is None:
            return super().rows(lengths)
        return Rows(*self._stage.rows(self, lengths.length), lengths.seq_start, lengths.seq_end)

    def visible(self, lengths: Lengths, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the staged tokens, or the buffers in host memory after a single token."""
        if num_new == 1 or lengths.known_length is None:
            return super().visible(lengths, num_new)  # type: ignore[safe-super]
        return self._stage.rows(self, lengths.length)

    def planned_length(self, lengths: Lengths) -> int:
        """Return the largest integer, so that decode steps always select: no step reads whole rows."""
        return sys.maxsize

    def cut(self, length: int) -> None:
        """Drop tokens; copy the buffers if they belong to another storage too."""
        self._stage.drop(self)
        self._forget_blocks()
        if length < self.shared_tokens:
            self._replace_buffers(self.keys.shape)
            self.shared_tokens = 0

    def replace_all(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to the rows of every buffer, through the device and without a copy on the host."""
        order = change(torch.arange(self.keys.shape[0], device=self.keys.device))
        if len(order) != self.keys.shape[0]:
            self._replace_buffers((len(order), *self.keys.shape[1:]), order)
            self.shared_tokens = 0
        else:
            self.cut(0)
            with lasting_tensors():
                for buffer in (self.keys, self.values):
                    self._copy_tokens(buffer, buffer, order)
        with lasting_tensors():
            self.metadata = {name: self.replace(old, change(old)) for name, old in self.metadata.items()}

    def exchange(self, change: Exchange, tokens: int) -> None:
        """Replace the metadata: keys and values lie on the host."""
        self.exchange_metadata(change)

    def leave_device(self) -> None:
        """Free the slots for blocks, and staged tokens."""
        self._stage.drop(self)
        self._kept = None

    def enter_device(self) -> None:
        """Allocate empty slots."""
        self._keep_blocks()

    def fork(self, tokens: int, size: SelectionSize | None = None) -> Storage:
        """Return a storage over the same host memory, without metadata or slots; its rows share ``tokens`` tokens."""
        fork = super().fork(tokens)
        assert isinstance(fork, HostStorage)
        fork.traffic, fork._size, fork._kept, fork._reserved = HostTraffic(), size, None, None
        return fork

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStorage:
        """Return a storage with host memory and metadata of its own."""
        twin = copy.copy(self)
        twin._kept = twin._reserved = None
        memo[id(self)] = twin
        twin.traffic, twin.metadata = copy.deepcopy((self.traffic, self.metadata), memo)
        if hasattr(self, "keys"):
            twin._replace_buffers(self.keys.shape)
            twin.shared_tokens = 0
            twin._keep_blocks()
        return twin

    def _copy_tokens(self, target: torch.Tensor, source: torch.Tensor, order: torch.Tensor | None) -> None:
        """Copy the tokens of [batch, kv_heads, capacity, head_dim], in the order of rows given, part by part."""
        end = source.shape[2] if self._written is None else self._written
        for begin in range(0, end, COPIED_TOKENS):
            part = source[:, :, begin : min(begin + COPIED_TOKENS, end)]
            target[:, :, begin : begin + part.shape[2]] = part if order is None else part.index_select(0, order)


def _serves(tokens: HostTokens, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether buffers have a shape, or more capacity, and the dtype and device."""
    batch, kv_heads, capacity, head_dim = tokens.keys.shape
    fits = (batch, kv_heads, head_dim) == (shape[0], shape[1], shape[3]) and capacity >= shape[2]
    return fits and tokens.keys.dtype == dtype and tokens.keys.device == device


class GrowingHostStorage(HostStorage, GrowingStorage):
    """Buffers in host memory that are replaced by larger ones when full."""


class StaticHostStorage(HostStorage, StaticStorage):
    """Buffers in host memory with fixed addresses, for compiled decode steps."""
