"""One layer's buffers for Progressive Sparse Attention: rows in which every query reads as much as Quest's budget."""

from __future__ import annotations

from dataclasses import replace

import hf_sparse_attn_kernels as ops
import torch

from op_bench.shapes import Settings, Shape
from op_bench.workload import Layer, layer_bytes, make_layer

EXCESS = 12.0
"""How much greater scaled scores are, on average, in the blocks that matter than in the others: a factor of e^12 in
weight, so that all other blocks of 512K tokens together have less than the threshold leaves out."""


def in_blocks(settings: Settings) -> Settings:
    """Return the settings with pages of the method's blocks; the token budget is what a row is to read."""
    return replace(settings, page_size=settings.block_size)


def progressive_layer_bytes(shape: Shape, settings: Settings) -> int:
    """Return the bytes of a layer's buffers."""
    return layer_bytes(shape, in_blocks(settings))


def make_progressive_layer(
    shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
) -> Layer:
    """Create a layer in which the estimate exceeds the threshold once ``settings.token_budget`` tokens are read.

    Keys of as many blocks as are to be read, less half a microbatch, lie in the direction of the group's queries. So
    the last microbatch read is the first with blocks that do not matter: until then the least sum is a large one.
    ``block_indices`` are the ranks, ``block_counts`` all blocks.

    Raises
    ------
    ValueError
        The budget is not a whole number of microbatches, or not less than the row.
    """
    settings = in_blocks(settings)
    block_size, tokens = settings.block_size, settings.microbatch * settings.block_size
    if settings.token_budget % tokens or settings.token_budget >= shape.length:
        raise ValueError(
            f"token_budget={settings.token_budget}; allowed: whole microbatches of {tokens} tokens, "
            f"fewer than length={shape.length}"
        )
    layer = make_layer(shape, settings, device, seed, impl)
    generator = torch.Generator(device).manual_seed(seed + 1)
    blocks, heavy = settings.pages(shape), settings.max_blocks - settings.microbatch // 2
    grouped = layer.query.float().unflatten(1, (shape.kv_heads, shape.group))
    # The shortest vector whose product with every query of the group is the excess.
    direction = torch.linalg.pinv(grouped).sum(dim=3) * (EXCESS * shape.head_dim**0.5)
    for row in range(shape.batch):
        for head in range(shape.kv_heads):
            others = torch.randperm(blocks - 1, device=device, generator=generator)[: heavy - 1]
            by_block = layer.keys[row, head].view(blocks, block_size, shape.head_dim)
            chosen = torch.cat((others, others.new_full((1,), blocks - 1)))
            by_block[chosen] += direction[row, head].to(by_block.dtype)
    layer.new_key.copy_(layer.keys[:, :, -1])
    levels = (layer.bounds["int8"].page_min, layer.bounds["int8"].page_max)
    options = {"page_size": block_size, **layer.bounds["int8"].exponents, "impl": impl}
    row_bounds = (layer.seq_start, layer.seq_end)
    ops.page_bounds(layer.keys, *levels, *row_bounds, num_new=shape.length, **options)
    layer.scores = ops.page_scores(layer.query, *levels, *row_bounds, **options)
    layer.block_indices, layer.block_counts = ops.rank_blocks(
        layer.scores, *row_bounds, block_size=block_size, impl=impl
    )
    return layer
