"""Quest's ops: calls, bytes to move, and checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hf_sparse_attn_kernels as ops
import torch

from op_bench import floors, oracle
from op_bench.dense import backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import DECODE_SHAPES, QUICK_DECODE_SHAPES
from op_bench.workload import BOUNDS, STATISTICS, Layer, layer_bytes, make_layer

VERIFIED_TOKENS = 8
"""Tokens of the dense pass that is timed: a draft of seven and the token before it."""


def _run_prompt_bounds(kind: str, layer: Layer, impl: str | None) -> Outputs:
    layer.context_bounds(kind, layer.shape.length, impl)
    return ()


def _run_token_bounds(kind: str, layer: Layer, impl: str | None) -> Outputs:
    bounds = layer.bounds[kind]
    levels = (bounds.page_min, bounds.page_max)
    options = {"page_size": layer.settings.page_size, "num_new": 1, "statistic": STATISTICS[kind], "impl": impl}
    ops.page_bounds(layer.keys, *levels, layer.seq_start, layer.seq_end, **bounds.exponents, **options)
    return ()


def _run_scores(kind: str, layer: Layer, impl: str | None) -> Outputs:
    bounds = layer.bounds[kind]
    levels = (bounds.page_min, bounds.page_max)
    options = {"page_size": layer.settings.page_size, "impl": impl}
    return (ops.page_scores(layer.query, *levels, layer.seq_start, layer.seq_end, **bounds.exponents, **options),)


def _run_select(layer: Layer, impl: str | None) -> Outputs:
    settings = layer.settings
    selection: Outputs = ops.select_blocks(
        layer.scores,
        layer.seq_start,
        layer.seq_end,
        block_size=settings.page_size,
        **settings.budget,
        impl=impl,
    )
    return selection


def _append_and(op: Callable[..., Outputs], kind: str, layer: Layer, impl: str | None) -> Outputs:
    settings, bounds = layer.settings, layer.bounds[kind]
    return op(
        layer.query,
        layer.new_key,
        layer.new_value,
        layer.keys,
        layer.values,
        bounds.page_min,
        bounds.page_max,
        layer.seq_start,
        layer.seq_end,
        page_size=settings.page_size,
        **settings.budget,
        **bounds.exponents,
        counter=layer.counter,
        finished=layer.finished,
        statistic=STATISTICS[kind],
        impl=impl,
    )


def _sparse_decode(layer: Layer, block_indices: torch.Tensor, block_counts: torch.Tensor, impl: str | None) -> Outputs:
    tensors = (layer.query, layer.keys, layer.values, block_indices, block_counts, layer.seq_start, layer.seq_end)
    options = {"block_size": layer.settings.page_size, "counter": layer.counter, "finished": layer.finished}
    return ops.sparse_decode(*tensors, **options, impl=impl)[:1]


def _run_sparse_decode(layer: Layer, impl: str | None) -> Outputs:
    return _sparse_decode(layer, layer.block_indices, layer.block_counts, impl)


def _run_dense_decode(layer: Layer, impl: str | None) -> Outputs:
    tensors = (layer.query, layer.keys, layer.values, layer.seq_start, layer.seq_end)
    return ops.dense_decode(*tensors, counter=layer.counter, finished=layer.finished, impl=impl)[:1]


def _run_dense_prefill(layer: Layer, impl: str | None) -> Outputs:
    tokens = layer.query.unsqueeze(2).expand(-1, -1, VERIFIED_TOKENS, -1)  # the last tokens, with one query
    return ops.dense_prefill(tokens, layer.keys, layer.values, layer.seq_start, layer.seq_end, impl=impl)[:1]


def run_step(kind: str, layer: Layer, impl: str | None) -> Outputs:
    """Run a whole step; return the output and the selection."""
    output, _, block_indices, block_counts = _append_and(ops.append_and_attend, kind, layer, impl)
    return output, block_indices, block_counts


def _spoil_prompt_bounds(kind: str, layer: Layer) -> None:
    for tensor in layer.bounds[kind].tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def _spoil_token_bounds(kind: str, layer: Layer) -> None:
    bounds = layer.bounds[kind]
    for tensor in (bounds.page_min, bounds.page_max, bounds.page_exponent):
        if tensor is not None:
            tensor[:, :, -1] = float("nan") if tensor.is_floating_point() else 77


def take_newest_token_away(kind: str, layer: Layer) -> None:
    """Undo a step: take the newest token out of the buffers and the bounds, and reset the counter."""
    layer.keys[:, :, -1] = float("nan")
    layer.values[:, :, -1] = float("nan")
    layer.context_bounds(kind, 1, "reference")
    layer.counter.zero_()


def _reset_counter(layer: Layer) -> None:
    layer.counter.zero_()


def _check_appended_and_selected(kind: str, layer: Layer, selection: Outputs) -> None:
    oracle.check_appended(layer)
    oracle.check_step_bounds(layer, kind)
    scores = oracle.reference_scores(layer, kind)
    indices, counts = selection
    oracle.check_selection((indices, counts), scores, layer, oracle.score_rounding(scores))


def _check_append_and_select(kind: str, layer: Layer, outputs: Outputs) -> None:
    _check_appended_and_selected(kind, layer, outputs)
    oracle.check_counter(layer, (0, 0, floors.metadata_bytes(kind, layer.shape, layer.settings), 0))


def check_step(kind: str, layer: Layer, outputs: Outputs) -> None:
    """Raise unless a whole step wrote, chose, attended and counted what it should."""
    output, *selection = outputs
    _check_appended_and_selected(kind, layer, tuple(selection))
    oracle.check_sparse_output(output, layer, *selection)
    metadata_bytes = floors.metadata_bytes(kind, layer.shape, layer.settings)
    oracle.check_counter(layer, (*_token_counts(layer, sparse=True), metadata_bytes, 1))


def _check_sparse_decode(layer: Layer, outputs: Outputs) -> None:
    oracle.check_sparse_output(outputs[0], layer, layer.block_indices, layer.block_counts)
    oracle.check_counter(layer, (*_token_counts(layer, sparse=True), 0, 1))


def _check_dense_decode(layer: Layer, outputs: Outputs) -> None:
    oracle.check_dense_output(outputs[0], layer)
    oracle.check_counter(layer, (*_token_counts(layer, sparse=False), 0, 1))


def _check_dense_prefill(layer: Layer, outputs: Outputs) -> None:
    """Check the newest token, which sees everything; the others see up to ``VERIFIED_TOKENS`` - 1 keys less."""
    oracle.check_dense_output(outputs[0][:, :, -1], layer)
    if not bool(outputs[0].isfinite().all()):
        raise oracle.Mismatch("dense_prefill: an output is not finite")


def _token_counts(layer: Layer, *, sparse: bool) -> tuple[int, int]:
    """Return the tokens read, and the tokens that dense attention reads."""
    pairs = layer.shape.batch * layer.shape.kv_heads
    read = layer.settings.tokens_read(layer.shape) if sparse else layer.shape.length
    return pairs * read, pairs * layer.shape.length


def _of_kind(kind: str) -> list[Entry]:
    """Entries of the ops that take bounds; of another statistic only those that compute it."""
    bind = partial
    entries = [
        Entry(
            "page_bounds",
            f"{kind}, prompt",
            bind(_run_prompt_bounds, kind),
            lambda layer, outputs: oracle.check_prompt_bounds(layer, kind),
            bind(floors.prompt_bounds_bytes, kind),
            prepare=bind(_spoil_prompt_bounds, kind),
        ),
        Entry(
            "page_bounds",
            f"{kind}, one token",
            bind(_run_token_bounds, kind),
            lambda layer, outputs: oracle.check_step_bounds(layer, kind),
            bind(floors.token_bounds_bytes, kind),
            prepare=bind(_spoil_token_bounds, kind),
        ),
        Entry(
            "page_scores",
            kind,
            bind(_run_scores, kind),
            lambda layer, outputs: oracle.check_scores(outputs[0], layer, kind),
            bind(floors.scores_bytes, kind),
        ),
        Entry(
            "append_and_select",
            kind,
            bind(_append_and, ops.append_and_select, kind),
            bind(_check_append_and_select, kind),
            bind(floors.append_and_select_bytes, kind),
            prepare=bind(take_newest_token_away, kind),
        ),
        Entry(
            "quest_step",
            kind,
            bind(run_step, kind),
            bind(check_step, kind),
            bind(floors.step_bytes, kind),
            prepare=bind(take_newest_token_away, kind),
            against_dense=True,
        ),
    ]
    computed = ("page_bounds", "append_and_select")
    return [entry for entry in entries if STATISTICS[kind] == "minmax" or entry.op in computed]


ENTRIES: tuple[Entry, ...] = (
    *(entry for kind in BOUNDS for entry in _of_kind(kind)),
    Entry(
        "select_blocks",
        "",
        _run_select,
        lambda layer, outputs: oracle.check_selection((outputs[0], outputs[1]), layer.scores, layer),
        floors.select_bytes,
    ),
    Entry(
        "sparse_decode",
        "",
        _run_sparse_decode,
        _check_sparse_decode,
        floors.sparse_decode_bytes,
        prepare=_reset_counter,
        against_dense=True,
    ),
    Entry(
        "dense_decode",
        "",
        _run_dense_decode,
        _check_dense_decode,
        floors.dense_bytes,
        prepare=_reset_counter,
        against_dense=True,
    ),
    Entry(
        "dense_prefill",
        f"{VERIFIED_TOKENS} tokens",
        _run_dense_prefill,
        _check_dense_prefill,
        floors.dense_bytes,
    ),
)

STEP = ("quest_step", "int8")
"""Quest's entry in tables: 8-bit bounds are the default."""

QUEST = Family(
    "quest",
    DECODE_SHAPES,
    QUICK_DECODE_SHAPES,
    ENTRIES,
    make_layer,
    layer_bytes,
    step_bytes=partial(floors.step_bytes, STEP[1]),
    backends=backends,
)
