"""Buffers for one layer's keys, values and metadata: growing buffers, and static ones for compiled decode steps."""

from __future__ import annotations

import copy
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_sparse_attn.cache.lasting import lasting_tensors, mark_static
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.traffic import Traffic

if TYPE_CHECKING:
    from hf_sparse_attn.cache.parked import Exchange
    from hf_sparse_attn.methods.base import Selection, SelectionSize
    from hf_sparse_attn.stats import LayerCounter

MIN_CAPACITY = 64
DOUBLED_UP_TO = 4096


class Rows(NamedTuple):
    """Buffers with the bounds of their rows, as ops take them. A row may begin before its buffer does."""

    keys: torch.Tensor
    """[batch, kv_heads, n, head_dim]."""
    values: torch.Tensor
    """[batch, kv_heads, n, head_dim]."""
    seq_start: torch.Tensor
    """int32 [batch]."""
    seq_end: torch.Tensor
    """int32 [batch]."""


class Present(NamedTuple):
    """Where an op finds selected blocks of a decode step."""

    keys: torch.Tensor
    """[batch, kv_heads, n, head_dim]."""
    values: torch.Tensor
    """[batch, kv_heads, n, head_dim]."""
    block_indices: torch.Tensor
    """As in ``Selection``, the blocks counted from ``seq_start`` in these buffers, in the order of the selection."""
    block_counts: torch.Tensor
    """As in ``Selection``."""
    seq_start: torch.Tensor
    """int32 [batch]."""
    seq_end: torch.Tensor
    """int32 [batch]."""
    counter: torch.Tensor | None
    """``LayerCounter.totals`` for the op to count in; None if the step is counted already."""


