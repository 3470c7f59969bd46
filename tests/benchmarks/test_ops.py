"""Every entry of the registry at a tiny shape, checked as before a measurement; and results that fail the checks."""

import pytest
import torch
from op_bench import floors, oracle, registry
from op_bench.measure import check_entry, plan_layers
from op_bench.quest_entries import ENTRIES, QUEST
from op_bench.registry import FAMILIES, STEP
from op_bench.shapes import DECODE_SHAPES, QUICK_DECODE_SHAPES, Settings, Shape, matching_shapes
from op_bench.workload import layer_bytes, make_layer

SHAPE = Shape(q_heads=4, kv_heads=2, head_dim=16, batch=2, length=96)
SETTINGS = Settings(token_budget=48)
STEP_ENTRY = next(entry for entry in ENTRIES if (entry.op, entry.variant) == STEP)


def new_layer():
    return make_layer(SHAPE, SETTINGS, torch.device("cpu"), impl="reference")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_reference_passes_and_can_be_repeated(entry):
    layer = new_layer()
    for _ in range(2):
        check_entry(entry, layer, "reference")


def test_the_kernels_pass_too():
    check_entry(STEP_ENTRY, new_layer(), "triton")


def test_entries_are_named_once_and_cover_the_ops():
    names = [entry.name for entry in registry.ENTRIES]
    assert len(set(names)) == len(names)
    ops = {"page_bounds", "page_scores", "select_blocks", "append_and_select"}
    ops |= {"sparse_decode", "dense_decode", "dense_prefill"}
    assert {entry.op for entry in ENTRIES} == ops | {"quest_step"}
    assert {entry for family in FAMILIES for entry in family.entries} == set(registry.ENTRIES)


def test_wrong_bounds_fail():
    layer = new_layer()
    layer.context_bounds("int8", SHAPE.length, "reference")
    oracle.check_prompt_bounds(layer, "int8")
    layer.bounds["int8"].page_min[0, 1, 2, 3] += 1
    with pytest.raises(oracle.Mismatch, match=r"page_bounds of KV head 1: 1 of \d+ values of page_min"):
        oracle.check_prompt_bounds(layer, "int8")


def test_a_token_that_was_not_appended_fails():
    layer = new_layer()
    STEP_ENTRY.prepare(layer)
    with pytest.raises(oracle.Mismatch, match="keys do not end with the new token"):
        oracle.check_appended(layer)


def test_a_wrong_selection_fails_but_a_tie_passes():
    layer = new_layer()
    scores = oracle.reference_scores(layer, "bf16")
    indices, counts = layer.block_indices.clone(), layer.block_counts
    chosen = set(indices[0, 0].tolist())
    left_out = next(page for page in range(5) if page not in chosen)  # not the last page, which is always read
    middle = indices[0, 0, 1].item()
    indices[0, 0, 1] = left_out
    indices = indices.sort(dim=-1)[0]
    with pytest.raises(oracle.Mismatch, match="selected scores differ"):
        oracle.check_selection((indices, counts), scores, layer)
    scores[0, 0, left_out] = scores[0, 0, middle] - 1e-6
    oracle.check_selection((indices, counts), scores, layer, oracle.score_rounding(scores))
    with pytest.raises(oracle.Mismatch, match="not ascending"):
        oracle.check_selection((indices.flip(-1), counts), scores, layer)
    with pytest.raises(oracle.Mismatch, match="counts differ"):
        oracle.check_selection((indices, counts - 1), scores, layer)


def test_wrong_and_nan_scores_fail():
    layer = new_layer()
    for wrong in (1e-3, float("nan")):
        with pytest.raises(oracle.Mismatch, match="page_scores: off by"):
            oracle.check_scores(oracle.reference_scores(layer, "int8") + wrong, layer, "int8")


