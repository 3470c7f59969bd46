"""The ops of Progressive Sparse Attention and its whole step: calls, bytes to move, and checks."""

from __future__ import annotations

import math
from dataclasses import replace

import hf_sparse_attn_kernels as ops
import torch

from op_bench import floors, oracle
from op_bench.dense import backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.progressive_workload import (
    in_blocks,
    make_progressive_layer,
    progressive_layer_bytes,
)
from op_bench.quest_entries import take_newest_token_away
from op_bench.shapes import PROGRESSIVE_SHAPES, QUICK_PROGRESSIVE_SHAPES, Settings, Shape
from op_bench.workload import STATISTICS, Layer

KIND = "int8"
"""Kind of the page bounds."""


def rank(layer: Layer, scores: torch.Tensor, impl: str | None) -> Outputs:
    """Return the order of all blocks by their scores, and the counts."""
    row_bounds = (layer.seq_start, layer.seq_end)
    ranked: Outputs = ops.rank_blocks(scores, *row_bounds, block_size=layer.settings.block_size, impl=impl)
    return ranked


def _decode(layer: Layer, block_order: torch.Tensor, block_counts: torch.Tensor, impl: str | None) -> Outputs:
    tensors = (layer.query, layer.keys, layer.values, block_order, block_counts, layer.seq_start, layer.seq_end)
    settings, scratch = layer.settings, {"counter": layer.counter, "finished": layer.finished}
    out, _, read_counts = ops.progressive_decode(
        *tensors,
        block_size=settings.block_size,
        microbatch=settings.microbatch,
        threshold=settings.threshold,
        **scratch,
        impl=impl,
    )
    return out, read_counts


def _run_rank(layer: Layer, impl: str | None) -> Outputs:
    return rank(layer, layer.scores, impl)


def _run_decode(layer: Layer, impl: str | None) -> Outputs:
    return _decode(layer, layer.block_indices, layer.block_counts, impl)


def _run_append_and_rank(layer: Layer, impl: str | None) -> Outputs:
    bounds = layer.bounds[KIND]
    ranked: Outputs = ops.append_and_rank(
        layer.query,
        layer.new_key,
        layer.new_value,
        layer.keys,
        layer.values,
        bounds.page_min,
        bounds.page_max,
        layer.seq_start,
        layer.seq_end,
        page_size=layer.settings.page_size,
        **bounds.exponents,
        counter=layer.counter,
        statistic=STATISTICS[KIND],
        impl=impl,
    )
    return ranked


def _run_step(layer: Layer, impl: str | None) -> Outputs:
    ranked = _run_append_and_rank(layer, impl)
    return (*_decode(layer, *ranked, impl), *ranked)


def _reset_counter(layer: Layer) -> None:
    layer.counter.zero_()


def _take_newest_token_away(layer: Layer) -> None:
    take_newest_token_away(KIND, layer)


def _check_rank(layer: Layer, scores: torch.Tensor, ranked: Outputs) -> None:
    for name, ours, theirs in zip(("order", "counts"), ranked, rank(layer, scores, "reference"), strict=True):
        if not torch.equal(ours, theirs):
            raise oracle.Mismatch(f"rank_blocks: {int((ours != theirs).sum())} values of the {name} differ")


def _check_appended_and_ranked(layer: Layer, ranked: Outputs) -> None:
    """Check the token, its page's bounds, and the order of the blocks, in which scores that rounding may swap tie."""
    oracle.check_appended(layer)
    oracle.check_step_bounds(layer, KIND)
    scores = oracle.reference_scores(layer, KIND)
    (order, counts), (expected_order, expected_counts) = ranked, rank(layer, scores, "reference")
    if not torch.equal(counts, expected_counts):
        raise oracle.Mismatch("append_and_rank: counts differ from the reference's")
    if not torch.equal(order.sort(dim=-1)[0], expected_order.sort(dim=-1)[0]):
        raise oracle.Mismatch("append_and_rank: the order does not hold every block once")
    check_order("append_and_rank", scores, order, expected_order)


