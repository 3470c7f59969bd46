"""Small sums over the processes of one machine by one kernel, in which each GPU writes into the others' memory."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from hf_sparse_attn_kernels import one_shot_all_reduce
from hf_sparse_attn_kernels.sums import HALVES, MOST_PROCESSES, PROGRAM_WORDS
from hf_sparse_attn_kernels.sums.ops import DTYPES

from hf_sparse_attn.head_shard import HeadShard
from hf_sparse_attn.patch.tensor_parallel import texts_of_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
LARGEST_SUM = 256 * 1024
"""Bytes of a tensor up to which its sum is made here. Each GPU sends its tensor whole to all others, with a count for
every 32 bits: no gain for larger ones."""
WORD = 4
"""Bytes for which the kernel has a count."""
TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others at the first sum, as over NCCL: their compilers may take longer."""
ALL_REDUCE = getattr(torch.distributed, "all_reduce", None)
"""torch's function that is replaced; None in a build of torch without collectives."""


class SharedMemory(NamedTuple):
    """Memory of a group's processes that all of them can write."""

    buffers: list[torch.Tensor]
    """Each process's, in the order of the ranks: int64 [HALVES, processes, words]."""
    counts: torch.Tensor
    """int32 [words / PROGRAM_WORDS], of this process alone."""
    rank: int
    held: object
    """What keeps all processes' memory mapped here."""


_memory: WeakKeyDictionary[ProcessGroup, SharedMemory | None] = WeakKeyDictionary()
"""The memory of a group; None where its processes do not reach each other's."""


def all_reduce(
    tensor: torch.Tensor,
    op: Any = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    addend: torch.Tensor | None = None,
    combined: torch.Tensor | None = None,
) -> Any:
    """Add up the tensors of a group's processes, in place, as ``torch.distributed.all_reduce`` does.

    NCCL adds on a stream of its own, and its steps over the link are made for large tensors: a decode step waits for
    it twice in each layer. Small tensors of GPUs that reach each other's memory are added up by
    :func:`hf_sparse_attn_kernels.one_shot_all_reduce` instead. Whether they do is found out at a group's first sum. All
    others are left to torch, and so are sums in compiled code. ``addend`` and ``combined``, which the kernel takes too,
    are for sums that it makes.

    Raises
    ------
    ValueError
        ``addend`` or ``combined`` is given for another sum.
    """
    if serves(tensor, op, group, async_op):
        memory = _memory_of(_group(group), tensor.device)
        assert memory is not None
        one_shot_all_reduce(tensor, memory.buffers, memory.counts, rank=memory.rank, addend=addend, combined=combined)
        return None
    if addend is not None or combined is not None:
        raise ValueError("addend and combined are given for a sum that the kernel does not make; allowed: None")
    op = torch.distributed.ReduceOp.SUM if op is None else op
    return torch.distributed.all_reduce(tensor, op=op, group=group, async_op=async_op)


def serves(tensor: torch.Tensor, op: Any = None, group: ProcessGroup | None = None, async_op: bool = False) -> bool:
    """Return whether a sum is made by the kernel; the same on each process of the group."""
    is_sum = op is None or op == torch.distributed.ReduceOp.SUM
    group = _group(group)
    return (
        is_sum
        and isinstance(group, torch.distributed.ProcessGroup)  # else this process is not in it
        and not async_op
        and not torch.compiler.is_compiling()
        and _is_served(tensor, group)
        and _memory_of(group, tensor.device) is not None
    )


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor begins with a word."""
    return tensor.storage_offset() * tensor.itemsize % WORD == 0


def _group(group: ProcessGroup | None) -> Any:
    """Return a group, by default that of all processes."""
    return torch.distributed.group.WORLD if group is None else group


def _is_served(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether the kernel adds up a tensor over a group; the same on each of its processes."""
    return (
        tensor.is_cuda
        and tensor.dtype in DTYPES
        and tensor.is_contiguous()
        and 0 < tensor.nbytes <= LARGEST_SUM
        and tensor.nbytes % WORD == 0
        and is_aligned(tensor)
        and 2 <= group.size() <= MOST_PROCESSES
    )


def _memory_of(group: ProcessGroup, device: torch.device) -> SharedMemory | None:
    """Return the memory of a group that all of its processes can write, which its first call reserves."""
    if group not in _memory:
        if torch.cuda.is_current_stream_capturing():  # the processes cannot meet in a recording
            return None
        _memory[group] = _reserve(group, device)
    return _memory[group]


def _reserve(group: ProcessGroup, device: torch.device) -> SharedMemory | None:
    """Reserve memory that all processes of a group can write; None on all of them if it fails on one."""
    ranks = HeadShard(torch.distributed.get_rank(group), group.size(), group)
    places = texts_of_all(ranks, _place(device), TIMEOUT)
    if not _reach_each_other(places):
        return None
    # None waits for the mapping of a process that has no memory, or begins a sum before the memory of all is 0.
    buffer = _of_all(ranks, lambda: _allocate(ranks, device))
    return None if buffer is None else _of_all(ranks, lambda: _mapped(buffer, ranks, group))


def _of_all(ranks: HeadShard, reserve: Callable[[], T]) -> T | None:
    """Return what a function reserves; None on all processes if it fails on one."""
    reserved = None
    with suppress(Exception):  # what it raises depends on the version, the driver and the machine
        reserved = reserve()
    texts = texts_of_all(ranks, {"reserved": str(reserved is not None)}, TIMEOUT)
    return reserved if all(text["reserved"] == "True" for text in texts) else None


def _place(device: torch.device) -> dict[str, str]:
    """Return where a process computes, and which other devices of its machine its own one reaches."""
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    reached = [other for other in others if torch.cuda.can_device_access_peer(device, other)]
    return {
        "host": socket.gethostname(),
        "device": str(device.index),
        "reached": " ".join(map(str, reached)) if find_spec("triton") is not None else "",
    }


def _reach_each_other(places: list[dict[str, str]]) -> bool:
    """Whether the processes have a device each, of one machine, and each device reaches all others."""
    devices = {place["device"] for place in places}
    return (
        len({place["host"] for place in places}) == 1
        and len(devices) == len(places)
        and all(devices <= {place["device"], *place["reached"].split()} for place in places)
    )


def _allocate(ranks: HeadShard, device: torch.device) -> torch.Tensor:
    """Allocate memory that can be mapped on other devices, all of it 0."""
    from torch.distributed import _symmetric_memory as symmetric

    buffer: torch.Tensor = symmetric.empty((HALVES, ranks.size, LARGEST_SUM // WORD), dtype=torch.int64, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    return buffer


def _mapped(buffer: torch.Tensor, ranks: HeadShard, group: ProcessGroup) -> SharedMemory:
    """Map the memory of all processes of a group on this one's device."""
    from torch.distributed import _symmetric_memory as symmetric

    handle = symmetric.rendezvous(buffer, group.group_name)
    buffers = [handle.get_buffer(rank, buffer.shape, buffer.dtype) for rank in range(ranks.size)]
    counts = torch.zeros(buffer.shape[2] // PROGRAM_WORDS, dtype=torch.int32, device=buffer.device)
    return SharedMemory(buffers, counts, ranks.rank, held=(buffer, handle))
