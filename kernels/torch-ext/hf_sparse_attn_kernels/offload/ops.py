"""The op that copies blocks of keys and values from host memory."""

import torch

from .._check import check_contiguous, check_device, check_dims, check_dtype, check_shape
from .._op import op


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
