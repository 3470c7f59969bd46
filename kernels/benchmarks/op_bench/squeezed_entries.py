"""Squeezed Attention's ops and its whole steps: calls, bytes to move, and checks."""

from __future__ import annotations

import hf_sparse_attn_kernels as ops
import torch

from op_bench import dense_chunk, oracle, squeezed_floors, squeezed_oracle
from op_bench.dense import fast_backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import (
    QUICK_SQUEEZED_PREFILL_SHAPES,
    QUICK_SQUEEZED_SHAPES,
    SQUEEZED_PREFILL_SHAPES,
    SQUEEZED_SHAPES,
)
from op_bench.squeezed_workload import SqueezedLayer, make_squeezed_layer, squeezed_layer_bytes


def _weights(layer: SqueezedLayer, impl: str | None) -> torch.Tensor:
    context = layer.context
    weights: torch.Tensor = ops.centroid_weights(layer.queries, context.centroids, context.cluster_sizes, impl=impl)
    return weights


def _select(layer: SqueezedLayer, weights: torch.Tensor, impl: str | None) -> Outputs:
    context = layer.context
    selection: Outputs = ops.select_runs(
        weights, context.cluster_sizes, context.run_starts, context.run_clusters, layer.threshold, impl=impl
    )
    return selection


def _lookup(layer: SqueezedLayer, impl: str | None) -> Outputs:
    """Return the chosen runs and their number."""
    context = layer.context
    clusters, runs = (context.centroids, context.cluster_sizes), (context.run_starts, context.run_clusters)
    return ops.lookup_runs(layer.query, *clusters, *runs, layer.threshold, impl=impl)[:2]


def _decode(layer: SqueezedLayer, run_indices: torch.Tensor, run_counts: torch.Tensor, impl: str | None) -> Outputs:
    buffers = (layer.keys, layer.values)
    runs = (layer.context.run_starts, run_indices, run_counts)
    tail = (*buffers, layer.tail_start, layer.seq_end)
    return ops.runs_decode(layer.query, *buffers, layer.seq_start, *runs, *tail, counter=layer.counter, impl=impl)[:1]


def _prefill(layer: SqueezedLayer, run_indices: torch.Tensor, run_counts: torch.Tensor, impl: str | None) -> Outputs:
    buffers = (layer.keys, layer.values)
    runs = (layer.context.run_starts, run_indices, run_counts)
    tail = (*buffers, layer.tail_start, layer.seq_end)
    return ops.runs_prefill(layer.query, *buffers, layer.seq_start, *runs, *tail, impl=impl)[:1]


def _run_weights(layer: SqueezedLayer, impl: str | None) -> Outputs:
    return (_weights(layer, impl),)


def _run_select(layer: SqueezedLayer, impl: str | None) -> Outputs:
    return _select(layer, layer.weights, impl)


def _run_lookup(layer: SqueezedLayer, impl: str | None) -> Outputs:
    return _lookup(layer, impl)


def _run_decode(layer: SqueezedLayer, impl: str | None) -> Outputs:
    return _decode(layer, layer.run_indices, layer.run_counts, impl)


def _run_step(layer: SqueezedLayer, impl: str | None) -> Outputs:
    selection = _lookup(layer, impl)
    return (*_decode(layer, *selection, impl), *selection)


def _run_prefill(layer: SqueezedLayer, impl: str | None) -> Outputs:
    return _prefill(layer, layer.run_indices, layer.run_counts, impl)


def _run_whole_prefill(layer: SqueezedLayer, impl: str | None) -> Outputs:
    weights = _weights(layer, impl)
    selection = _select(layer, weights, impl)
    return (*_prefill(layer, *selection, impl), *selection, weights)


def _run_dense(layer: SqueezedLayer, impl: str | None) -> Outputs:
    tensors = (layer.query, layer.keys, layer.values, layer.seq_start, layer.seq_end)
    return ops.dense_decode(*tensors, counter=layer.counter, impl=impl)[:1]


def _reset_counter(layer: SqueezedLayer) -> None:
    layer.counter.zero_()


