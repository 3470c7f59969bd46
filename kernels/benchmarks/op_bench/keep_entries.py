"""Chosen blocks kept on the device, the others read from host memory: buffers, calls and checks of `keep_chosen`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import hf_sparse_attn_kernels as ops
import torch

from hf_sparse_attn.cache.host.memory import host_tokens
from op_bench import oracle
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import Settings, Shape
from op_bench.workload import DTYPE

KEEP_SHAPES = (Shape(32, 8, 128, 1, 32768), Shape(28, 4, 128, 1, 32768), Shape(32, 8, 128, 1, 524288))
"""The last has gigabytes in each layer, over which the tokens are spread."""


@dataclass(frozen=True)
class Choice:
    """Blocks of two steps in turn: their size in tokens, and the share that the other step did not choose."""

    size: int
    new: float

    @property
    def name(self) -> str:
        """Name of the variant."""
        return f"{'single tokens' if self.size == 1 else f'blocks of {self.size}'}, {self.new:.0%} new, two steps"

    def count(self, settings: Settings) -> int:
        """Return the number of blocks that a KV head chooses."""
        return settings.token_budget // self.size

    def count_new(self, settings: Settings) -> int:
        """Return the number of them that the step before did not choose."""
        return max(1, round(self.new * self.count(settings)))


VARIANTS = (Choice(1, 0.1), Choice(1, 0.3), Choice(16, 0.1))
"""Single tokens and Quest's pages. Two steps make a call: one alone would find all its blocks when it is repeated."""


@dataclass
class KeptLayer:
    """One layer's keys and values in host memory, and slots on the device for each variant."""

    shape: Shape
    settings: Settings
    keys: torch.Tensor
    """[batch, kv_heads, length, head_dim], as a tensor of the device."""
    values: torch.Tensor
    slots: dict[Choice, dict[str, torch.Tensor]]
    """The slots and their tables by the names of the op's arguments."""
    chosen: dict[Choice, torch.Tensor]
    """int32 [2, batch, kv_heads, n]: the blocks of both steps."""
    seq_start: torch.Tensor
    seq_end: torch.Tensor

    def spoil(self) -> None:
        """Fill the slots with NaN, and forget what they held."""
        for tensors in self.slots.values():
            tensors["kept_keys"].fill_(float("nan"))
            tensors["kept_values"].fill_(float("nan"))
            tensors["slot_blocks"].fill_(-1)


def make_kept_layer(
    shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
) -> KeptLayer:
    """Make a layer of normally distributed keys and values, and two random selections that share most blocks."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.kv_heads, shape.length, shape.head_dim)
    _, keys, values = host_tokens(size, DTYPE, device)
    on_device = torch.Generator(device).manual_seed(seed)
    for buffer in (keys, values):
        buffer.copy_(torch.randn(size, dtype=DTYPE, device=device, generator=on_device))

    def choose(choice: Choice) -> torch.Tensor:
        count, new, pairs = choice.count(settings), choice.count_new(settings), shape.batch * shape.kv_heads
        order = torch.stack([torch.randperm(shape.length // choice.size, generator=generator) for _ in range(pairs)])
        steps = (order[:, :count].sort(dim=1)[0], order[:, new : count + new].sort(dim=1)[0])
        return torch.stack(steps).view(2, shape.batch, shape.kv_heads, count).to(device, torch.int32)

    def make_slots(choice: Choice) -> dict[str, torch.Tensor]:
        count, pairs = choice.count(settings), (shape.batch, shape.kv_heads)
        kept = (*pairs, (count + 1) * choice.size, shape.head_dim)
        return {
            "kept_keys": torch.empty(kept, dtype=DTYPE, device=device),
            "kept_values": torch.empty(kept, dtype=DTYPE, device=device),
            "slot_blocks": torch.full((*pairs, count + 1), -1, dtype=torch.int32, device=device),
            "block_slots": torch.zeros((*pairs, shape.length // choice.size), dtype=torch.int16, device=device),
        }

    bounds = (torch.full((shape.batch,), end, dtype=torch.int32, device=device) for end in (0, shape.length))
    slots = {choice: make_slots(choice) for choice in VARIANTS}
    return KeptLayer(shape, settings, keys, values, slots, {choice: choose(choice) for choice in VARIANTS}, *bounds)


def _run(choice: Choice, layer: KeptLayer, impl: str | None) -> Outputs:
    indices: Outputs = ()
    for blocks in layer.chosen[choice]:
        counts = torch.full_like(blocks[..., 0], blocks.shape[2])
        indices = ops.keep_chosen(
            layer.keys,
            layer.values,
            **layer.slots[choice],
            block_indices=blocks,
            block_counts=counts,
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            block_size=choice.size,
            impl=impl,
        )
    return indices


def _check(choice: Choice, layer: KeptLayer, outputs: Outputs) -> None:
    within = torch.arange(choice.size, device=layer.keys.device)
    index = [
        (blocks.long()[..., None] * choice.size + within).flatten(2)[..., None].expand(-1, -1, -1, layer.shape.head_dim)
        for blocks in (layer.chosen[choice][1], outputs[0])
    ]
    for name, tokens in (("keys", layer.keys), ("values", layer.values)):
        expected, kept = tokens.gather(2, index[0]), layer.slots[choice][f"kept_{name}"].gather(2, index[1])
        wrong = int((kept != expected).any(dim=-1).sum())
        if wrong:
            raise oracle.Mismatch(f"keep_chosen: {wrong} of the kept {name} are not those of the chosen tokens")


def loaded_bytes(choice: Choice, shape: Shape, settings: Settings) -> int:
    """Return the bytes that come over the link in both steps."""
    tokens = shape.batch * shape.kv_heads * choice.count_new(settings) * choice.size
    return 2 * tokens * 2 * shape.head_dim * DTYPE.itemsize


def _slot_bytes(shape: Shape, settings: Settings) -> int:
    return len(VARIANTS) * 2 * shape.batch * shape.kv_heads * settings.token_budget * shape.head_dim * DTYPE.itemsize


def _entries() -> Iterator[Entry]:
    for choice in VARIANTS:
        yield Entry(
            "keep_chosen",
            choice.name,
            partial(_run, choice),
            partial(_check, choice),
            partial(loaded_bytes, choice),
            KeptLayer.spoil,
        )


KEPT = Family(
    "chosen blocks kept on the device",
    KEEP_SHAPES,
    KEEP_SHAPES[:1],
    tuple(_entries()),
    make_kept_layer,
    layer_bytes=_slot_bytes,  # on the device, whose memory limits the layers
    step_bytes=_slot_bytes,
    backends=lambda shape: [],
)