@pytest.mark.parametrize("wrong", [0.05, float("nan")])
def test_wrong_and_nan_outputs_fail(wrong):
    layer = new_layer()
    output = oracle.attention(layer.query, layer.keys, layer.values, torch.float32)
    oracle.check_dense_output(output, layer)
    with pytest.raises(oracle.Mismatch, match="output off by"):
        oracle.check_dense_output(output + wrong, layer)


def test_sparse_attention_to_other_blocks_fails():
    layer = new_layer()
    dense = oracle.attention(layer.query, layer.keys, layer.values, torch.float32)
    with pytest.raises(oracle.Mismatch, match="output off by"):
        oracle.check_sparse_output(dense, layer, layer.block_indices, layer.block_counts)


def test_wrong_counts_fail():
    layer = new_layer()
    with pytest.raises(oracle.Mismatch, match=r"counter \(0, 0, 0, 0\), expected \(1, 2, 3, 4\)"):
        oracle.check_counter(layer, (1, 2, 3, 4))


# As PERFORMANCE targets count them: 2,048 of 131,072 tokens, and bounds of 8,192 pages.
def test_moved_bytes_of_a_step():
    shape, settings = Shape(32, 32, 128, 1, 131072), Settings()
    attended = 2 * 2048 * 32 * 128 * 2
    levels = 2 * 8192 * 32 * 128
    moved = floors.step_bytes("int8", shape, settings)
    assert attended + levels < moved < 1.02 * (attended + levels)
    assert floors.step_bytes("bf16", shape, settings) == pytest.approx(attended + 2 * levels, rel=0.02)
    assert floors.dense_bytes(shape, settings) == pytest.approx(2 * 131072 * 32 * 128 * 2, rel=1e-4)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_floors_grow_with_the_shape(entry):
    small, large = (Shape(32, 8, 128, batch, 8192) for batch in (1, 8))
    assert 0 < 8 * entry.moved_bytes(small, Settings()) == entry.moved_bytes(large, Settings())


def test_buffers_are_counted_right():
    layer = new_layer()
    bounds = [each for kind in layer.bounds.values() for each in (kind.page_min, kind.page_max)]
    buffers = [layer.keys, layer.values, *bounds]
    counted = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    assert counted <= layer_bytes(SHAPE, SETTINGS) < 1.1 * counted


def test_layers_are_several_caches_worth_or_what_memory_allows():
    shape, l2 = Shape(32, 8, 128, 1, 32768), 60 << 20
    many = plan_layers(QUEST, shape, Settings(), 100 << 30, l2)
    assert many * floors.step_bytes("int8", shape, Settings()) > 4 * l2
    long = Shape(32, 32, 128, 1, 524288)
    assert plan_layers(QUEST, long, Settings(), 139 * 10**9, l2) == 8
    assert 1 <= plan_layers(QUEST, long, Settings(), 40 << 30, l2) < 8
    assert plan_layers(QUEST, long, Settings(), 10 << 30, l2) == 0


def test_lengths_are_whole_pages():
    with pytest.raises(ValueError, match="length=97; allowed: whole pages of page_size=16"):
        make_layer(Shape(4, 2, 16, 1, 97), SETTINGS, torch.device("cpu"))


def test_filters():
    names = [shape.name for shape in matching_shapes(DECODE_SHAPES, ["q32-kv32", "b32-8K"])]
    assert names == [*(f"q32-kv32-d128-b1-{length}" for length in ("8K", "32K", "128K", "512K")), "q32-kv8-d128-b32-8K"]
    assert matching_shapes(QUICK_DECODE_SHAPES, []) == list(QUICK_DECODE_SHAPES)
    for family in FAMILIES:
        assert set(family.shapes_of(quick=True)) <= set(family.shapes_of(quick=False))
    with pytest.raises(ValueError, match="--shape 'b7' matches none of q32"):
        matching_shapes(DECODE_SHAPES, ["b7"])
    assert {entry.op for entry in registry.matching_entries(["page_bounds"])} == {"page_bounds"}
    with pytest.raises(ValueError, match="--op 'topk' is unknown; known: page_bounds"):
        registry.matching_entries(["topk"])
