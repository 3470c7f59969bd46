"""The processes that share the samples of a run."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from eval.errors import EvalError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Value = TypeVar("Value")

_LONGEST_WAIT = timedelta(days=7)
_hand_outs = itertools.count()
"""Numbers the hand-outs, in the same order in every process."""


@dataclass(frozen=True)
class Processes:
    """This process among those of torchrun or an ``accelerate launch``, or a single process.

    They exchange errors and wait for each other, through the host: tensors stay where they are.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def started(cls) -> Processes:
        """Return this process as torchrun or ``accelerate launch`` has started it, without joining the others."""
        rank = os.environ.get("RANK", "0")
        return cls(int(rank), int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", rank)))

    @classmethod
    def current(cls) -> Processes:
        """Join the other processes, if any."""
        found = cls.started()
        if found.world_size > 1:
            _joined(found.rank, found.world_size)
        return found

    @property
    def is_main(self) -> bool:
        """Whether this process merges the records and writes to the terminal."""
        return self.rank == 0

    def hand_out(self, count: int) -> Iterator[int]:
        """Yield numbers below ``count``, each in one process alone, in rising order as the processes ask for them.

        So a process that has got short work takes more of it. Every process must use up the same hand-outs.
        """
        if self.world_size == 1:
            yield from range(count)
            return
        store, key = _joined(self.rank, self.world_size), f"hand-out {next(_hand_outs)}"
        while (number := store.add(key, 1) - 1) < count:
            yield number

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            from torch.distributed import barrier

            barrier()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run the block in every process, and go on once all have. An error of one is raised in all, so none waits."""
        error: EvalError | None = None
        try:
            yield
        except EvalError as raised:
            error = raised
        for found in self.gathered(error):
            if found is not None:
                raise found

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes by their ranks. Every process must call it."""
        values = [value] * self.world_size
        if self.world_size > 1:
            from torch.distributed import all_gather_object

            all_gather_object(values, value)
        return values


@cache
def _joined(rank: int, world_size: int) -> Store:
    """Join the process group, and return a store that its processes have in common."""
    from torch.distributed import init_process_group
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, *_ = next(rendezvous("env://", rank, world_size))
    store.set_timeout(_LONGEST_WAIT)
    # Not NCCL, which refuses two processes on one GPU. The first one to finish may wait for hours.
    init_process_group(
        "gloo", store=PrefixStore("group", store), rank=rank, world_size=world_size, timeout=_LONGEST_WAIT
    )
    atexit.register(leave)
    return PrefixStore("eval", store)


def leave() -> None:
    """Leave the process group, if any. One that lives on while Python ends may abort the process (SIGABRT)."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
