"""A layer's keys and values for methods that evict: the slots of the tokens that are kept, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.storage import GrowingStorage, Rows, Storage

if TYPE_CHECKING:
    from hf_sparse_attn.cache.parked import Exchange


class Kept(NamedTuple):
    """The tokens that the slots of a layer hold, once some were evicted.

    The slots of a row are those from ``first`` to the last one. All are in use in a decode step, once its token is
    written. Between steps one of them may be open: the token in it is evicted, but not yet overwritten. Immutable, so
    that a failed pass is undone by the former object.
    """

    positions: torch.Tensor
    """int32 [batch, kv_heads, slots]: position of each slot's token, left padding included."""
    first: torch.Tensor
    """int32 [batch]: first slot of each row. Every KV head of a row keeps the same number of tokens."""
    open_slot: torch.Tensor | None
    """int64 [batch, kv_heads, 1]: slot of the next token; None for a new slot at the end."""
    length: int
    """Tokens fed per row, left padding included."""
    evicted_at: int
    """Its value when a token was last evicted."""

    @property
    def slots(self) -> int:
        """Number of slots, those before ``first`` included."""
        return self.positions.shape[2]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Kept:
        """Reorder, repeat or choose rows."""
        open_slot = None if self.open_slot is None else change(self.open_slot)
        return self._replace(positions=change(self.positions), first=change(self.first), open_slot=open_slot)


