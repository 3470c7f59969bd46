"""The processes that share the samples of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from eval.errors import EvalError

_LONGEST_WAIT = timedelta(days=7)


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
            from torch.distributed import init_process_group, is_initialized

            if not is_initialized():
                # Not NCCL, which refuses two processes on one GPU. The first one to finish may wait for hours.
                init_process_group("gloo", timeout=_LONGEST_WAIT)
        return found

    @property
    def is_main(self) -> bool:
        """Whether this process merges the records and writes to the terminal."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            from torch.distributed import barrier

            barrier()

    def agree(self, error: EvalError | None) -> None:
        """Raise in every process if one has an error, so that none waits forever."""
        errors: list[EvalError | None] = [error]
        if self.world_size > 1:
            from torch.distributed import all_gather_object

            errors *= self.world_size
            all_gather_object(errors, error)
        for found in errors:
            if found is not None:
                raise found
