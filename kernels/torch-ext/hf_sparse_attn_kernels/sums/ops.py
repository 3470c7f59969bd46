"""The op that adds up small tensors over GPUs."""

import torch

from .._check import check_at_least, check_contiguous, check_device, check_dtype, check_like, check_shape
from .._op import op
from . import HALVES, MOST_PROCESSES, PROGRAM_WORDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@op(launcher="push", writes=("tensor", "buffers", "counts", "combined"))
def one_shot_all_reduce(
    tensor: torch.Tensor,
    buffers: list[torch.Tensor],
    counts: torch.Tensor,
    *,
    rank: int,
    addend: torch.Tensor | None = None,
    combined: torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Add up a small tensor over processes, in place, when each can write into the memory of all others.

    Every process writes its tensor into all buffers but its own, waits until the other tensors are in its own, and adds
    up. A number and the count of calls are one store of 64 bits, so a sum takes one way over the link, and no barrier.

    All processes make the same calls in the same order, each on one stream. A call waits for the others without end.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous; float32, bfloat16 or float16, and a multiple of 4 bytes. Written.
    buffers : list of torch.Tensor
        One for each process, in the order of their ranks: int64 [2, processes, words], contiguous, where words is a
        multiple of 256 and at least the tensor's bytes / 4. 0 in all processes before the first call of any. Written.
    counts : torch.Tensor
        int32 [words / 256], of this process alone; 0 before the first call. Written.
    rank : int
        This process's place in `buffers`.
    addend : torch.Tensor, optional
        Like `tensor`: what the sum is added to, such as a residual connection.
    combined : torch.Tensor, optional
        Like `tensor`, and given with `addend`: receives the rounded sum + `addend`, rounded again. Written.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, device, size or rank.
    RuntimeError
        impl="triton" cannot run here.
    """
    if tensor.dtype not in DTYPES:
        raise TypeError(f"tensor has dtype {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    check_contiguous("tensor", tensor)
    if not 2 <= len(buffers) <= MOST_PROCESSES:
        raise ValueError(f"buffers has {len(buffers)} tensors; allowed: 2 to {MOST_PROCESSES}")
    check_dtype("counts", counts, torch.int32)
    check_device("counts", counts, "tensor", tensor)
    words = counts.numel() * PROGRAM_WORDS
    if tensor.storage_offset() * tensor.itemsize % 4:
        raise ValueError(f"tensor has storage offset {tensor.storage_offset()}; allowed: multiples of 4 bytes")
    if counts.dim() != 1 or not 0 < tensor.nbytes <= 4 * words or tensor.nbytes % 4:
        raise ValueError(
            f"tensor has {tensor.nbytes} bytes; allowed: multiples of 4 up to {4 * words}, for "
            f"{list(counts.shape)} counts"
        )
    for index, buffer in enumerate(buffers):
        name = f"buffers[{index}]"
        check_dtype(name, buffer, torch.int64)
        check_device(name, buffer, "tensor", tensor)
        check_contiguous(name, buffer)
        if buffer.shape != (HALVES, len(buffers), words):
            raise ValueError(
                f"{name} has shape {list(buffer.shape)}; allowed: [halves, processes, words] = "
                f"{[HALVES, len(buffers), words]}"
            )
    if (addend is None) != (combined is None):
        raise ValueError(f"{'addend' if addend is None else 'combined'} is missing; allowed: both or neither")
    for name, other in (("addend", addend), ("combined", combined)):
        if other is not None:
            check_like(name, other, "tensor", tensor)
            check_shape(name, other, "the shape of tensor", tuple(tensor.shape))
            check_contiguous(name, other)
            if other.storage_offset() * other.itemsize % 4:
                raise ValueError(f"{name} has storage offset {other.storage_offset()}; allowed: multiples of 4 bytes")
    check_at_least("rank", rank, 0)
    if rank >= len(buffers):
        raise ValueError(f"rank={rank}; allowed: below {len(buffers)}, the number of buffers")