class EvictingStorage(GrowingStorage):
    """Buffers whose tokens can be evicted. Until the first eviction a token's slot is its position, as elsewhere.

    The first eviction moves what is kept to buffers of the size needed. A decode step then writes its token to the slot
    that the step before opened. So the slots are not in the order of positions, which attention does not depend on: the
    keys are rotated already.
    """

    keeps_rows = False

    def __init__(self, initial_capacity: int = 0, max_tokens: int | None = None) -> None:
        super().__init__(initial_capacity, max_tokens)
        self.kept: Kept | None = None
        """The tokens in the slots; None while every token is kept."""
        self.finished_at: int | None = None
        """Tokens fed per row when the first prompt was complete; None before."""
        self.weights: torch.Tensor | None = None
        """[batch, kv_heads, slots]: attention that each slot's token has got, if the method adds it up; else None."""

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Create empty buffers with room for at least these tokens."""
        self.kept = self.weights = self.finished_at = None
        super().allocate(key_states, value_states)

    def slots(self, lengths: Lengths) -> int:
        """Return the number of slots in use, padding included."""
        return lengths.length if self.kept is None else self.kept.slots

    def positions(self, lengths: Lengths) -> torch.Tensor:
        """Return the position of each slot's token, int32 [batch or 1, kv_heads or 1, slots]."""
        if self.kept is not None:
            return self.kept.positions
        return torch.arange(lengths.length, dtype=torch.int32, device=self.keys.device)[None, None]

    def most_tokens(self, lengths: Lengths) -> int:
        """Return an upper bound on the tokens held of any row, which needs no device read."""
        return self.longest_row(lengths) if self.kept is None else self.kept.slots

    def rows(self, lengths: Lengths) -> Rows:
        """Return the slots in use with their bounds."""
        if self.kept is None:
            return super().rows(lengths)
        end = torch.full_like(self.kept.first, self.kept.slots)
        return Rows(self.keys, self.values, self.kept.first, end)

    def visible(self, lengths: Lengths, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the filled part of the buffers."""
        end = self.slots(lengths)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, length: int | None, make: Callable[[Storage], dict[str, torch.Tensor]]) -> None:
        """Grow the buffers if the slots of ``length`` tokens fed do not fit."""
        if self.kept is None or length is None:
            super().reserve(length, make)
            return
        new = length - self.kept.length
        super().reserve(self.kept.slots + new - (0 if self.kept.open_slot is None else 1), make)

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, lengths: Lengths) -> None:
        """Write a token to the open slot, or any number of them to new slots."""
        if self.kept is None:
            super().write(key_states, value_states, lengths)
            return
        new, length = key_states.shape[2], lengths.length
        if new == 1 and self.kept.open_slot is not None:
            self._fill(key_states, value_states, length)
            return
        kept = self._closed()
        batch, kv_heads, slots = kept.positions.shape
        self.keys[:, :, slots : slots + new] = key_states
        self.values[:, :, slots : slots + new] = value_states
        with lasting_tensors():
            added = torch.arange(length - new, length, dtype=torch.int32, device=self.keys.device)
            positions = torch.cat((kept.positions, added.expand(batch, kv_heads, new)), dim=2)
            self.kept = kept._replace(positions=positions, length=length)

    def _fill(self, key_states: torch.Tensor, value_states: torch.Tensor, length: int) -> None:
        """Write a token to the open slot."""
        kept = self.kept
        assert kept is not None
        assert kept.open_slot is not None
        self._put(kept.open_slot, key_states, value_states)
        with lasting_tensors():
            positions = kept.positions.scatter(2, kept.open_slot, length - 1)
            if self.weights is not None:
                self.weights = self.weights.scatter(2, kept.open_slot, 0)
            first = (kept.first - 1).clamp_min(0)
            self.kept = kept._replace(positions=positions, first=first, open_slot=None, length=length)

    def _closed(self) -> Kept:
        """Return the slots after the last one's token was moved to the open slot, if there is one."""
        kept = self.kept
        assert kept is not None
        if kept.open_slot is None:
            return kept
        last = kept.slots - 1
        self._put(kept.open_slot, *(buffer[:, :, last : last + 1].clone() for buffer in (self.keys, self.values)))
        with lasting_tensors():
            positions = kept.positions.scatter(2, kept.open_slot, kept.positions[:, :, last:])[:, :, :last]
            if self.weights is not None:
                self.weights = self.weights.scatter(2, kept.open_slot, self.weights[:, :, last:])[:, :, :last]
            self.kept = kept._replace(positions=positions, first=(kept.first - 1).clamp_min(0), open_slot=None)
        return self.kept

    def _put(self, slot: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.shared_tokens:
            self._copy_buffers()
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.scatter_(2, slot[..., None].expand(-1, -1, -1, buffer.shape[3]), states)

    def evict(self, priority: torch.Tensor, keep: int, capacity: int, lengths: Lengths) -> None:
        """Keep the tokens of the highest priority, in new buffers, and free the others.

        Parameters
        ----------
        priority
            [batch, kv_heads or 1, slots]; of equal ones the first slots are kept. Values before a row's first slot are
            ignored.
        keep
            Number of tokens to keep in each row and KV head; fewer than :meth:`most_tokens`.
        capacity
            Slots of the new buffers, at least ``keep``.
        lengths
            The rows' lengths.
        """
        with lasting_tensors():
            positions, first = self.positions(lengths), self.rows(lengths).seq_start
            slots = torch.arange(priority.shape[2], device=priority.device)
            ranked = priority.masked_fill(slots < first[:, None, None], -torch.inf)
            chosen = ranked.argsort(dim=2, descending=True, stable=True)[:, :, :keep].sort(dim=2).values
            chosen = chosen.expand(*self.keys.shape[:2], -1)
            if self.weights is not None:
                self.weights = self.weights.gather(2, chosen)
            self.keys, self.values = (gathered(buffer, chosen, capacity) for buffer in (self.keys, self.values))
            self.shared_tokens = 0
            self.kept = Kept(
                positions=positions.expand(*self.keys.shape[:2], -1).gather(2, chosen),
                first=(keep - (priority.shape[2] - first)).clamp_min(0).to(torch.int32),
                open_slot=None,
                length=lengths.length,
                evicted_at=lengths.length,
            )

    def sort(self) -> None:
        """Bring the slots into the order of positions, in new buffers: a failed pass returns to the old ones.

        Decode steps leave another order. No slot may be open, as after a pass over several tokens.
        """
        kept = self.kept
        assert kept is not None
        assert kept.open_slot is None
        with lasting_tensors():
            order = kept.positions.argsort(dim=2, stable=True)
            capacity = self.capacity
            self.keys, self.values = (gathered(buffer, order, capacity) for buffer in (self.keys, self.values))
            self.shared_tokens = 0
            self.weights = None if self.weights is None else self.weights.gather(2, order)
            self.kept = kept._replace(positions=kept.positions.gather(2, order))

    def open(self, priority: torch.Tensor) -> None:
        """Evict the token of the lowest priority of each row and KV head; its slot is the next token's.

        A row with padding before its first slot evicts none and opens the last of these.

        Parameters
        ----------
        priority
            [batch, kv_heads or 1, slots]; of equal ones the first slot is opened.
        """
        assert self.kept is not None
        kept = self.kept
        with lasting_tensors():
            padding = kept.first.long()[:, None, None]
            lowest = priority.argmin(dim=2, keepdim=True)
            open_slot = torch.where(padding > 0, padding - 1, lowest).expand(*self.keys.shape[:2], 1)
            self.kept = kept._replace(open_slot=open_slot, evicted_at=kept.length)

    def add_weights(self, weights: torch.Tensor, new_tokens: int, lengths: Lengths) -> None:
        """Add what the tokens got from the queries of ``new_tokens`` cached tokens, [batch, kv_heads, slots].

        :attr:`weights` stays None if other tokens were cached before, whose queries are not known.
        """
        slots = self.slots(lengths)
        with lasting_tensors():
            if self.weights is None:
                self.weights = weights.clone() if slots == new_tokens else None
            elif self.weights.shape[2] == slots:
                self.weights = self.weights + weights
            elif self.weights.shape[2] == slots - new_tokens:
                self.weights = torch.nn.functional.pad(self.weights, (0, new_tokens)) + weights
            else:
                self.weights = None

    @property
    def least_length(self) -> int:
        """Least length above 0 that :meth:`cut` can return to, since evicted tokens do not come back."""
        return 0 if self.kept is None else self.kept.evicted_at

    def cut(self, length: int) -> None:
        """Drop the tokens after ``length``, which is 0 or at least :attr:`least_length`."""
        if self.kept is not None and length >= self.kept.length:
            return
        if self.finished_at is not None and length < self.finished_at:
            self.finished_at = None
        if length < self.shared_tokens:
            self._copy_buffers()
        if length == 0 or self.kept is None:
            self.kept = None
            self.weights = None if self.weights is None or length == 0 else self.weights[:, :, :length]
            return
        assert length >= self.kept.evicted_at
        slots = self.kept.slots - (self.kept.length - length)  # nothing was evicted since, so they are the last ones
        self.kept = self.kept._replace(positions=self.kept.positions[:, :, :slots], length=length)
        self.weights = None if self.weights is None else self.weights[:, :, :slots]

    def replace_all(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``change`` to the rows of every buffer."""
        super().replace_all(change)
        with lasting_tensors():
            self.kept = None if self.kept is None else self.kept.map(change)
            self.weights = None if self.weights is None else change(self.weights)

    def exchange(self, change: Exchange, tokens: int) -> None:
        """Replace all tensors that lie on the device; the buffers are moved whole, since their slots may be few."""
        super().exchange(change, self.capacity)
        self.kept = None if self.kept is None else self.kept.map(change)
        self.weights = None if self.weights is None else change(self.weights)

    def fork(self, tokens: int, size: Any = None) -> Storage:
        """Return a storage over the same keys and values, or over copies of what is kept after an eviction."""
        fork = super().fork(tokens)
        assert isinstance(fork, EvictingStorage)
        if self.kept is not None:
            fork._copy_buffers()
        return fork

    def _copy_buffers(self) -> None:
        with lasting_tensors():
            self.keys, self.values, self.shared_tokens = self.keys.clone(), self.values.clone(), 0

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restore` needs to undo a forward pass, which overwrites no slot in use."""
        return dict(self.__dict__)

    def restore(self, state: dict[str, Any]) -> None:
        """Undo a forward pass."""
        self.__dict__.clear()
        self.__dict__.update(state)


def gathered(buffer: torch.Tensor, slots: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return new buffers of ``capacity`` slots that begin with some of the former ones."""
    batch, kv_heads, _, head_dim = buffer.shape
    gathered = buffer.new_empty(batch, kv_heads, capacity, head_dim)
    gathered[:, :, : slots.shape[2]] = buffer.gather(2, slots[..., None].expand(-1, -1, -1, head_dim))
    return gathered
