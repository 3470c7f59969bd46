"""TokenSelect's entries at tiny shapes, checked as before a measurement; and results that fail the checks."""

from dataclasses import replace

import pytest
import torch
from op_bench import dense_chunk, oracle, token_floors, token_oracle
from op_bench.measure import check_entry
from op_bench.registry import CHUNK_STEP, TOKEN_STEPS, matching_entries
from op_bench.shapes import CHUNK_SHAPES, TOKEN_DECODE_SHAPES, Settings, Shape
from op_bench.token_entries import TOKEN_CHUNK, TOKEN_DECODE
from op_bench.token_workload import make_token_layer, rotated, token_layer_bytes

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=16, batch=2, length=96)
CHUNK = replace(SHAPE, queries=8)
SETTINGS = Settings(sink_tokens=4, voted_tokens=16, recent_tokens=8)
BY_FAMILY = [(entry, SHAPE) for entry in TOKEN_DECODE.entries] + [(entry, CHUNK) for entry in TOKEN_CHUNK.entries]
NAMES = [entry.name for entry, _ in BY_FAMILY]


def new_layer(shape=SHAPE):
    return make_token_layer(shape, SETTINGS, torch.device("cpu"), impl="reference")


def entry_of(op, variant):
    [found] = [entry for entry in matching_entries([op]) if entry.variant == variant]
    return found


@pytest.mark.parametrize(("entry", "shape"), BY_FAMILY, ids=NAMES)
def test_the_reference_passes_and_can_be_repeated(entry, shape):
    layer = new_layer(shape)
    for _ in range(2):
        check_entry(entry, layer, "reference")


@pytest.mark.parametrize(
    ("step", "shape"), [(TOKEN_STEPS[0], SHAPE), (TOKEN_STEPS[1], SHAPE), (CHUNK_STEP, CHUNK)], ids=str
)
def test_the_kernels_pass_too(step, shape, monkeypatch):
    layer = new_layer(shape)
    for name in ("query", "new_key", "new_value", "keys", "values", "voting", "cached_query"):
        setattr(layer, name, getattr(layer, name).float())  # Triton's interpreter truncates bfloat16
    monkeypatch.setattr(token_floors, "DTYPE", torch.float32)  # by which the bytes read are checked
    check_entry(entry_of(*step), layer, "triton")


def test_a_selection_by_other_votes_fails_but_a_tie_passes():
    layer = new_layer()
    votes, _ = token_oracle.soft_votes(layer.voting, layer)
    indices, counts = layer.block_indices.clone(), layer.block_counts
    token_oracle.check_votes(indices, counts, layer.voting, layer)
    chosen = indices[0, 0, 4:-8] - 4
    weakest = chosen[votes[0, chosen.long()].argmin()]
    left_out = next(token for token in votes[0].argsort(descending=True).tolist() if token not in chosen.tolist())
    indices[0, 0] = torch.where(indices[0, 0] == weakest + 4, left_out + 4, indices[0, 0]).sort()[0]
    with pytest.raises(oracle.Mismatch, match=r"a token left out has .* more votes than one chosen"):
        token_oracle.check_votes(indices, counts, layer.voting, layer)
    layer.keys[0, :, left_out + 4] = layer.keys[0, :, weakest + 4]  # the two now have the same votes
    token_oracle.check_votes(indices, counts, layer.voting, layer)


def test_malformed_selections_fail():
    layer = new_layer()
    indices, counts = layer.block_indices, layer.block_counts
    for wrong, message in (
        (indices.flip(-1), "not ascending"),
        (indices[..., :-1], "not 28 tokens in every row"),
        ((indices + 1).clamp(max=95), "not ascending|not the first 4 and the last 8"),
    ):
        with pytest.raises(oracle.Mismatch, match=message):
            token_oracle.check_votes(wrong, counts, layer.voting, layer)
    with pytest.raises(oracle.Mismatch, match="not 28 tokens in every row"):
        token_oracle.check_votes(indices, counts - 1, layer.voting, layer)
    with pytest.raises(oracle.Mismatch, match="not the cached tokens"):
        token_oracle.check_kept_choice(indices, counts, layer)


@pytest.mark.parametrize("shape", [SHAPE, CHUNK], ids=["step", "chunk"])
def test_wrong_voting_queries_fail(shape):
    layer = new_layer(shape)
    token_oracle.check_voting(layer.voting, layer)
    for wrong in (layer.voting + 0.05, torch.full_like(layer.voting, float("nan"))):
        with pytest.raises(oracle.Mismatch, match="voting query"):
            token_oracle.check_voting(wrong, layer)


