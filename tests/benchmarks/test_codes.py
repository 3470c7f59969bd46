"""The entries of the key codes at a tiny shape, checked as before a measurement; and wrong results."""

from dataclasses import replace

import pytest
import torch
from hf_sparse_attn_kernels.codes import reference_encode
from op_bench import oracle
from op_bench.code_entries import CODES
from op_bench.code_workload import SPARE_PAGES, code_bytes, code_layer_bytes, make_code_layer
from op_bench.measure import check_entry
from op_bench.rabitqcache_entries import RABITQCACHE
from op_bench.shapes import Settings, Shape

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=16, batch=2, length=640)
SETTINGS = Settings(code_budget=128)
ENTRIES = {(entry.op, entry.variant): entry for entry in CODES.entries}


def new_layer():
    return make_code_layer(SHAPE, SETTINGS, torch.device("cpu"), impl="reference")


@pytest.mark.parametrize("entry", CODES.entries, ids=lambda entry: entry.name)
def test_the_reference_passes_and_can_be_repeated(entry):
    layer = new_layer()
    for _ in range(2):
        check_entry(entry, layer, "reference")


@pytest.mark.parametrize("group_reduce", ["max", "softmax"])
def test_the_kernels_pass_too(group_reduce):
    layer = new_layer()
    for name in ("query", "new_key", "new_value", "keys", "values"):
        setattr(layer, name, getattr(layer, name).float())  # Triton's interpreter truncates bfloat16
    check_entry(ENTRIES["encode_keys", "one page"], layer, "triton")
    check_entry(ENTRIES["keycodes_step", group_reduce], layer, "triton")
    check_entry(ENTRIES["select_tokens_by_mass", ""], layer, "triton")


STEP = RABITQCACHE.entries[0]
LONGER = replace(SHAPE, length=1280)


def new_rabitqcache_layer(impl="reference"):
    return RABITQCACHE.make_layer(LONGER, Settings(code_budget=512), torch.device("cpu"), impl=impl)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_step_of_rabitqcache_passes_and_can_be_repeated(impl):
    layer = new_rabitqcache_layer()
    if impl == "triton":
        for name in ("query", "new_key", "new_value", "keys", "values"):
            setattr(layer, name, getattr(layer, name).float())  # Triton's interpreter truncates bfloat16
    for _ in range(2):
        check_entry(STEP, layer, impl)


def test_wrong_steps_of_rabitqcache_fail():
    layer = new_rabitqcache_layer()
    STEP.prepare(layer)
    out, indices, counts = STEP.run(layer, "reference")
    STEP.check(layer, (out, indices, counts))
    with pytest.raises(oracle.Mismatch, match="select_tokens_by_mass: 1 of the indices differ"):
        STEP.check(layer, (out, indices.index_put((torch.tensor(0),) * 3, torch.tensor(-5, dtype=torch.int32)), counts))
    with pytest.raises(oracle.Mismatch):
        STEP.check(layer, (out + 0.1, indices, counts))
    layer.keys[1, 1, -1, 0] += 1
    with pytest.raises(oracle.Mismatch, match="keys do not end with the new token's"):
        STEP.check(layer, (out, indices, counts))


def test_the_bytes_of_one_centre_are_counted_right():
    layer = new_rabitqcache_layer()
    metadata = sum(tensor[:, :, :1280].numel() * tensor.element_size() for tensor in layer.codes.values())
    tokens = 2 * 2 * 512 * 2 * 16 * 2  # of 512 tokens of a KV head, keys and values
    per_token = 16 // 8 + 4
    scanned = metadata - 2 * 2 * (2 * 128 * per_token)  # all but the first page and the newest
    assert STEP.moved_bytes(LONGER, Settings(code_budget=512)) - scanned == pytest.approx(tokens, rel=0.1)


def _encode_with(layer, monkeypatch, **changes):
    """Code the layer's prompt with parts of the reference replaced, as an implementation that rounds otherwise."""
    for name, change in changes.items():
        original = getattr(reference_encode, name)
        monkeypatch.setattr(
            reference_encode, name, lambda *args, original=original, change=change: change(*original(*args))
        )
    layer.encode(0, None, "reference")
    monkeypatch.undo()


@pytest.mark.parametrize("bits", [1, 2])
def test_wrong_codes_fail(bits):
    entry = ENTRIES["encode_keys", "prompt"]

    def fails(message, name, at, change):
        layer = make_code_layer(SHAPE, replace(SETTINGS, code_bits=bits), torch.device("cpu"), impl="reference")
        entry.check(layer, ())
        layer.codes[name][at] = change(layer.codes[name][at])
        with pytest.raises(oracle.Mismatch, match=message):
            entry.check(layer, ())

    wrong = "encode_keys: {} of the {} {} of KV head 1 of row {} are wrong".format
    fails(wrong(1, 10240, "codes", 1), "codes", (1, 1, 77, bits - 1, 0), lambda code: code ^ 1)
    fails(wrong(1, 1280, "factors", 0), "factors", (0, 1, 3, 0), lambda factor: factor * 1.002)
    fails(wrong(1, 1280, "factors", 0), "factors", (0, 1, 3, 1), lambda offset: offset + 1e-3)
    fails(wrong(1, 1280, "factors", 0), "factors", (0, 1, 3, 1), lambda offset: offset * float("nan"))
    fails(wrong(1, 160, "centres", 0), "centres", (0, 1, 9, 3), lambda level: level + 1 - 2 * (level == 127))
    fails(wrong(1, 10, "centre_scale", 1), "centre_scale", (1, 1, 4), lambda scale: scale * 1.01)
    layer = new_layer()
    layer.coded -= 1
    with pytest.raises(oracle.Mismatch, match="not all pages are counted"):
        entry.check(layer, ())


