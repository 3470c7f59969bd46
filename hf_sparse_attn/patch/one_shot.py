"""Small sums over the processes of one machine by one kernel, in which each GPU reads the others' memory."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hf_sparse_attn.head_shard import HeadShard
from hf_sparse_attn.patch.tensor_parallel import texts_of_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LARGEST_SUM = 256 * 1024
"""Bytes of a tensor up to which its sum is made here. Each GPU reads the others' tensors whole: no gain for larger."""
PROCESSES = (2, 4, 8)
"""Numbers of processes for which torch's kernel adds in the order of the ranks, so that all get the same bits."""
DTYPES = (torch.float32, torch.bfloat16)
"""What torch's kernel adds."""
ALIGNMENT = 16
"""Bytes that torch's kernel reads at once."""
TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others at the first sum, as over NCCL: their compilers may take longer."""
ALL_REDUCE = getattr(torch.distributed, "all_reduce", None)
"""torch's function that is replaced; None in a build of torch without collectives."""

_buffers: WeakKeyDictionary[ProcessGroup, torch.Tensor | None] = WeakKeyDictionary()
"""Memory that the other processes of a group can read, as bytes; None where they cannot."""


def all_reduce(tensor: torch.Tensor, op: Any = None, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Add up the tensors of a group's processes, in place, as ``torch.distributed.all_reduce`` does.

    NCCL adds on a stream of its own, and its steps over the link are made for large tensors: a decode step waits for
    it twice in each layer. Small tensors of GPUs that reach each other's memory are added by torch's kernel for
    symmetric memory instead. Whether they do is found out at a group's first sum. All others are left to torch.
    """
    distributed = torch.distributed
    op = distributed.ReduceOp.SUM if op is None else op
    group = distributed.group.WORLD if group is None else group
    if group is not None and op == distributed.ReduceOp.SUM and not async_op and _is_served(tensor, group):
        buffer = _buffer_of(group, tensor.device)
        if buffer is not None:
            _add_up(buffer, tensor, group)
            return None
    return distributed.all_reduce(tensor, op=op, group=group, async_op=async_op)


def _is_served(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether torch's kernel adds up a tensor over a group; the same on each of its processes."""
    return (
        tensor.is_cuda
        and tensor.dtype in DTYPES
        and tensor.is_contiguous()
        and 0 < tensor.nbytes <= LARGEST_SUM
        and tensor.nbytes % ALIGNMENT == 0
        and tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0
        and group.size() in PROCESSES
    )


def _add_up(buffer: torch.Tensor, tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Copy a tensor into the memory that the others read, add up what all have there, and write the sum over it."""
    shared = buffer[: tensor.nbytes].view(tensor.dtype)
    flat = tensor.view(-1)
    torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, flat, "sum", group.group_name, flat)


def _buffer_of(group: ProcessGroup, device: torch.device) -> torch.Tensor | None:
    """Return the memory of a group that all of its processes can read, which its first call reserves."""
    if group not in _buffers:
        if torch.cuda.is_current_stream_capturing():  # the processes cannot meet in a recording
            return None
        _buffers[group] = _reserve(group, device)
    return _buffers[group]


def _reserve(group: ProcessGroup, device: torch.device) -> torch.Tensor | None:
    """Reserve memory that all processes of a group can read; None on all of them if it fails on one."""
    ranks = HeadShard(torch.distributed.get_rank(group), group.size(), group)
    places = texts_of_all(ranks, _place(device), TIMEOUT)
    if not _reach_each_other(places):
        return None
    buffer = None
    with suppress(Exception):  # what it raises depends on the version, the driver and the machine
        buffer = _shared_memory(group, device)
    reserved = texts_of_all(ranks, {"reserved": str(buffer is not None)}, TIMEOUT)
    return buffer if all(text["reserved"] == "True" for text in reserved) else None


def _place(device: torch.device) -> dict[str, str]:
    """Return where a process computes, and which other devices of its machine its own one can read."""
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    readable = [other for other in others if torch.cuda.can_device_access_peer(device, other)]
    has_kernel = hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out")
    return {
        "host": socket.gethostname(),
        "device": str(device.index),
        "readable": " ".join(map(str, readable)) if has_kernel else "",
    }


def _reach_each_other(places: list[dict[str, str]]) -> bool:
    """Whether the processes have a device each, of one machine, and each device can read all others."""
    devices = {place["device"] for place in places}
    return (
        len({place["host"] for place in places}) == 1
        and len(devices) == len(places)
        and all(devices <= {place["device"], *place["readable"].split()} for place in places)
    )


def _shared_memory(group: ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return bytes on a device that the other processes of a group can read."""
    from torch.distributed import _symmetric_memory as symmetric

    buffer: torch.Tensor = symmetric.empty(LARGEST_SUM, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, group.group_name)
    return buffer
