"""Squeezed Attention's entries at tiny shapes, checked as before a measurement; and results that fail the checks."""

from dataclasses import replace

import pytest
import torch
from op_bench import dense_chunk, oracle, squeezed_floors, squeezed_oracle, token_oracle
from op_bench.measure import check_entry
from op_bench.shapes import SQUEEZED_PREFILL_SHAPES, SQUEEZED_SHAPES, Settings, Shape
from op_bench.squeezed_entries import SQUEEZED_DECODE, SQUEEZED_PREFILL
from op_bench.squeezed_workload import expected_runs, make_squeezed_layer, squeezed_layer_bytes

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=16, batch=2, length=160)
SHARED = replace(SHAPE, batch=3, shared=True)
SETTINGS = Settings(sparsity=0.7, clusters=0.1, window=20, tail_tokens=8)
DECODE = {entry.op: entry for entry in SQUEEZED_DECODE.entries}
PREFILL = replace(SHAPE, queries=12)


def new_layer(shape=SHAPE):
    return make_squeezed_layer(shape, SETTINGS, torch.device("cpu"), impl="reference")


def in_float32(layer):
    for name in ("query", "keys", "values"):
        setattr(layer, name, getattr(layer, name).float())  # Triton's interpreter truncates bfloat16
    layer.context.centroids = layer.context.centroids.float()
    return layer


@pytest.mark.parametrize("shape", [SHAPE, SHARED], ids=["own", "shared"])
@pytest.mark.parametrize("entry", SQUEEZED_DECODE.entries, ids=lambda entry: entry.name)
def test_the_reference_passes_and_can_be_repeated(entry, shape):
    layer = new_layer(shape)
    for _ in range(2):
        check_entry(entry, layer, "reference")


@pytest.mark.parametrize("shape", [PREFILL, replace(SHARED, queries=12)], ids=["own", "shared"])
@pytest.mark.parametrize("entry", SQUEEZED_PREFILL.entries, ids=lambda entry: entry.name)
def test_the_reference_passes_in_a_prefill(entry, shape):
    check_entry(entry, new_layer(shape), "reference")


def test_dense_backends_take_a_prefill():
    layer = new_layer(PREFILL)
    unmasked, causal = (
        token_oracle.chunk_attention(layer.query, layer.keys, layer.values, torch.bfloat16, is_causal=is_causal)
        for is_causal in (False, True)
    )
    cudnn_in_parts, cudnn_unmasked, flash = dense_chunk.backends(replace(PREFILL, batch=2))
    cudnn_unmasked.check(unmasked, layer)
    for backend in (cudnn_in_parts, flash):
        backend.check(causal, layer)
        with pytest.raises(oracle.Mismatch, match="output off by"):
            backend.check(unmasked, layer)


@pytest.mark.parametrize("shape", [SHAPE, SHARED], ids=["own", "shared"])
def test_the_kernels_pass_too(shape):
    layer = in_float32(new_layer(shape))
    check_entry(DECODE["squeezed_step"], layer, "triton")


def test_the_kernels_pass_in_a_prefill_too():
    layer = in_float32(new_layer(PREFILL))
    [whole] = [entry for entry in SQUEEZED_PREFILL.entries if entry.op == "squeezed_prefill"]
    check_entry(whole, layer, "triton")


def test_clusters_lie_side_by_side_and_are_cut_into_runs():
    layer = new_layer()
    context, clustered = layer.context, SETTINGS.context_length(SHAPE) - SETTINGS.window
    assert (context.cluster_sizes.sum(dim=2) == clustered).all()
    lengths = context.run_starts.diff(dim=2)
    assert 0 <= lengths.min() <= lengths.max() <= 16
    assert (context.run_starts[..., -1] == SETTINGS.context_length(SHAPE)).all()
    for row in range(SHAPE.batch):
        for head in range(SHAPE.kv_heads):
            first = 0
            for cluster, size in enumerate(context.cluster_sizes[row, head].tolist()):
                assert lengths[row, head][context.run_clusters[row, head] == cluster].sum() == size
                mean = layer.keys[row, head, first : first + size].float().mean(dim=0)
                torch.testing.assert_close(context.centroids[row, head, cluster].float(), mean, rtol=0.01, atol=0.01)
                first += size
            assert lengths[row, head][context.run_clusters[row, head] == -1].sum() == SETTINGS.window