def test_rounding_may_decide_what_lies_on_a_border(monkeypatch):
    entry, layer = ENTRIES["encode_keys", "prompt"], new_layer()
    before = {name: tensor.clone() for name, tensor in layer.codes.items()}
    up = torch.tensor(float("inf"), dtype=torch.float16)

    def next_scale(_, scale):
        scale = torch.nextafter(scale, up)
        levels = layer.keys.double().unflatten(2, (-1, SETTINGS.code_page)).mean(dim=3) / scale[..., None]
        return (levels + 0.5).floor(), scale

    _encode_with(layer, monkeypatch, centre_of=next_scale)
    assert (layer.codes["centre_scale"] != before["centre_scale"]).all()
    assert (layer.codes["factors"] != before["factors"]).any(dim=2).all()
    entry.check(layer, ())
    # Off by a thousandth of their length: codes near a border differ, and this is more than rounding.
    _encode_with(layer, monkeypatch, residuals_of=lambda r, u, squares: (r, u + 1e-3 * squares.sqrt(), squares))
    with pytest.raises(oracle.Mismatch, match=r"encode_keys: \d+ of the 10240 codes of KV head 0 of row 0 are wrong"):
        entry.check(layer, ())
    # Off by less than that of float32: the codes and factors are right, whichever sign a channel near 0 has.
    _encode_with(layer, monkeypatch, residuals_of=lambda r, u, squares: (r, u + 5e-6 * squares.sqrt(), squares))
    entry.check(layer, ())


def test_wrong_scores_and_choices_fail():
    layer = new_layer()
    entry = ENTRIES["code_scores", "softmax"]
    with pytest.raises(oracle.Mismatch, match="code_scores: KV head 0 is off by"):
        entry.check(layer, (entry.run(layer, "reference")[0] + 0.1,))
    with pytest.raises(oracle.Mismatch, match="code_scores: the newest page has scores"):
        entry.check(layer, (entry.run(layer, "reference")[0].clamp(min=-99),))
    for group_reduce in ("max", "softmax"):
        entry = ENTRIES["keycodes_step", group_reduce]
        for message, head, slots, tokens in (
            ("not as many tokens", 0, slice(0, 2), [1, 0]),
            ("tokens that are always read", 0, slice(-64, None), range(575, 639)),
            ("a token that scores higher", 1, slice(4, 64), range(4, 64)),
            ("tokens that no row has", 0, slice(4, 128), [*range(517, 640), 640]),
        ):
            layer.counter.zero_()
            out, indices, counts = entry.run(layer, "reference")
            indices[1, head, slots] = torch.tensor(tokens, dtype=torch.int32)
            with pytest.raises(oracle.Mismatch, match=f"append_and_select_tokens: {message}"):
                entry.check(layer, (out, indices, counts))
    for op in ("select_tokens_by_score", "select_tokens_by_mass"):
        entry = ENTRIES[op, ""]
        indices, counts = entry.run(layer, "reference")
        with pytest.raises(oracle.Mismatch, match=rf"{op}: \d+ of the indices differ"):
            entry.check(layer, (indices + 1, counts))


def test_a_layer_that_would_be_read_whole_fails():
    for length in (600, 1024):
        shape = Shape(q_heads=2, kv_heads=1, head_dim=16, batch=1, length=length)
        with pytest.raises(ValueError, match=f"length={length}; allowed: whole pages of 64, above 1024 tokens"):
            make_code_layer(shape, Settings(), torch.device("cpu"), impl="reference")


def test_buffers_and_bytes_are_counted_right():
    layer = new_layer()
    metadata = sum(tensor.numel() * tensor.element_size() for tensor in layer.codes.values())
    assert metadata == code_bytes(SHAPE, SETTINGS, 10 + SPARE_PAGES)
    counted = metadata + sum(buffer.numel() * buffer.element_size() for buffer in (layer.keys, layer.values))
    assert counted == code_layer_bytes(SHAPE, SETTINGS)
    shape = Shape(32, 8, 128, 1, 131072)
    of_kind = {name: entry.moved_bytes(shape, Settings()) for name, entry in ENTRIES.items()}
    keys = 131072 * 8 * 128 * 2
    assert of_kind["code_scores", "max"] == pytest.approx(keys * 24 / 256, rel=0.01)
    assert of_kind["keycodes_step", "max"] == pytest.approx(keys * 22 / 256 + 2 * 1024 * 8 * 256, rel=0.02)
    assert of_kind["encode_keys", "prompt"] == pytest.approx(keys * (1 + 22 / 256), rel=0.01)
