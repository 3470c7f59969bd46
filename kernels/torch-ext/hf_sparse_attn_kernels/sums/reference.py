"""Torch reference of the sum over GPUs. Its processes may be threads that share tensors on a CPU."""

import time

import torch

from . import PROGRAM_WORDS


def one_shot_all_reduce(
    tensor: torch.Tensor,
    buffers: list[torch.Tensor],
    counts: torch.Tensor,
    *,
    rank: int,
    addend: torch.Tensor | None,
    combined: torch.Tensor | None,
) -> None:
    """Reference of `hf_sparse_attn_kernels.one_shot_all_reduce`."""
    words = tensor.view(-1).view(torch.int32).long()
    word = torch.arange(len(words), device=tensor.device)
    program = word // PROGRAM_WORDS
    count = counts[program] + 1
    half = (count & 1).long()
    message = (count.long() << 32) | (words & 0xFFFFFFFF)
    for process, buffer in enumerate(buffers):
        if process != rank:
            buffer[half, rank, word] = message
    total = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
    for process in range(len(buffers)):
        if process == rank:
            total += tensor
        else:
            total += _received(buffers[rank], half, process, word, count).view(tensor.dtype).view_as(tensor)
    tensor.copy_(total)
    counts[program] = count
    if addend is not None and combined is not None:
        combined.copy_(tensor + addend)


def _received(
    buffer: torch.Tensor, half: torch.Tensor, process: int, word: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """Wait for a process's messages of these counts, and return their words."""
    while True:
        message = buffer[half, process, word]
        if bool(((message >> 32) == count).all()):
            return message.int()
        time.sleep(0)  # lets the other thread run