def test_the_threshold_leaves_out_the_wanted_share_and_heads_differ():
    shape, settings = Shape(8, 8, 64, 1, 8192), Settings()
    layer = make_squeezed_layer(shape, settings, torch.device("cpu"), impl="reference")
    chosen = [
        len(squeezed_oracle.chosen_tokens(layer.run_indices, layer.run_counts, layer, 0, head)) for head in range(8)
    ]
    assert sum(chosen) == pytest.approx(8 * squeezed_floors.tokens_read(shape, settings), rel=0.01)
    always = settings.window + settings.tail_tokens
    assert max(chosen) - always > 3 * (min(chosen) - always)
    assert layer.run_indices.shape[2] == pytest.approx(expected_runs(shape, settings), rel=0.1)


def test_wrong_weights_fail():
    layer = new_layer()
    squeezed_oracle.check_weights(layer.weights, layer)
    for wrong in (1.001, float("nan")):
        with pytest.raises(oracle.Mismatch, match="centroid_weights: off by"):
            squeezed_oracle.check_weights(layer.weights * wrong, layer)


def test_a_wrong_selection_fails():
    layer = new_layer()
    indices, counts, weights = layer.run_indices, layer.run_counts, layer.weights
    squeezed_oracle.check_runs(indices, counts, weights, layer)
    with pytest.raises(oracle.Mismatch, match="selection: wrong counts"):
        squeezed_oracle.check_runs(indices, counts - 1, weights, layer)
    with pytest.raises(oracle.Mismatch, match=r"selection: \d+ of \d+ places differ"):
        squeezed_oracle.check_runs(indices.flip(-1), counts, weights, layer)


def test_attention_to_other_tokens_fails():
    layer = new_layer()
    dense = oracle.attention(layer.query, layer.keys, layer.values, torch.float32)
    with pytest.raises(oracle.Mismatch, match="output off by"):
        squeezed_oracle.check_attention(dense, layer.run_indices, layer.run_counts, layer)


# The design's figures: a tenth of 2 * 512K * 32 * 128 keys and values, and centroids of a twentieth of the keys.
def test_moved_bytes_of_a_step():
    shape, settings = Shape(32, 32, 128, 1, 524288), Settings()
    keys = shape.length * 32 * 128 * 2
    assert squeezed_floors.attention_bytes(shape, settings) == pytest.approx(0.2 * keys, rel=0.02)
    assert squeezed_floors.step_bytes(shape, settings) == pytest.approx(0.25 * keys, rel=0.03)
    assert squeezed_floors.dense_bytes(shape, settings) == pytest.approx(2 * keys, rel=1e-4)


@pytest.mark.parametrize("entry", SQUEEZED_DECODE.entries, ids=lambda entry: entry.name)
def test_floors_grow_with_the_batch_less_what_rows_share(entry):
    one, own, shared = Shape(32, 8, 128, 1, 8192), Shape(32, 8, 128, 8, 8192), Shape(32, 8, 128, 8, 8192, shared=True)
    moved = [entry.moved_bytes(shape, Settings()) for shape in (one, shared, own)]
    assert 0 < moved[0] < moved[1] < moved[2] == pytest.approx(8 * moved[0], rel=1e-4)


@pytest.mark.parametrize("shape", [SHAPE, SHARED, replace(SHAPE, queries=8)], ids=["own", "shared", "prefill"])
def test_buffers_are_counted_right(shape):
    layer = new_layer(shape)
    buffers = [each for part in (layer, layer.context) for each in vars(part).values() if torch.is_tensor(each)]
    counted = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
    assert counted == pytest.approx(squeezed_layer_bytes(shape, SETTINGS), rel=0.15)


def test_shapes_have_a_context():
    assert {shape.name for shape in SQUEEZED_SHAPES} >= {"q32-kv32-d128-b1-512K", "q32-kv8-d128-b8-shared-128K"}
    for shape in (*SQUEEZED_SHAPES, *SQUEEZED_PREFILL_SHAPES):
        assert Settings().context_length(shape) > Settings().window
    with pytest.raises(ValueError, match="length=28; allowed: more tokens before the tail than window=20"):
        new_layer(replace(SHAPE, length=28))
