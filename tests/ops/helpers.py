"""Inputs that the op tests share: padded rows, with NaN wherever no valid token lies."""

from dataclasses import dataclass

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ("triton", "reference")


@dataclass
class Rows:
    """Keys and values [batch, kv_heads, capacity, head_dim] of rows padded on the left, each by another amount."""

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor  # [batch, kv_heads * group, head_dim]
    start: torch.Tensor  # int32 [batch]
    end: torch.Tensor  # int32 [batch]
    lengths: list[int]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]


def make_rows(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Rows:
    """Rows of random tokens; the buffers are strided views, hold NaN outside the rows and end past the longest one."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    starts = [3 * row for row in range(batch)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    capacity = max(ends) + 5
    buffers = []
    for _ in range(2):
        # Laid out [batch, capacity, kv_heads, head_dim], so that the view below is not contiguous.
        buffer = torch.randn(batch, capacity, kv_heads, head_dim, generator=generator)
        for row in range(batch):
            buffer[row, : starts[row]] = float("nan")
            buffer[row, ends[row] :] = float("nan")
        buffers.append(buffer.to(device, dtype).transpose(1, 2))
    query = torch.randn(batch, kv_heads * group, head_dim, generator=generator).to(device, dtype)
    return Rows(buffers[0], buffers[1], query, int32(starts), int32(ends), lengths)


def int32(values: list[int]) -> torch.Tensor:
    """Put whole numbers on the device."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def exact_bounds(rows: Rows, page_size: int, max_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of every page, row by row in plain loops; NaN where a page has no token."""
    batch, kv_heads, _, head_dim = rows.keys.shape
    shape = (batch, kv_heads, max_pages, head_dim)
    lower = torch.full(shape, float("nan"), device=device, dtype=rows.keys.dtype)
    upper = lower.clone()
    for row, length in enumerate(rows.lengths):
        first = 3 * row
        for page in range(-(-length // page_size)):
            tokens = rows.keys[row, :, first + page * page_size : first + min((page + 1) * page_size, length)]
            lower[row, :, page], upper[row, :, page] = tokens.amin(dim=1), tokens.amax(dim=1)
    return lower, upper
