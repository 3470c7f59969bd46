"""Loads of blocks from pinned host memory: the buffers, the calls in blocks of several sizes, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import hf_sparse_attn_kernels as ops
import torch

from op_bench import oracle
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import LOAD_SHAPES, QUICK_LOAD_SHAPES, Settings, Shape
from op_bench.workload import DTYPE


@dataclass(frozen=True)
class Blocks:
    """Loaded blocks: their size in tokens, and the share of a step's token budget that is loaded."""

    size: int
    share: float = 1.0

    @property
    def name(self) -> str:
        """Name of the variant."""
        whole = "single tokens" if self.size == 1 else f"blocks of {self.size}"
        return whole if self.share == 1 else f"{whole}, {self.share:.0%} of them"

    def count(self, shape: Shape, settings: Settings) -> int:
        """Return the number of blocks, over all KV heads."""
        return max(1, round(self.share * pool_tokens(shape, settings)) // self.size)


VARIANTS = (Blocks(32), Blocks(16), Blocks(1), Blocks(32, 0.1))
"""Pages of ArkVale and Progressive Sparse Attention, of Quest, and single tokens: a step that finds nothing in the
pool. The last is a step that finds 90 %."""


@dataclass
class HostLayer:
    """One layer's keys and values in pinned memory, and a pool on the device that takes a step's token budget."""

    shape: Shape
    settings: Settings
    pool: torch.Tensor
    """[2, tokens, head_dim]: keys, then values, of all KV heads."""
    host: torch.Tensor
    """[2, tokens, head_dim], pinned if the pool is on CUDA."""
    chosen: dict[Blocks, tuple[torch.Tensor, torch.Tensor]]
    """Of each variant, the blocks of the pool and the first token on the host of each."""

    def of_size(self, blocks: Blocks) -> torch.Tensor:
        """Return the pool in blocks, [2, blocks, size, head_dim]."""
        return self.pool.view(2, -1, blocks.size, self.shape.head_dim)

    def spoil(self) -> None:
        """Fill the pool with NaN."""
        self.pool.fill_(float("nan"))


def pool_tokens(shape: Shape, settings: Settings) -> int:
    """Return the tokens that a step reads, over all rows and KV heads."""
    return shape.batch * shape.kv_heads * settings.tokens_read(shape)


def make_host_layer(
    shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
) -> HostLayer:
    """Make a layer of normally distributed keys and values; blocks lie in random order in the pool.

    Raises
    ------
    ValueError
        The tokens that a step reads are not a whole number of blocks.
    """
    largest = max(blocks.size for blocks in VARIANTS)
    if pool_tokens(shape, settings) % largest:
        raise ValueError(f"{pool_tokens(shape, settings)} tokens of a step; allowed: whole blocks of {largest}")
    generator = torch.Generator().manual_seed(seed)
    tokens = shape.batch * shape.kv_heads * shape.length
    host = torch.empty(2, tokens, shape.head_dim, dtype=DTYPE, pin_memory=device.type == "cuda")
    on_device = torch.Generator(device).manual_seed(seed)
    host.copy_(torch.randn(host.shape, dtype=DTYPE, device=device, generator=on_device))

    def choose(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        count, places = blocks.count(shape, settings), pool_tokens(shape, settings) // blocks.size
        slots = torch.randperm(places, generator=generator)[:count]
        first = torch.randperm(tokens // blocks.size, generator=generator)[:count].sort()[0] * blocks.size
        return slots.to(device), first.to(device)

    pool = torch.empty(2, pool_tokens(shape, settings), shape.head_dim, dtype=DTYPE, device=device)
    return HostLayer(shape, settings, pool, host, {blocks: choose(blocks) for blocks in VARIANTS})


def _run(blocks: Blocks, layer: HostLayer, impl: str | None) -> Outputs:
    ops.load_blocks(*layer.of_size(blocks), *layer.host, *layer.chosen[blocks], impl=impl)
    return ()


def _check(blocks: Blocks, layer: HostLayer, outputs: Outputs) -> None:
    slots, first = (each.cpu() for each in layer.chosen[blocks])
    tokens = (first[:, None] + torch.arange(blocks.size)).flatten()
    for name, pool, host in zip(("keys", "values"), layer.of_size(blocks).cpu(), layer.host, strict=True):
        wrong = int((pool[slots].flatten(0, 1) != host[tokens]).any(dim=-1).sum())
        if wrong:
            raise oracle.Mismatch(f"load_blocks: {wrong} of {len(tokens)} tokens of the {name} are not the host's")
        others = torch.ones(len(pool), dtype=torch.bool).index_fill(0, slots, False)
        if not bool(pool[others].isnan().all()):
            raise oracle.Mismatch(f"load_blocks: {name} of other blocks were written")


def loaded_bytes(blocks: Blocks, shape: Shape, settings: Settings) -> int:
    """Return the bytes that come over the link."""
    return 2 * blocks.count(shape, settings) * blocks.size * shape.head_dim * DTYPE.itemsize


def _pool_bytes(shape: Shape, settings: Settings) -> int:
    return 2 * pool_tokens(shape, settings) * shape.head_dim * DTYPE.itemsize


def _entries() -> Iterator[Entry]:
    for blocks in VARIANTS:
        yield Entry(
            "load_blocks",
            blocks.name,
            partial(_run, blocks),
            partial(_check, blocks),
            partial(loaded_bytes, blocks),
            HostLayer.spoil,
        )


LOADS = Family(
    "loads from host memory",
    LOAD_SHAPES,
    QUICK_LOAD_SHAPES,
    tuple(_entries()),
    make_host_layer,
    layer_bytes=_pool_bytes,  # on the device, whose memory limits the layers
    step_bytes=_pool_bytes,
    backends=lambda shape: [],
)