@pytest.mark.parametrize("shape", [SHAPE, CHUNK], ids=["step", "chunk"])
def test_attention_without_rotation_by_slot_fails(shape):
    layer = new_layer(shape)
    entry = entry_of("rope_sparse_decode" if shape is SHAPE else "sparse_prefill", "")
    layer.cos, cos = torch.ones_like(layer.cos), layer.cos
    outputs = entry.run(layer, "reference")
    layer.cos = cos
    with pytest.raises(oracle.Mismatch, match="output off by"):
        token_oracle.check_sparse_output(*outputs, layer, layer.block_indices, layer.block_counts)


def test_attention_of_a_chunk_equals_that_of_its_tokens():
    layer = new_layer(CHUNK)
    chunk = token_oracle.chunk_attention(layer.query, layer.keys, layer.values, torch.float32)
    for token in range(CHUNK.queries):
        end = CHUNK.length - CHUNK.queries + token + 1
        one = oracle.attention(
            layer.query[:, :, token], layer.keys[:, :, :end], layer.values[:, :, :end], torch.float32
        )
        torch.testing.assert_close(chunk[:, :, token], one)
    token_oracle.check_dense_chunk(chunk, layer)
    with pytest.raises(oracle.Mismatch, match="output off by"):
        token_oracle.check_dense_chunk(chunk, layer, is_causal=False)


def test_parts_of_a_chunk_s_attention_are_merged():
    layer = new_layer(CHUNK)
    cut, scale = layer.choice_length, CHUNK.head_dim**-0.5
    query, keys, values = (each.double() for each in (layer.query, layer.keys, layer.values))
    grouped = query.unflatten(1, (CHUNK.kv_heads, -1)).flatten(2, 3)
    parts = []
    for span in (slice(0, cut), slice(cut, None)):
        scores = grouped @ keys[:, :, span].mT * scale
        output = scores.softmax(dim=-1) @ values[:, :, span]
        parts += [output.view(query.shape), scores.logsumexp(dim=-1).view(query.shape[:3])]
    whole = token_oracle.chunk_attention(query, keys, values, torch.float64, is_causal=False)
    torch.testing.assert_close(dense_chunk.merged(*parts).float(), whole)


def test_rotation_keeps_products_of_equal_distances():
    layer = new_layer()
    at_3, at_5, at_8 = (rotated(layer.query, layer.cos[slot], layer.sin[slot]) for slot in (3, 5, 8))
    at_0, at_2 = (rotated(layer.new_key, layer.cos[slot], layer.sin[slot]).repeat_interleave(3, 1) for slot in (0, 2))
    torch.testing.assert_close((at_3 * at_0).sum(-1), (at_5 * at_2).sum(-1))
    assert not torch.allclose((at_3 * at_0).sum(-1), (at_8 * at_0).sum(-1))


# Every key once, 2,688 values, and with 28/4 heads at a million tokens the goal's floor of about 0.25 ms.
def test_moved_bytes_of_the_steps():
    shape, settings = Shape(28, 4, 128, 1, 1 << 20), Settings()
    keys = (1 << 20) * 4 * 128 * 2
    assert keys < token_floors.step_bytes(shape, settings) < 1.005 * keys
    assert keys < token_floors.chunk_bytes(replace(shape, queries=512), settings) < 1.02 * keys
    assert token_floors.kept_step_bytes(shape, settings) < 0.01 * keys
    assert token_floors.vote_bytes(shape, settings) == keys - 640 * 4 * 128 * 2


@pytest.mark.parametrize(("entry", "shape"), BY_FAMILY, ids=NAMES)
def test_floors_grow_with_the_batch_but_for_the_tables(entry, shape):
    small, large = (Shape(32, 8, 128, batch, 8192, shape.queries) for batch in (1, 8))
    assert 0 < entry.moved_bytes(small, Settings()) < entry.moved_bytes(large, Settings())
    assert entry.moved_bytes(large, Settings()) <= 8 * entry.moved_bytes(small, Settings())


def test_buffers_are_counted_right():
    for shape in (SHAPE, CHUNK):
        layer = new_layer(shape)
        buffers = [each for each in vars(layer).values() if isinstance(each, torch.Tensor)]
        counted = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        assert counted == pytest.approx(token_layer_bytes(shape, SETTINGS), rel=0.15)


def test_shapes_leave_something_out():
    for shape in (*TOKEN_DECODE_SHAPES, *CHUNK_SHAPES):
        assert shape.length - shape.queries > Settings().max_tokens
    assert "q28-kv4-d128-b1-c512-1M" in {shape.name for shape in CHUNK_SHAPES}
    assert "q28-kv4-d128-b1-1M" in {shape.name for shape in TOKEN_DECODE_SHAPES}
    with pytest.raises(ValueError, match="length=28; allowed: more tokens to choose from than 28"):
        make_token_layer(Shape(6, 2, 16, 1, 28), SETTINGS, torch.device("cpu"))
