"""The entries of the loads from host memory at a tiny shape: checks that pass and that fail, and the table."""

import pytest
import torch
from op_bench import load_entries, oracle
from op_bench.load_entries import LOADS, VARIANTS, Blocks, make_host_layer
from op_bench.load_tables import load_part
from op_bench.measure import check_entry
from op_bench.shapes import Settings, Shape

from tests.benchmarks.records import SHORT, entry, report

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=80, batch=1, length=320)
SETTINGS = Settings(token_budget=160)


def new_layer():
    return make_host_layer(SHAPE, SETTINGS, torch.device("cpu"))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("blocks", VARIANTS, ids=lambda blocks: blocks.name)
def test_a_load_passes_and_can_be_repeated(blocks, impl):
    layer = new_layer()
    if impl == "triton":  # Triton's interpreter truncates bfloat16
        layer.pool, layer.host = layer.pool.float(), layer.host.float()
    (measured,) = [each for each in LOADS.entries if each.variant == blocks.name]
    for _ in range(2):
        check_entry(measured, layer, impl)
    moved = 2 * blocks.count(SHAPE, SETTINGS) * blocks.size * 80 * 2
    assert measured.moved_bytes(SHAPE, SETTINGS) == moved
    assert int((~layer.pool.isnan()).sum()) * 2 == moved


def test_variants_load_the_budget_or_a_tenth_of_it():
    assert [blocks.count(SHAPE, SETTINGS) for blocks in VARIANTS] == [10, 20, 320, 1]
    names = ["blocks of 32", "blocks of 16", "single tokens", "blocks of 32, 10% of them"]
    assert [measured.variant for measured in LOADS.entries] == names
    assert LOADS.layer_bytes(SHAPE, SETTINGS) == new_layer().pool.nbytes


def test_blocks_lie_apart_on_the_host_and_in_the_pool():
    layer = new_layer()
    for blocks, (slots, first) in layer.chosen.items():
        assert len(slots.unique()) == len(first.unique()) == blocks.count(SHAPE, SETTINGS)
        assert not (first % blocks.size).any()
        assert first.max() + blocks.size <= len(layer.host[0])


def test_wrong_loads_fail():
    blocks = Blocks(32, 0.1)
    (measured,) = [each for each in LOADS.entries if each.variant == blocks.name]
    layer = new_layer()
    check_entry(measured, layer, "reference")
    slots, _ = layer.chosen[blocks]
    layer.of_size(blocks)[1, slots[0], 5, 79] += 1
    with pytest.raises(oracle.Mismatch, match="load_blocks: 1 of 32 tokens of the values are not the host's"):
        measured.check(layer, ())
    check_entry(measured, layer, "reference")
    layer.of_size(blocks)[0, (slots[0] + 1) % 10, 0, 0] = 0.0
    with pytest.raises(oracle.Mismatch, match="load_blocks: keys of other blocks were written"):
        measured.check(layer, ())
    layer.spoil()
    with pytest.raises(oracle.Mismatch, match="load_blocks: 32 of 32 tokens of the keys"):
        measured.check(layer, ())


def test_a_budget_that_is_not_whole_blocks_fails():
    with pytest.raises(ValueError, match="300 tokens of a step; allowed: whole blocks of 32"):
        make_host_layer(SHAPE, Settings(token_budget=150), torch.device("cpu"))


def test_the_table_compares_with_the_copy_engine_of_the_same_run():
    loads = report(entry(SHORT, 100.0, 20.0, "load_blocks", "blocks of 16"), entry(SHORT, 10.0, 20.0))
    assert load_part(report(entry(SHORT, 10.0, 20.0))) == []
    loads["machine"]["host_copy_bytes_per_second"] = 10e9
    loads["entries"][0]["machine"] = {"host_copy_bytes_per_second": 50e9}
    *_, text = load_part(loads)
    assert text.splitlines()[-1] == "| 32/8 | 128 | 1 | 8K | blocks of 16 | 4.27 | 100.0 | 42.7 | 50.0 | 85 |"
    assert len(text.splitlines()) == 3


def test_tokens_of_all_heads_are_counted():
    assert load_entries.pool_tokens(SHAPE, SETTINGS) == 2 * 160