def _check_weights(layer: SqueezedLayer, outputs: Outputs) -> None:
    squeezed_oracle.check_weights(outputs[0], layer)


def _check_select(layer: SqueezedLayer, outputs: Outputs) -> None:
    indices, counts = outputs
    squeezed_oracle.check_runs(indices, counts, layer.weights, layer)


def _check_attention(layer: SqueezedLayer, output: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor) -> None:
    squeezed_oracle.check_attention(output, indices, counts, layer)
    oracle.check_counter(layer, (*squeezed_oracle.token_counts(counts, indices, layer), 0, 1))


def _check_decode(layer: SqueezedLayer, outputs: Outputs) -> None:
    _check_attention(layer, outputs[0], layer.run_indices, layer.run_counts)


def _check_step(layer: SqueezedLayer, outputs: Outputs) -> None:
    output, indices, counts = outputs
    # The weights that `centroid_weights` returns, to the last bit, are those that the lookup compares.
    squeezed_oracle.check_weights(layer.weights, layer)
    squeezed_oracle.check_runs(indices, counts, layer.weights, layer)
    _check_attention(layer, output, indices, counts)


def _check_prefill(layer: SqueezedLayer, outputs: Outputs) -> None:
    squeezed_oracle.check_attention(outputs[0], layer.run_indices, layer.run_counts, layer)


def _check_whole_prefill(layer: SqueezedLayer, outputs: Outputs) -> None:
    output, indices, counts, weights = outputs
    squeezed_oracle.check_weights(weights, layer)
    squeezed_oracle.check_runs(indices, counts, weights, layer)
    squeezed_oracle.check_attention(output, indices, counts, layer)


def _check_dense(layer: SqueezedLayer, outputs: Outputs) -> None:
    oracle.check_dense_output(outputs[0], layer)
    tokens = layer.shape.batch * layer.shape.kv_heads * layer.shape.length
    oracle.check_counter(layer, (tokens, tokens, 0, 1))


SQUEEZED_DECODE = Family(
    "Squeezed Attention, decode steps",
    SQUEEZED_SHAPES,
    QUICK_SQUEEZED_SHAPES,
    (
        Entry("centroid_weights", "one query", _run_weights, _check_weights, squeezed_floors.weights_bytes),
        Entry("select_runs", "one query", _run_select, _check_select, squeezed_floors.select_bytes),
        Entry("lookup_runs", "", _run_lookup, _check_select, squeezed_floors.lookup_bytes),
        Entry(
            "dense_decode",
            "of a context",
            _run_dense,
            _check_dense,
            squeezed_floors.dense_bytes,
            _reset_counter,
            against_dense=True,
        ),
        Entry(
            "runs_decode",
            "",
            _run_decode,
            _check_decode,
            squeezed_floors.attention_bytes,
            _reset_counter,
            against_dense=True,
        ),
        Entry(
            "squeezed_step",
            "",
            _run_step,
            _check_step,
            squeezed_floors.step_bytes,
            _reset_counter,
            against_dense=True,
        ),
    ),
    make_squeezed_layer,
    squeezed_layer_bytes,
    step_bytes=squeezed_floors.step_bytes,
    backends=fast_backends,
    least_layers=2,
)

SQUEEZED_PREFILL = Family(
    "Squeezed Attention, prefill of the user's input",
    SQUEEZED_PREFILL_SHAPES,
    QUICK_SQUEEZED_PREFILL_SHAPES,
    (
        Entry("centroid_weights", "many queries", _run_weights, _check_weights, squeezed_floors.weights_bytes),
        Entry("runs_prefill", "", _run_prefill, _check_prefill, squeezed_floors.attention_bytes, against_dense=True),
        Entry(
            "squeezed_prefill",
            "",
            _run_whole_prefill,
            _check_whole_prefill,
            squeezed_floors.step_bytes,
            against_dense=True,
        ),
    ),
    make_squeezed_layer,
    squeezed_layer_bytes,
    step_bytes=squeezed_floors.step_bytes,
    backends=dense_chunk.backends,
    least_layers=2,
)
