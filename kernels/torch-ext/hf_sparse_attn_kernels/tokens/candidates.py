"""The tokens of each row that can be voted for, and their division among programs."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._triton import cdiv, launch_options, multiprocessors, next_power_of_2

MAX_TILE = 8192


class Candidates(NamedTuple):
    """The candidates of each row, divided into tiles."""

    seq_start: torch.Tensor
    seq_end: torch.Tensor
    reuse: torch.Tensor | None
    """int32 [batch], nonzero for rows that reuse a selection and so have no candidates."""
    num_tokens: int
    max_tokens: int
    """Rows of at most this many tokens have no candidates."""
    sink_tokens: int
    recent_tokens: int
    block: int
    """Tokens in a tile."""

    @property
    def tiles(self) -> int:
        """Number of tiles of the longest row."""
        tiles: int = cdiv(self.num_tokens, self.block)
        return tiles

    @property
    def width(self) -> int:
        """Number of tokens of all tiles."""
        return self.tiles * self.block

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int]:
        """Return the arguments of `candidates_of`."""
        reuse = self.seq_start if self.reuse is None else self.reuse
        return self.seq_start, self.seq_end, reuse, *self[3:7]

    def options(self) -> dict[str, Any]:
        """Return the launch options of kernels with one program per tile."""
        return {
            "CACHE": self.reuse is not None,
            "BLOCK_T": self.block,
            "num_warps": 4 if self.block <= 2048 else 8,
            **launch_options(self.seq_start.device),
        }


def tile_size(num_tokens: int, device: torch.device) -> int:
    """Return the number of tokens per program, for about one tile per multiprocessor."""
    share: int = next_power_of_2(num_tokens // multiprocessors(device))
    return max(512, min(MAX_TILE, share))


@triton.jit
def row_length(row, start_ptr, end_ptr, num_tokens):
    """Return the number of tokens of a row."""
    return tl.minimum(tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0), num_tokens)


@triton.jit
def candidates_of(
    row,
    start_ptr,
    end_ptr,
    reuse_ptr,
    num_tokens,
    max_tokens,
    sink_tokens,
    recent_tokens,
    CACHE: tl.constexpr,
):
    """Return the first candidate of a row and the token after its last one; without candidates, no later token."""
    length = row_length(row, start_ptr, end_ptr, num_tokens)
    last = tl.where(length > max_tokens, length - recent_tokens, 0)
    if CACHE:
        last = tl.where(tl.load(reuse_ptr + row) != 0, 0, last)
    return sink_tokens, last
