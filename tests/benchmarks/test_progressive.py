"""The entries of Progressive Sparse Attention at a tiny shape, checked as before a measurement; and wrong results."""

import pytest
import torch
from op_bench import oracle
from op_bench.measure import check_entry
from op_bench.progressive_entries import PROGRESSIVE, blocks_needed
from op_bench.progressive_workload import make_progressive_layer, progressive_layer_bytes
from op_bench.quest_entries import QUEST
from op_bench.shapes import Settings, Shape

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=16, batch=2, length=1280)
SETTINGS = Settings(token_budget=512)
ENTRIES = {entry.op: entry for entry in PROGRESSIVE.entries}


def new_layer():
    return make_progressive_layer(SHAPE, SETTINGS, torch.device("cpu"), impl="reference")


@pytest.mark.parametrize("entry", PROGRESSIVE.entries, ids=lambda entry: entry.name)
def test_the_reference_passes_and_can_be_repeated(entry):
    layer = new_layer()
    for _ in range(2):
        check_entry(entry, layer, "reference")


def test_the_kernels_pass_too():
    layer = new_layer()
    for name in ("query", "keys", "values", "new_key", "new_value"):
        setattr(layer, name, getattr(layer, name).float())  # Triton's interpreter truncates bfloat16
    check_entry(ENTRIES["psa_step"], layer, "triton")


def test_every_row_and_head_reads_the_budget_of_quest():
    layer = new_layer()
    assert (blocks_needed(layer, layer.block_indices) == SETTINGS.token_budget // 32).all()
    assert set(PROGRESSIVE.shapes) <= set(QUEST.shapes)
    assert set(PROGRESSIVE.quick_shapes) <= set(PROGRESSIVE.shapes)
    for shape in PROGRESSIVE.shapes:
        assert shape.length > Settings().token_budget


def test_a_wrong_order_fails():
    layer = new_layer()
    ENTRIES["rank_blocks"].check(layer, (layer.block_indices, layer.block_counts))
    with pytest.raises(oracle.Mismatch, match=r"rank_blocks: \d+ values of the order differ"):
        ENTRIES["rank_blocks"].check(layer, (layer.block_indices.flip(-1), layer.block_counts))


def test_a_wrong_step_of_ranking_fails():
    layer, check = new_layer(), ENTRIES["append_and_rank"].check
    order, counts = ENTRIES["append_and_rank"].run(layer, "reference")
    check(layer, (order, counts))
    swapped = order[..., [0, *range(order.shape[2] - 1, 0, -1)]]
    for wrong, message in (
        ((order, counts - 1), "counts differ from the reference's"),
        ((order.masked_fill(order == 3, 4), counts), "does not hold every block once"),
        ((order.roll(1, dims=-1), counts), "the newest block is not the first"),
        ((swapped, counts), "scores in order differ from the reference's by"),
    ):
        with pytest.raises(oracle.Mismatch, match=message):
            check(layer, wrong)
    layer.keys[0, 0, -1] += 1
    with pytest.raises(oracle.Mismatch, match="keys do not end with the new token's"):
        check(layer, (order, counts))


def test_another_stop_and_another_output_fail():
    layer = new_layer()
    out, read_counts = ENTRIES["progressive_decode"].run(layer, "reference")
    with pytest.raises(oracle.Mismatch, match="progressive_decode: 4 of 4 rows and heads stop elsewhere"):
        ENTRIES["progressive_decode"].check(layer, (out, read_counts - 8))
    with pytest.raises(oracle.Mismatch, match="output off by"):
        ENTRIES["progressive_decode"].check(layer, (out + 0.1, read_counts))


def test_a_layer_without_the_wanted_stop_fails():
    layer = new_layer()
    layer.query.zero_()  # all blocks weigh the same, so everything is read
    outputs = ENTRIES["progressive_decode"].run(layer, "reference")
    with pytest.raises(oracle.Mismatch, match="workload: not every row and head reads 16 blocks"):
        ENTRIES["progressive_decode"].check(layer, outputs)
    for budget in (500, 1280):
        with pytest.raises(ValueError, match=f"token_budget={budget}; allowed: whole microbatches of 256 tokens"):
            make_progressive_layer(SHAPE, Settings(token_budget=budget), torch.device("cpu"), impl="reference")


def test_buffers_are_counted_right():
    layer = new_layer()
    bounds = [each for kind in layer.bounds.values() for each in (kind.page_min, kind.page_max)]
    buffers = [layer.keys, layer.values, *bounds]
    counted = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    assert counted <= progressive_layer_bytes(SHAPE, SETTINGS) < 1.1 * counted
