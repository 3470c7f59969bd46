"""The entries of `keep_chosen` at a tiny shape: checks that pass and that fail."""

import pytest
import torch
from op_bench import oracle
from op_bench.keep_entries import KEPT, VARIANTS, make_kept_layer
from op_bench.measure import check_entry
from op_bench.shapes import Settings, Shape

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=80, batch=1, length=640)
SETTINGS = Settings(token_budget=160)


def new_layer():
    return make_kept_layer(SHAPE, SETTINGS, torch.device("cpu"))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("measured", KEPT.entries, ids=lambda entry: entry.variant)
def test_two_steps_pass_and_can_be_repeated(measured, impl):
    layer = new_layer()
    if impl == "triton":  # Triton's interpreter truncates bfloat16
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
        for slots in layer.slots.values():
            slots |= {name: slots[name].float() for name in ("kept_keys", "kept_values")}
    for _ in range(2):
        check_entry(measured, layer, impl)


def test_steps_share_all_blocks_but_the_new_ones():
    layer = new_layer()
    for choice, (first, second) in layer.chosen.items():
        for head in range(2):
            shared = set(first[0, head].tolist()) & set(second[0, head].tolist())
            assert len(shared) == choice.count(SETTINGS) - choice.count_new(SETTINGS)
    assert [choice.count_new(SETTINGS) for choice in VARIANTS] == [16, 48, 1]
    assert KEPT.entries[0].moved_bytes(SHAPE, SETTINGS) == 2 * 2 * 16 * 2 * 80 * 2


@pytest.mark.parametrize("measured", KEPT.entries, ids=lambda entry: entry.variant)
def test_wrong_tokens_fail(measured):
    layer = new_layer()
    layer.spoil()
    outputs = measured.run(layer, "reference")
    measured.check(layer, outputs)
    for slots in layer.slots.values():
        slots["kept_values"][0, 1] += 1
    with pytest.raises(oracle.Mismatch, match="of the kept values are not those of the chosen tokens"):
        measured.check(layer, outputs)
