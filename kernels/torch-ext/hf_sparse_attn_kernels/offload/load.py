"""Triton launcher and kernel of `load_blocks`."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._triton import cdiv, multiprocessors, next_power_of_2

CHUNK_BYTES = 8192  # that a program requests at once: four times 16 bytes in each of 128 threads


def load_blocks(
    keys: torch.Tensor,
    values: torch.Tensor,
    host_keys: torch.Tensor,
    host_values: torch.Tensor,
    block_indices: torch.Tensor,
    first_tokens: torch.Tensor,
) -> None:
    """Copy blocks from host memory, which the kernel reads at its address on the device."""
    for name, host in (("host_keys", host_keys), ("host_values", host_values)):
        if keys.is_cuda and not host.is_pinned():
            raise ValueError(f"{name} is not pinned; allowed with impl='triton' on {keys.device}: pinned memory")
    _, block_size, head_dim = keys.shape
    blocks, elements = len(block_indices), block_size * head_dim
    # One program a multiprocessor, half of them for keys. Each has CHUNK_BYTES on their way at a time.
    programs = min(blocks, cdiv(multiprocessors(keys.device), 2))
    load_blocks_kernel[(programs, 2)](
        keys,
        values,
        host_keys,
        host_values,
        block_indices,
        first_tokens,
        blocks,
        HEAD_DIM=head_dim,
        ELEMENTS=elements,
        CHUNK=min(next_power_of_2(elements), CHUNK_BYTES // keys.element_size()),
        num_warps=4,
    )


@triton.jit
def load_blocks_kernel(
    keys_ptr,  # [num_blocks, ELEMENTS]
    values_ptr,
    host_keys_ptr,  # [num_tokens, HEAD_DIM], in pinned host memory
    host_values_ptr,
    indices_ptr,  # int64 [blocks]
    tokens_ptr,  # int64 [blocks]
    blocks,
    HEAD_DIM: tl.constexpr,
    ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy the keys of blocks, or their values; grid (programs, 2)."""
    if tl.program_id(1) == 0:
        copy_blocks(keys_ptr, host_keys_ptr, indices_ptr, tokens_ptr, blocks, HEAD_DIM, ELEMENTS, CHUNK)
    else:
        copy_blocks(values_ptr, host_values_ptr, indices_ptr, tokens_ptr, blocks, HEAD_DIM, ELEMENTS, CHUNK)


@triton.jit
def copy_blocks(
    target_ptr,
    source_ptr,
    indices_ptr,
    tokens_ptr,
    blocks,
    HEAD_DIM: tl.constexpr,
    ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy every tl.num_programs(0)-th block: a block's tokens follow one another in both memories."""
    for number in range(tl.program_id(0), blocks, tl.num_programs(0)):
        target = target_ptr + tl.load(indices_ptr + number) * ELEMENTS
        source = source_ptr + tl.load(tokens_ptr + number) * HEAD_DIM
        for first in range(0, ELEMENTS, CHUNK):
            at = first + tl.arange(0, CHUNK)
            mask = at < ELEMENTS
            tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)