def check_order(op: str, scores: torch.Tensor, order: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that blocks come in the order of their scores, the newest first; scores that rounding may swap tie."""
    if not torch.equal(order[..., 0], expected[..., 0]):
        raise oracle.Mismatch(f"{op}: the newest block is not the first")
    ours, theirs = (scores.gather(2, blocks[..., 1:].long()) for blocks in (order, expected))
    apart, rounding = float((ours - theirs).abs().max()), oracle.score_rounding(scores)
    if not apart <= rounding:
        raise oracle.Mismatch(
            f"{op}: scores in order differ from the reference's by {apart:.2e}, ties allowed to {rounding:.2e}"
        )


def _check_append_and_rank(layer: Layer, outputs: Outputs) -> None:
    _check_appended_and_ranked(layer, outputs)
    oracle.check_counter(layer, (0, 0, metadata_bytes(layer), 0))


def metadata_bytes(layer: Layer) -> int:
    """Return the bytes of the bounds that a step reads."""
    return floors.metadata_bytes(KIND, layer.shape, layer.settings)


def check_decode(
    layer: Layer,
    outputs: Outputs,
    block_order: torch.Tensor,
    scored_bytes: int = 0,
    read: torch.Tensor | None = None,
) -> None:
    """Check where the reading stopped, against block sums in float32, then attention to what was read.

    ``read`` begins with the blocks read, by default as ``block_order`` does.
    """
    out, read_counts = outputs
    expected = blocks_needed(layer, block_order)
    if not torch.equal(read_counts, expected):
        wrong = int((read_counts != expected).sum())
        raise oracle.Mismatch(f"progressive_decode: {wrong} of {expected.numel()} rows and heads stop elsewhere")
    if not bool((expected == layer.settings.max_blocks).all()):
        raise oracle.Mismatch(f"workload: not every row and head reads {layer.settings.max_blocks} blocks")
    oracle.check_sparse_output(out, layer, block_order if read is None else read, read_counts)
    pairs = layer.shape.batch * layer.shape.kv_heads
    tokens = (pairs * layer.settings.token_budget, pairs * layer.shape.length)
    oracle.check_counter(layer, (*tokens, scored_bytes, 1))


def blocks_needed(layer: Layer, block_order: torch.Tensor) -> torch.Tensor:
    """Return the blocks after which the estimated share of the weight exceeds the threshold, int32 [batch, kv_heads].

    All blocks of the layer are complete.
    """
    shape, settings = layer.shape, layer.settings
    log_odds = math.log(settings.threshold / (1 - settings.threshold))
    needed = []
    for head in range(shape.kv_heads):
        query = layer.query[:, head * shape.group : (head + 1) * shape.group].float()
        scores = query @ layer.keys[:, head].float().transpose(1, 2) * shape.head_dim**-0.5
        sums = scores.unflatten(2, (-1, settings.block_size)).logsumexp(dim=3)  # [batch, group, blocks]
        sums = sums.gather(2, block_order[:, head, None].long().expand_as(sums))
        read = torch.arange(1, sums.shape[2] + 1, device=sums.device)
        left = (sums.shape[2] - read).to(sums.dtype).log()
        excess = sums.logcumsumexp(dim=2) - sums.cummin(dim=2)[0] - left
        enough = (excess > log_odds).all(dim=1) & (read % settings.microbatch == 0)
        enough[:, -1] = True
        needed.append(enough.int().argmax(dim=1) + 1)
    return torch.stack(needed, dim=1).int()


def _check_step(layer: Layer, outputs: Outputs) -> None:
    out, read_counts, *ranked = outputs
    _check_appended_and_ranked(layer, tuple(ranked))
    check_decode(layer, (out, read_counts), ranked[0], metadata_bytes(layer))


def _rank_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the scores, the order and the counts."""
    return 4 * shape.batch * shape.kv_heads * (2 * in_blocks(settings).pages(shape) + 1)


def _append_and_rank_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of all metadata, the query, the new token, the order and the counts; the scores stay on the chip."""
    every_block = replace(in_blocks(settings), token_budget=shape.length)
    return floors.append_and_select_bytes(KIND, shape, every_block)


def _decode_bytes(shape: Shape, settings: Settings) -> int:
    return floors.sparse_decode_bytes(shape, in_blocks(settings))


def step_bytes(shape: Shape, settings: Settings) -> int:
    """Return the bytes that Quest's step with pages of the same size moves: the order stays on the chip."""
    return floors.step_bytes(KIND, shape, in_blocks(settings))


PROGRESSIVE = Family(
    "Progressive Sparse Attention, decode steps",
    PROGRESSIVE_SHAPES,
    QUICK_PROGRESSIVE_SHAPES,
    (
        Entry(
            "rank_blocks", "", _run_rank, lambda layer, outputs: _check_rank(layer, layer.scores, outputs), _rank_bytes
        ),
        Entry(
            "progressive_decode",
            "",
            _run_decode,
            lambda layer, outputs: check_decode(layer, outputs, layer.block_indices),
            _decode_bytes,
            _reset_counter,
            against_dense=True,
        ),
        Entry(
            "append_and_rank",
            "",
            _run_append_and_rank,
            _check_append_and_rank,
            _append_and_rank_bytes,
            _take_newest_token_away,
        ),
        Entry("psa_step", "", _run_step, _check_step, step_bytes, _take_newest_token_away, against_dense=True),
    ),
    make_progressive_layer,
    progressive_layer_bytes,
    step_bytes=step_bytes,
    backends=backends,
)
"""At the shapes of Quest's step, which reads as many tokens."""
