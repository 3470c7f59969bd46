"""Inputs shared by the op tests: padded rows, with NaN outside valid tokens."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_sparse_attn_kernels
import pytest
import torch
from safetensors import safe_open

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ("triton", "reference")
BOUNDS = ("page_min", "page_max")
EXPONENTS = ("page_exponent", "channel_exponent")
GOLDEN = Path(__file__).parent / "golden" / "selection.safetensors"
POISON = 99  # of int8 tensors that an op has not written


def grid(*values: Any) -> Any:
    """Mark a case `grid`, since other cases cover each of its values."""
    return pytest.param(*values, marks=pytest.mark.grid)


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


def allowed_error(eager: torch.Tensor, exact: torch.Tensor, head_dim: int, impl: str) -> float:
    """Return twice the greatest error of eager attention, and what float32 may lose on top of it.

    Eager attention adds up the products of a query and a key in several sums, a kernel one after the other. Of 256
    products its float32 result was seen to have four times the error of eager attention's. Triton's interpreter
    truncates to bfloat16, which doubles the error.
    """
    allowed = 2 * (eager.double() - exact).nan_to_num().abs().max().item() + 1e-6 * max(1, head_dim / 128)
    return 2 * allowed if impl == "triton" and device.type == "cpu" and eager.dtype == torch.bfloat16 else allowed


def read_blocks(indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the indices of the blocks that are read, and -1 for what follows them, which has no meaning."""
    unread = torch.arange(indices.shape[2], device=indices.device) >= counts[..., None]
    return indices.masked_fill(unread, -1)


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


def empty_bounds(rows: Rows, page_size: int, *, int8: bool) -> dict[str, torch.Tensor]:
    """Allocate bounds under the names of the ops' arguments; with `int8`, the exponents too."""
    batch, kv_heads, capacity, head_dim = rows.keys.shape
    shape = (batch, kv_heads, -(-capacity // page_size), head_dim)
    if not int8:
        return {name: torch.full(shape, float("nan"), device=device, dtype=rows.keys.dtype) for name in BOUNDS}
    shapes = (shape, shape, shape[:3], (batch, kv_heads, head_dim))
    return {
        name: torch.full(shape, POISON, dtype=torch.int8, device=device)
        for name, shape in zip(BOUNDS + EXPONENTS, shapes, strict=True)
    }


def exact_levels(rows: Rows, page_size: int) -> dict[str, torch.Tensor]:
    """Bounds in 8 bits and exponents of rows that are all new, value by value; POISON where a row has no token."""
    expected = empty_bounds(rows, page_size, int8=True)
    lower, upper = exact_bounds(rows, page_size, expected["page_min"].shape[2])
    head_dim = lower.shape[3]
    for row, length in enumerate(rows.lengths):
        if length == 0:
            continue
        pages = -(-length // page_size)
        for head in range(rows.keys.shape[1]):
            low, high = lower[row, head, :pages].double(), upper[row, head, :pages].double()
            largest = torch.maximum(low.abs(), high.abs()).amax(dim=0).tolist()
            channels = [
                least_exponent(max(largest[i], largest[(i + head_dim // 2) % head_dim]), 90.0, -60)
                for i in range(head_dim)
            ]
            unit = torch.tensor([2.0**exponent for exponent in channels], dtype=torch.float64, device=device)
            scaled = torch.maximum(low.abs(), high.abs()) / unit
            expected["channel_exponent"][row, head] = int8_tensor(channels)
            for page in range(pages):
                exponent = least_exponent(scaled[page].max().item(), 127.0, 0)
                expected["page_exponent"][row, head, page] = exponent
                expected["page_min"][row, head, page] = (low[page] / unit / 2**exponent).floor().to(torch.int8)
                expected["page_max"][row, head, page] = (high[page] / unit / 2**exponent).ceil().to(torch.int8)
    return expected


def least_exponent(value: float, mantissa: float, minimum: int) -> int:
    """Return the least e of `minimum` to 60 with value <= mantissa * 2 ** e; 60 if there is none."""
    exponent = minimum
    while value > mantissa * 2.0**exponent and exponent < 60:
        exponent += 1
    return exponent


def int8_tensor(values: list[int]) -> torch.Tensor:
    """Put exponents on the device."""
    return torch.tensor(values, dtype=torch.int8, device=device)


def dequantized(bounds: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 bounds from levels and exponents."""
    exponents = bounds["channel_exponent"].double()[:, :, None] + bounds["page_exponent"].double()[..., None]
    return bounds["page_min"].double() * exponents.exp2(), bounds["page_max"].double() * exponents.exp2()


def rope_table(slots: int, head_dim: int) -> dict[str, torch.Tensor]:
    """Cosines and sines of RoPE's angles, by the names of the ops' arguments."""
    angles = torch.arange(slots)[:, None] * 10000.0 ** -torch.linspace(0, 1, head_dim // 2 + 1)[:-1]
    return {"rope_cos": angles.cos().to(device), "rope_sin": angles.sin().to(device)}


def rotate(x: torch.Tensor, slots: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [.., head_dim] to `slots`, half-split as in Transformers, in at least float32 and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = rope_cos[slots].to(wide), rope_sin[slots].to(wide)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def golden(name: str) -> dict[str, torch.Tensor]:
    """Load the vectors of one case that released code computed; see golden/README.md."""
    with safe_open(GOLDEN, "pt") as vectors:
        names = [key for key in vectors.keys() if key.startswith(f"{name}.")]  # noqa: SIM118 (no dictionary)
        return {key.removeprefix(f"{name}."): vectors.get_tensor(key).to(device) for key in names}


def check_schema(op: str, arguments: dict[str, Any]) -> None:
    """Assert that the op's schema and fake agree with a call; missing arguments have the public defaults."""
    parameters = inspect.signature(getattr(hf_sparse_attn_kernels, op)).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not p.empty} | arguments
    overload = getattr(torch.ops.hf_sparse_attn_kernels, op).default
    # opcheck clones every value, and compares the schema with the actual writes.
    torch.library.opcheck(overload, (), given, test_utils=("test_schema", "test_faketensor"))