class Storage(ABC):
    """One layer's buffers. The kinds differ in where the tokens lie, and how buffers are enlarged and replaced."""

    keys: torch.Tensor
    """[batch, kv_heads, capacity, head_dim]."""
    values: torch.Tensor
    """[batch, kv_heads, capacity, head_dim]."""
    metadata: dict[str, torch.Tensor]
    """The method's own tensors, batch dimension first."""

    is_compileable: bool
    """Whether Transformers may compile decode steps over these buffers."""
    max_tokens: int | None
    """Maximum number of tokens per row; None for no limit."""
    _common: int = 0
    _user: _User | None = None
    keeps_rows = True
    """Whether decode steps may read :attr:`keys` and :attr:`values`, as dense ones do."""
    traffic: Traffic | None = None
    """Traffic between host and device; None if nothing is offloaded."""

    def __init__(self) -> None:
        self.metadata = {}

    @property
    def shared_tokens(self) -> int:
        """Leading tokens of the rows that also belong to another storage: to a fork of this one, or one forked from."""
        return self._common if self._user is not None and len(self._user.all) > 1 else 0

    @shared_tokens.setter
    def shared_tokens(self, tokens: int) -> None:
        self._common = tokens
        if tokens == 0:
            self._user = None  # of buffers of its own

    def share(self, other: Storage, tokens: int) -> None:
        """Take note, in both, that another storage over the same buffers has ``tokens`` tokens too, while it exists."""
        if self._user is None:
            self._user = _User(weakref.WeakSet())
        self._common, other._common = max(self.shared_tokens, tokens), tokens
        other._user = _User(self._user.all)

    @property
    def capacity(self) -> int:
        """Number of tokens that the buffers have room for."""
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        """Number of the layer's KV heads."""
        return self.keys.shape[1]

    @abstractmethod
    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create empty buffers for tokens like these, [batch, kv_heads, tokens, head_dim]."""

    @abstractmethod
    def first_capacity(self, tokens: int) -> int:
        """Return the capacity of buffers that are created for a first pass over so many tokens."""

    @abstractmethod
    def allocate_metadata(self, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Replace the metadata by ``make(self)``."""

    @abstractmethod
    def reserve(self, length: int | None, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Make room for rows of ``length`` tokens; ``make`` allocates metadata for another capacity."""

    def drop_reserved(self) -> None:  # noqa: B027 - most storages allocate when the first tokens come
        """Free what was allocated for the first tokens, if they have not come."""

    @abstractmethod
    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: Lengths) -> None:
        """Write tokens at the end of the rows, where ``lengths`` already includes them."""

    def mark_written(self, lengths: Lengths) -> None:  # noqa: B027 - a storage without blocks has nothing to note
        """Take note that all tokens in ``lengths`` are written, by :meth:`write` or by an op to :meth:`newest`."""

    def newest(self, lengths: Lengths) -> Rows:
        """Return the rows for an op that reads and writes nothing but the newest block of each."""
        return Rows(self.keys, self.values, lengths.seq_start, lengths.seq_end)

    def rows(self, lengths: Lengths) -> Rows:
        """Return the rows for an op that reads all their tokens, in a pass over several tokens."""
        return Rows(self.keys, self.values, lengths.seq_start, lengths.seq_end)

    def present(self, selection: Selection, lengths: Lengths, counter: LayerCounter) -> Iterable[Present]:
        """Return where the selected blocks of a decode step are, once its token is written.

        There may be several parts of the selection. What reads a part must be queued before the next one is asked for.
        """
        chosen = (selection.block_indices, selection.block_counts)  # Dynamo 2.8 cannot slice a named tuple
        bounds = (lengths.seq_start, lengths.seq_end)
        return (Present(self.keys, self.values, *chosen, *bounds, counter=counter.totals),)

    def present_rows(self, lengths: Lengths) -> Rows:
        """Return the rows for an op that chooses while it reads, once the decode step's token is written."""
        return Rows(self.keys, self.values, lengths.seq_start, lengths.seq_end)

    def stage(self, lengths: Lengths) -> None:  # noqa: B027 - most storages hold every token at any time
        """Let :attr:`keys` and :attr:`values` hold every token, which they may not after a decode step."""

    @abstractmethod
    def visible(self, lengths: Lengths, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values for stock attention after ``num_new`` tokens were written."""

    @abstractmethod
    def mask_length(self, lengths: Lengths | None, query_length: int) -> int:
        """Return the number of keys that :meth:`visible` will have after ``query_length`` more tokens."""

    @abstractmethod
    def longest_row(self, lengths: Lengths) -> int:
        """Return an upper bound on the tokens of any row, without reading the device."""

    @abstractmethod
    def planned_length(self, lengths: Lengths) -> int:
        """Return the row length that decides whether a decode step selects."""

    @abstractmethod
    def reads_by_bounds(self) -> bool:
        """Whether dense decode steps read each row from its first to its last token, without a mask."""

    @abstractmethod
    def replace(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``new``, at the address of ``old`` where possible."""

    @abstractmethod
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a lasting tensor of the layer, marked for compiled steps."""

    def replace_all(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to the rows of every buffer."""
        with lasting_tensors():
            self.keys = self.replace(self.keys, change(self.keys))
            self.values = self.replace(self.values, change(self.values))
            self.metadata = {name: self.replace(old, change(old)) for name, old in self.metadata.items()}

    def clear_metadata(self, make: Callable[[Storage], dict[str, torch.Tensor]], kept: Collection[str] = ()) -> None:
        """Reset the metadata to that of empty rows, but those whose names are ``kept``."""
        with lasting_tensors():
            fresh = {**make(self), **{name: self.metadata[name] for name in kept}}
            self.metadata = {name: self.replace(old, fresh[name]) for name, old in self.metadata.items()}

    def exchange(self, change: Exchange, tokens: int) -> None:
        """Replace all tensors that lie on the device, to move them; the buffers hold ``tokens`` tokens."""
        self.keys, self.values = change(self.keys, tokens), change(self.values, tokens)
        self.exchange_metadata(change)

    def exchange_metadata(self, change: Exchange) -> None:
        """Replace the metadata, to move it."""
        self.metadata = {name: change(tensor) for name, tensor in self.metadata.items()}

    def leave_device(self) -> None:  # noqa: B027 - most storages have nothing on the device but what was moved
        """Free what the device holds beside the tensors of :meth:`exchange`, once these have been moved to the host."""

    def enter_device(self) -> None:
        """Allocate what :meth:`leave_device` has freed. The tensors of :meth:`exchange` are the storage's own now."""
        self.shared_tokens = 0

    def fork(self, tokens: int, size: SelectionSize | None = None) -> Storage:
        """Return a storage over the same keys and values, without metadata; its rows share ``tokens`` tokens.

        ``size`` is that of the selections of the fork's method.
        """
        fork = copy.copy(self)
        fork.metadata, fork.shared_tokens = {}, 0
        if tokens:
            self.share(fork, tokens)
        return fork

    def state(self) -> dict[str, Any] | None:
        """Return what :meth:`restore` needs to undo a forward pass; None if cutting the rows back undoes it."""
        return None

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 - called only with a state
        """Undo a forward pass over cached tokens, before rows are cut back; ``state`` is that before the pass."""

    @property
    def least_length(self) -> int:
        """Least length above 0 that :meth:`cut` can return to."""
        return 0

    def cut(self, length: int) -> None:
        """Take note that tokens after ``length`` are gone: copy the buffers if they belong to another storage too."""
        if length >= self.shared_tokens:
            return
        twin = copy.copy(self)
        twin.allocate(self.keys, self.values)
        with lasting_tensors():
            twin.keys.copy_(self.keys)
            twin.values.copy_(self.values)
        self.keys, self.values, self.shared_tokens = twin.keys, twin.values, 0


class _User:
    """Stands for a storage among those over the same buffers, as long as that storage uses them.

    Not the storage itself, which may get buffers of its own, and whose attributes are put back after a failed pass.
    """

    def __init__(self, users: weakref.WeakSet[_User]) -> None:
        self.all = users
        users.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copied storage has buffers of its own."""


class GrowingStorage(Storage):
    """Buffers that are replaced by larger ones when full.

    Parameters
    ----------
    initial_capacity
        Tokens to allocate room for at first.
    max_tokens
        Maximum number of tokens per row; None for no limit.
    """

    is_compileable = False

    def __init__(self, initial_capacity: int = 0, max_tokens: int | None = None) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.initial_capacity = max(initial_capacity, MIN_CAPACITY)

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create empty buffers with room for at least these tokens."""
        capacity = self.first_capacity(key_states.shape[2])
        with lasting_tensors():
            self.keys, self.values = _empty(key_states, capacity), _empty(value_states, capacity)

    def first_capacity(self, tokens: int) -> int:
        """Return the initial capacity, or the number of tokens if that is larger."""
        return max(self.initial_capacity, tokens)

    def allocate_metadata(self, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Replace the metadata by ``make(self)``, in any inference mode."""
        with lasting_tensors():
            self.metadata = make(self)

    def reserve(self, length: int | None, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Grow the buffers if ``length`` does not fit."""
        if length is None or length <= self.capacity:
            return
        larger = copy.copy(self)  # memory may run out at any of the buffers: all are replaced, or none
        larger.shared_tokens = 0
        with lasting_tensors():
            larger.enlarge(self.capacity_for(length))
            grown = make(larger)
            larger.metadata = {name: enlarged(old, grown[name]) for name, old in self.metadata.items()}
        self.__dict__.update(larger.__dict__)

    def capacity_for(self, length: int) -> int:
        """Return the capacity of the buffers that replace these if rows of ``length`` tokens do not fit."""
        return max(length, grown_capacity(self.capacity))

    def enlarge(self, capacity: int) -> None:
        """Replace the buffers by larger ones with the same tokens."""
        self.keys = enlarged(self.keys, _empty(self.keys, capacity))
        self.values = enlarged(self.values, _empty(self.values, capacity))

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: Lengths) -> None:
        """Copy the tokens to the end of the rows."""
        end = lengths.length
        self.keys[:, :, end - key_states.shape[2] : end] = key_states
        self.values[:, :, end - value_states.shape[2] : end] = value_states

    def visible(self, lengths: Lengths, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the filled part of the buffers."""
        return self.keys[:, :, : lengths.length], self.values[:, :, : lengths.length]

    def mask_length(self, lengths: Lengths | None, query_length: int) -> int:
        """Return the number of cached and new tokens."""
        return (0 if lengths is None else lengths.length) + query_length

    def longest_row(self, lengths: Lengths) -> int:
        """Return the length of the row with the least padding."""
        return lengths.length - lengths.least_padding

    def planned_length(self, lengths: Lengths) -> int:
        """Return the length of the longest row: every step decides for itself."""
        return self.longest_row(lengths)

    def reads_by_bounds(self) -> bool:
        """Whether the buffers are on CUDA: on a CPU stock attention over the filled part is faster."""
        return self.keys.is_cuda

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``new``, whose address may differ."""
        return new

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor unmarked."""
        return tensor


class StaticStorage(Storage):
    """Buffers with fixed addresses, which compiled decode steps and CUDA graphs can write to.

    Parameters
    ----------
    max_tokens
        Maximum number of tokens per row.
    """

    is_compileable = True

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens: int = max_tokens

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create buffers of zeros: an unpatched model reads them to the end, and a mask does not stop NaN."""
        with lasting_tensors():
            self.keys = mark_static(_empty(key_states, self.max_tokens).zero_(), dynamic_dims=(2,))
            self.values = mark_static(_empty(value_states, self.max_tokens).zero_(), dynamic_dims=(2,))

    def first_capacity(self, tokens: int) -> int:
        """Return the maximum number of tokens."""
        return self.max_tokens

    def allocate_metadata(self, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Replace the metadata, and mark the sizes that depend on the capacity."""
        larger = self.fork(0)
        batch, kv_heads, capacity, head_dim = self.keys.shape
        larger.keys = self.keys.new_empty(batch, kv_heads, 4 * capacity, head_dim, device="meta")
        shapes = {name: tensor.shape for name, tensor in make(larger).items()}
        with lasting_tensors():
            self.metadata = make(self)
        for name, tensor in self.metadata.items():
            sizes = zip(tensor.shape, shapes[name], strict=True)
            mark_static(tensor, [dim for dim, (size, other) in enumerate(sizes) if size != other])

    def reserve(self, length: int | None, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Do nothing: the cache has already rejected tokens that do not fit."""

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: Lengths) -> None:
        """Copy the tokens to the end of the rows, read on the device after compiled steps."""
        num_new, end = key_states.shape[2], lengths.known_length
        if end is None:
            positions = lengths.seq_end[:1] + torch.arange(-num_new, 0, device=self.keys.device)
            self.keys.index_copy_(2, positions, key_states)
            self.values.index_copy_(2, positions, value_states)
        else:
            self.keys[:, :, end - num_new : end] = key_states
            self.values[:, :, end - num_new : end] = value_states

    def visible(self, lengths: Lengths, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the filled part of the buffers after a prompt, the whole buffers after a single token."""
        if num_new == 1 or lengths.known_length is None:
            return self.keys, self.values
        return self.keys[:, :, : lengths.length], self.values[:, :, : lengths.length]

    def mask_length(self, lengths: Lengths | None, query_length: int) -> int:
        """Return the number of cached and new tokens, or the capacity for a single new token."""
        if query_length == 1 or (lengths is not None and lengths.is_traced):
            # A compiled step needs a tensor's size here: max_tokens would be a constant of its graph.
            return self.max_tokens if lengths is None else self.capacity
        return (0 if lengths is None else lengths.length) + query_length

    def longest_row(self, lengths: Lengths) -> int:
        """Return the capacity."""
        return self.capacity

    def planned_length(self, lengths: Lengths) -> int:
        """Return the largest integer, so that decode steps always select: one compiled step serves every length."""
        return sys.maxsize

    def reads_by_bounds(self) -> bool:
        """Whether rows are read without a mask: always, since a mask would span the whole buffers."""
        return True

    def replace_all(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to the rows of every buffer, after copying shared ones."""
        self.cut(0)
        super().replace_all(change)

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return ``old`` with the contents of ``new``, or ``new`` itself if the shapes differ."""
        if old.shape == new.shape:
            return old.copy_(new)
        return mark_static(new, getattr(old, "_dynamo_weak_dynamic_indices", ()))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark a tensor whose address stays fixed."""
        return mark_static(tensor)


def grown_capacity(capacity: int) -> int:
    """Capacity of the buffer that replaces a full one: twice as large at first, later an eighth larger.

    Short sequences are copied rarely; long ones, whose buffers take gigabytes, leave little memory unused.
    """
    return capacity + max(min(capacity, DOUBLED_UP_TO), capacity // 8)


def enlarged(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return ``new`` with the contents of ``old`` in its leading part."""
    new[tuple(slice(size) for size in old.shape)] = old
    return new


def _empty(like: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, kv_heads, _, head_dim = like.shape
    return like.new_empty(batch, kv_heads, capacity, head_dim)
