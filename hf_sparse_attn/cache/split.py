"""A layer's keys and values for methods that evict from some of its KV heads only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_attn.cache.evicting import EvictingStorage
from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.storage import MIN_CAPACITY, GrowingStorage, Storage

if TYPE_CHECKING:
    from hf_sparse_attn.cache.parked import Exchange


class SplitStorage(EvictingStorage):
    """Buffers whose tokens can be evicted from some KV heads; the others keep all of theirs.

    Until the first eviction all heads lie in one pair of buffers. It moves the two groups of heads apart: the inherited
    buffers then hold the heads that evict, in their order, and :attr:`whole` the others.

    Parameters
    ----------
    heads
        KV heads that evict, ascending.
    initial_capacity, max_tokens
        As of :class:`~hf_sparse_attn.cache.storage.GrowingStorage`.
    """

    def __init__(self, heads: tuple[int, ...], initial_capacity: int = 0, max_tokens: int | None = None) -> None:
        super().__init__(initial_capacity, max_tokens)
        self.heads = heads
        self.whole: GrowingStorage | None = None
        """All tokens of the heads that do not evict; None while every token of every head is kept."""
        self._groups: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def kv_heads(self) -> int:
        """Number of the layer's KV heads."""
        return self.keys.shape[1] + (0 if self.whole is None else self.whole.keys.shape[1])

    @property
    def groups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The KV heads that evict, and the others, int64 on the device of the buffers."""
        if self._groups is None or self._groups[0].device != self.keys.device:
            others = [head for head in range(self.kv_heads) if head not in self.heads]
            with lasting_tensors():
                evicting, whole = (
                    torch.tensor(heads, device=self.keys.device).long() for heads in (self.heads, others)
                )
            self._groups = (evicting, whole)
        return self._groups

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create empty buffers with room for at least these tokens, for all heads."""
        self.whole = self._groups = None
        super().allocate(key_states, value_states)

    def reserve(self, length: int | None, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Grow the buffers of either group if ``length`` tokens fed do not fit."""
        super().reserve(length, make)
        if self.whole is not None:
            self.whole.reserve(length, lambda _: {})

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: Lengths) -> None:
        """Write tokens to both groups."""
        if self.whole is None:
            super().write(key_states, value_states, lengths)
            return
        evicting, others = self.groups
        self.whole.write(key_states[:, others], value_states[:, others], lengths)
        super().write(key_states[:, evicting], value_states[:, evicting], lengths)

    def evict(self, priority: torch.Tensor, keep: int, capacity: int, lengths: Lengths) -> None:
        """Keep the tokens of the highest priority in the heads that evict; see :meth:`EvictingStorage.evict`."""
        if self.whole is None:
            self._split(lengths.length)
        super().evict(priority, keep, capacity, lengths)

    def _split(self, length: int) -> None:
        """Move the two groups of heads to buffers of their own."""
        evicting, others = self.groups
        whole = GrowingStorage(max_tokens=self.max_tokens)
        capacity = max(self.capacity, length + MIN_CAPACITY)
        capacity = capacity if self.max_tokens is None else min(capacity, self.max_tokens)
        with lasting_tensors():
            batch, _, _, head_dim = self.keys.shape
            for name in ("keys", "values"):
                buffer = getattr(self, name)
                moved = buffer.new_empty(batch, len(others), capacity, head_dim)
                moved[:, :, :length] = buffer[:, others, :length]
                setattr(whole, name, moved)
            evicting_keys, evicting_values = self.keys[:, evicting, :length], self.values[:, evicting, :length]
            self.keys, self.values, self.whole = evicting_keys, evicting_values, whole

    def replace_all(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to the rows of every buffer."""
        super().replace_all(change)
        if self.whole is not None:
            self.whole.replace_all(change)

    def exchange(self, change: Exchange, tokens: int) -> None:
        """Replace all tensors that lie on the device, of both groups."""
        super().exchange(change, tokens)
        if self.whole is not None:
            self.whole.exchange(change, tokens)

    def enter_device(self) -> None:
        """Take note that the buffers of both groups are the storage's own."""
        super().enter_device()
        if self.whole is not None:
            self.whole.enter_device()

    def fork(self, tokens: int, size: Any = None) -> Storage:
        """Return a storage over the same keys and values, or over copies of those that evict after an eviction."""
        fork = super().fork(tokens)
        assert isinstance(fork, SplitStorage)
        if self.whole is not None:
            whole = self.whole.fork(tokens)
            assert isinstance(whole, GrowingStorage)
            fork.whole = whole
        return fork

    def cut(self, length: int) -> None:
        """Drop the tokens after ``length``, which is 0 or at least :attr:`least_length`."""
        if self.whole is None:
            super().cut(length)
        elif length == 0:
            batch, _, _, head_dim = self.keys.shape
            nothing = self.keys.new_empty(batch, self.kv_heads, 0, head_dim)
            self.allocate(nothing, nothing)
        else:
            super().cut(length)
            self.whole.cut(length)


def evicting_storage(
    heads: tuple[int, ...] | None, initial_capacity: int = 0, max_tokens: int | None = None
) -> EvictingStorage:
    """Create the storage of a layer that evicts from some KV heads, or from all if ``heads`` is None."""
    if heads is None:
        return EvictingStorage(initial_capacity, max_tokens)
    return SplitStorage(heads, initial_capacity, max_tokens)


def of_kind(storage: Storage, evicts: bool, heads: tuple[int, ...] | None) -> Storage:
    """Return the storage, or one over its buffers that evicts from other heads or none, for a fork of another method.

    ``heads`` is as for :func:`evicting_storage`.
    """
    if isinstance(storage, EvictingStorage) == evicts and getattr(storage, "heads", None) == heads:
        return storage
    twin: GrowingStorage
    twin = evicting_storage(heads, 0, storage.max_tokens) if evicts else GrowingStorage(max_tokens=storage.max_tokens)
    if hasattr(storage, "keys"):
        twin.keys, twin.values = storage.keys, storage.values
        storage.share(twin, storage.shared_tokens)
    return twin
