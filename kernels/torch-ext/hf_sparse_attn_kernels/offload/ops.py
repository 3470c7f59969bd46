"""The ops that copy blocks of keys and values from host memory."""

import torch

from .._check import (
    BUFFER_AXES,
    check_at_least,
    check_contiguous,
    check_device,
    check_dims,
    check_dtype,
    check_last_stride,
    check_like,
    check_selection,
    check_sequence,
    check_shape,
)
from .._op import op, output


@op(launcher="load", writes=("keys", "values"))
def load_blocks(
    keys: torch.Tensor,
    values: torch.Tensor,
    host_keys: torch.Tensor,
    host_values: torch.Tensor,
    block_indices: torch.Tensor,
    first_tokens: torch.Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Copy blocks of keys and values from host memory, as many as there are `block_indices`.

    The kernel reads pinned host memory over the bus itself, so the host neither gathers the blocks nor queues a copy
    for each. It has one program a multiprocessor at most, so that attention on another stream finds room.

    Parameters
    ----------
    keys, values : torch.Tensor
        [num_blocks, block_size, head_dim], contiguous, of any dtype: written in place.
    host_keys, host_values : torch.Tensor
        [num_tokens, head_dim], contiguous, in host memory, of the dtype of `keys`. Triton needs them pinned if `keys`
        is on CUDA. The caller keeps them as they are until the copy has ended.
    block_indices : torch.Tensor
        int64 [n], on the device of `keys`, without duplicates: the blocks of `keys` and `values` to write.
    first_tokens : torch.Tensor
        int64 [n], on the device of `keys`: the first of the block_size tokens of the host that each block gets, at most
        num_tokens - block_size.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference, for which the host
        waits for the indices.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride or device, or host memory that is not pinned, with Triton on CUDA.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("keys", keys, "num_blocks, block_size, head_dim")
    check_shape("values", values, "num_blocks, block_size, head_dim", tuple(keys.shape))
    check_dims("host_keys", host_keys, "num_tokens, head_dim")
    host_shape = (host_keys.shape[0], keys.shape[2])
    for name, host in (("host_keys", host_keys), ("host_values", host_values)):
        check_shape(name, host, "num_tokens, head_dim", host_shape)
        if host.device.type != "cpu":
            raise ValueError(f"{name} is on {host.device}; allowed: host memory")
    check_device("values", values, "keys", keys)
    for name, tensor in (("values", values), ("host_keys", host_keys), ("host_values", host_values)):
        check_dtype(name, tensor, keys.dtype)
    check_contiguous("keys", keys)
    for name, tensor in (("values", values), ("host_keys", host_keys), ("host_values", host_values)):
        check_contiguous(name, tensor)
    check_dims("block_indices", block_indices, "n")
    for name, tensor in (("block_indices", block_indices), ("first_tokens", first_tokens)):
        check_dtype(name, tensor, torch.int64)
        check_shape(name, tensor, "n", tuple(block_indices.shape))
        check_device(name, tensor, "keys", keys)
        check_contiguous(name, tensor)


@op(launcher="keep", writes=("kept_keys", "kept_values", "slot_blocks", "block_slots", "counter", "traffic"))
def keep_chosen(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    slot_blocks: torch.Tensor,
    block_slots: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    counter: torch.Tensor | None = None,
    traffic: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring the chosen blocks of a decode step to slots on the device, unless they are there from an earlier step.

    The slots of chosen blocks stay as they are. The other chosen blocks get the first slots whose blocks are not
    chosen, in the order of the selection, and are read from `keys` and `values`, which may be pinned host memory. The
    last slot takes the block that is not full, the newest of a row; of it only the tokens are read that the slot lacks.

    The slots describe the rows as long as these only grow. Whoever changes earlier tokens fills `slot_blocks` with -1.

    Parameters
    ----------
    keys, values : torch.Tensor
        All tokens [batch, kv_heads, capacity, head_dim], of any dtype, as tensors of the device; the last stride is 1.
    kept_keys, kept_values : torch.Tensor
        The slots [batch, kv_heads, (slots + 1) * block_size, head_dim], contiguous, of the dtype of `keys`: updated in
        place.
    slot_blocks : torch.Tensor
        int32 [batch, kv_heads, slots + 1], contiguous, updated in place: the block in each slot, -1 for none. The last
        entry is a length: that of the row when the last slot was filled, at most 0 for never.
    block_slots : torch.Tensor
        int16 or int32 [batch, kv_heads, blocks], contiguous, blocks * block_size >= capacity, updated in place: the
        slot that each block got last. Where `slot_blocks` does not agree it may hold anything.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, n], or [batch, 1, n] for all KV heads, n <= slots: the chosen blocks in any order,
        counted from seq_start, without duplicates.
    block_counts : torch.Tensor
        int32 [batch, kv_heads] or [batch, 1]: number of leading entries of `block_indices`; each holds a token.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `keys`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    block_size : int
        Tokens per block, at least 1.
    counter : torch.Tensor, optional
        int64 [4], added to in place as by `sparse_decode`: [0] += the chosen tokens, over rows and KV heads, [1] +=
        those that dense attention reads, [3] += 1.
    traffic : torch.Tensor, optional
        int64 [4], added to in place, over rows and KV heads: [0] += the full blocks chosen, [1] += those that were in a
        slot, [2] += the tokens read from `keys` and `values`, [3] += 1 for each row and KV head.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference, for which the host
        waits for the device.

    Returns
    -------
    slot_indices : torch.Tensor
        int32 [batch, kv_heads, n]: the slot of each chosen block, then -1. As `block_indices` of `sparse_decode`, they
        select the same tokens in the same order from `kept_keys` and `kept_values`, with rows from 0 to `kept_end`.
    kept_end : torch.Tensor
        int32 [batch]: end of the rows of slots, after the last token of the last slot.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device or number.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("keys", keys, BUFFER_AXES)
    check_shape("values", values, BUFFER_AXES, tuple(keys.shape))
    check_like("values", values, "keys", keys)
    for name, tensor in (("keys", keys), ("values", values)):
        check_last_stride(name, tensor)
    check_at_least("block_size", block_size, 1)
    check_selection(keys, keys, block_indices, block_counts)
    batch, kv_heads, capacity, head_dim = keys.shape
    check_sequence(seq_start, seq_end, batch, "keys", keys)
    check_slots(slot_blocks, block_slots, (batch, kv_heads), block_indices.shape[2], -(-capacity // block_size))
    kept_shape = (batch, kv_heads, slot_blocks.shape[2] * block_size, head_dim)
    for name, tensor in (("kept_keys", kept_keys), ("kept_values", kept_values)):
        check_shape(name, tensor, "batch, kv_heads, (slots + 1) * block_size, head_dim", kept_shape)
        check_like(name, tensor, "keys", keys)
        check_contiguous(name, tensor)
    for name, tensor in (("slot_blocks", slot_blocks), ("block_slots", block_slots)):
        check_device(name, tensor, "keys", keys)
        check_contiguous(name, tensor)
    for name, counts in (("counter", counter), ("traffic", traffic)):
        if counts is not None:
            check_dtype(name, counts, torch.int64)
            check_shape(name, counts, "4", (4,))
            check_device(name, counts, "keys", keys)
            check_contiguous(name, counts)
    shape = (batch, kv_heads, block_indices.shape[2])
    return output(block_indices, shape, torch.int32), output(block_indices, (batch,), torch.int32)


def check_slots(
    slot_blocks: torch.Tensor, block_slots: torch.Tensor, pairs: tuple[int, int], chosen: int, blocks: int
) -> None:
    """Check the two tables of slots and blocks."""
    check_dims("slot_blocks", slot_blocks, "batch, kv_heads, slots + 1")
    check_dtype("slot_blocks", slot_blocks, torch.int32)
    slots = slot_blocks.shape[2] - 1
    check_shape("slot_blocks", slot_blocks, "batch, kv_heads, slots + 1", (*pairs, slots + 1))
    if slots < chosen:
        raise ValueError(
            f"slot_blocks has {slots} slots beside the last; allowed: at least n={chosen} of block_indices"
        )
    check_dims("block_slots", block_slots, "batch, kv_heads, blocks")
    if block_slots.dtype not in (torch.int16, torch.int32):
        raise TypeError(f"block_slots has dtype {block_slots.dtype}; allowed: torch.int16, torch.int32")
    if block_slots.shape[:2] != pairs or block_slots.shape[2] < blocks:
        raise ValueError(
            f"block_slots has shape {list(block_slots.shape)}; allowed: [batch, kv_heads, blocks] = "
            f"{[*pairs, blocks]}, or more blocks"
        )
    if slots > torch.iinfo(block_slots.dtype).max:
        raise ValueError(f"block_slots has dtype {block_slots.dtype}; allowed for {slots} slots: torch.int32")
