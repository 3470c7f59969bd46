"""Which blocks lie in which slots of the pool, and which one makes room: bookkeeping on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
ABSENT = -1
NOTHING: Ints = np.empty(0, np.int64)
EVICTION_POLICIES = ("lru", "fifo")


class Found(NamedTuple):
    """Slots of the blocks that a step reads."""

    slots: Ints
    """The slot of every block, in the order asked for."""
    is_missing: npt.NDArray[np.bool_]
    """Whether the block was not in its slot yet: it must be loaded before anything reads the slot."""


class BlockPool:
    """A fixed number of slots, shared by all tables. A table maps the blocks of one layer to slots.

    A block is named by its table, by its pair of row and KV head, and by its index in the row. The queue holds the
    slots in the order in which they will be reused. An entry is void once the slot was queued again: it then has an
    older stamp than the slot.

    Parameters
    ----------
    slots
        Number of slots.
    policy
        ``"lru"`` reuses the slot that was read least recently, ``"fifo"`` the one that was loaded first.
    """

    def __init__(self, slots: int, policy: str = "lru") -> None:
        self.slots, self.policy = slots, policy
        self.tables = 0
        self._dropped: list[int] = []
        self._unused: list[int] = []
        self.lay_out(0, 0)

    def lay_out(self, pairs: int, blocks: int) -> None:
        """Forget every block, and make room for tables of ``pairs`` x ``blocks`` entries."""
        self._where = np.full((self.tables, pairs, blocks), ABSENT, np.int64)
        self.forget_all()

    def forget_all(self) -> None:
        """Empty every slot."""
        self._where.fill(ABSENT)
        self._owner = np.full(self.slots, ABSENT, np.int64)  # index into the flat tables
        self._free = np.arange(self.slots)[::-1].copy()
        self._stamp = np.full(self.slots, ABSENT, np.int64)
        self._clock = 0
        self._step = 0
        self._read_in = np.full(self.slots, ABSENT, np.int64)
        self._queue = np.zeros((2, 4 * self.slots + 1), np.int64)  # slots, and the stamps of their entries
        self._first = self._last = 0

    def add_table(self) -> int:
        """Add an empty table and return its index."""
        while self._dropped:
            self.forget(table := self._dropped.pop())
            self._unused.append(table)
        if self._unused:
            return self._unused.pop()
        self.tables += 1
        self._resize((self.tables, *self._where.shape[1:]))
        return self.tables - 1

    def drop_table(self, table: int) -> None:
        """Let :meth:`add_table` reuse a table, whose blocks stay in their slots until then. Safe in a finalizer."""
        self._dropped.append(table)

    def reserve(self, blocks: int) -> None:
        """Make room for rows of ``blocks`` blocks."""
        if blocks > self._where.shape[2]:
            self._resize((*self._where.shape[:2], blocks))

    def _resize(self, shape: tuple[int, ...]) -> None:
        old, is_used = self._where, self._owner >= 0
        self._where = np.full(shape, ABSENT, np.int64)
        self._where[: old.shape[0], :, : old.shape[2]] = old
        at = np.unravel_index(self._owner[is_used], old.shape) if old.size else ()
        self._owner[is_used] = np.ravel_multi_index(at, shape) if len(at) else ABSENT

    def take(self, table: int, pairs: Ints, blocks: Ints, keep: Ints = NOTHING) -> Found:
        """Return the slots of blocks, which stay theirs until the next call.

        Blocks that were absent get slots of their own; the blocks evicted for them are forgotten.

        Parameters
        ----------
        table
            The layer's table.
        pairs, blocks
            int64 [n], without duplicates.
        keep
            Slots of other blocks, which stay theirs too.

        Raises
        ------
        ValueError
            The pool has fewer slots than those of ``blocks`` and ``keep``.
        """
        needed = len(blocks) + len(keep)
        if needed > self.slots:
            raise ValueError(f"one step reads {needed} blocks of one layer, but the pool has {self.slots} slots")
        self._step += 1
        self._read_in[keep] = self._step
        entries = np.ravel_multi_index((np.full_like(pairs, table), pairs, blocks), self._where.shape)
        where = self._where.reshape(-1)
        slots = where[entries]
        is_missing = slots < 0
        present = slots[~is_missing]
        self._read_in[present] = self._step
        if self.policy == "lru":
            self._enqueue(present)
        taken = self._make_room(int(is_missing.sum()))
        slots[is_missing] = taken
        where[entries[is_missing]] = taken
        self._owner[taken] = entries[is_missing]
        self._read_in[taken] = self._step
        self._enqueue(taken)
        return Found(slots, is_missing)

    def forget(self, table: int, from_block: Ints | None = None) -> None:
        """Forget a table's blocks: all, or in each pair those from index ``from_block[pair]`` on."""
        slots = self._where[table]
        is_gone = slots >= 0
        if from_block is not None:
            is_gone &= np.arange(slots.shape[1]) >= from_block[:, None]
        self._release(slots[is_gone])
        slots[is_gone] = ABSENT

    def reorder(self, table: int, source: Ints) -> None:
        """Give pair ``i`` the blocks of pair ``source[i]``. If several pairs ask for one, the first gets its slots."""
        old = self._where[table].copy()
        sources, first = np.unique(source, return_index=True)
        lost = np.setdiff1d(np.arange(len(old)), sources)
        self._release(old[lost][old[lost] >= 0])
        new = np.full_like(old, ABSENT)
        new[first] = old[sources]
        self._where[table] = new
        pairs, blocks = np.nonzero(new >= 0)
        if len(pairs):
            at = (np.full_like(pairs, table), pairs, blocks)
            self._owner[new[pairs, blocks]] = np.ravel_multi_index(at, self._where.shape)

    def _release(self, slots: Ints) -> None:
        self._owner[slots] = self._stamp[slots] = ABSENT
        self._free = np.concatenate((self._free, slots))

    def _make_room(self, number: int) -> Ints:
        """Return slots to load into: free ones first, then the oldest that this step does not read."""
        count = min(number, len(self._free))
        free = self._free[len(self._free) - count :][::-1].copy()
        self._free = self._free[: len(self._free) - count]
        evicted = self._oldest(number - count)
        self._where.reshape(-1)[self._owner[evicted]] = ABSENT
        return np.concatenate((free, evicted))

    def _oldest(self, number: int) -> Ints:
        """Remove ``number`` slots from the queue, and return them."""
        found: list[Ints] = []
        at, number_left = self._first, number
        keeps_from = None  # the first entry that stays, because this step reads its slot
        while number_left > 0:
            end = min(at + max(64, 2 * number_left), self._last)
            slots, stamps = self._queue[:, at:end]
            is_valid = self._stamp[slots] == stamps
            is_read = self._read_in[slots] == self._step
            here = np.flatnonzero(is_valid & ~is_read)[:number_left]
            kept = np.flatnonzero(is_valid & is_read)
            if number_left == len(here):
                end = at + int(here[-1]) + 1
                kept = kept[kept < end - at]
            if keeps_from is None and len(kept):
                keeps_from = at + int(kept[0])
            found.append(slots[here])
            self._stamp[slots[here]] = ABSENT
            number_left -= len(here)
            at = end
        self._first = at if keeps_from is None else keeps_from
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _enqueue(self, slots: Ints) -> None:
        """Put slots at the end of the queue, in their order."""
        if self._last + len(slots) > self._queue.shape[1]:
            entries = self._queue[:, self._first : self._last]
            entries = entries[:, self._stamp[entries[0]] == entries[1]]
            self._first, self._last = 0, entries.shape[1]
            self._queue[:, : self._last] = entries
        stamps = np.arange(self._clock, self._clock + len(slots))
        self._queue[:, self._last : self._last + len(slots)] = slots, stamps
        self._stamp[slots] = stamps
        self._last += len(slots)
        self._clock += len(slots)
