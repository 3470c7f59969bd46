"""SelfExtend against its definition in plain loops, its limits, and its effect on a model."""

from dataclasses import replace

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import SelfExtend, SparseCache, patch_model, sparse_attention, sparse_attention_stats
from hf_sparse_attn.rope import RopeTables
from tests.layers import make_layer, step
from tests.methods.rotation import rotate
from tests.models import DEVICE, POSITIONS, ROUNDING, make_model, random_ids, shared_model

HEAD_DIM, KV_HEADS, Q_HEADS = 16, 2, 6
GROUP, SCALE = Q_HEADS // KV_HEADS, 0.25
ANGLES = {"rtol": 1e-4, "atol": 1e-4}
"""Of logits in float64: angles are float32, and other positions of the same distance round otherwise."""
SMALL = SelfExtend(group_size=3, window=10, chunk_size=64)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture(autouse=True)
def exact():
    with use_impl("reference"):
        yield


def attended(query, keys, values, method):
    """The output of a row's last query [q_heads, d], one head and one token at a time; keys [tokens, kv_heads, d]."""
    at, size, window = len(keys) - 1, method.group_size, method.window
    rows = []
    for head in range(Q_HEADS):
        scores = []
        for token in range(at + 1):
            key = keys[token][head // GROUP]
            own, grouped = at - token, at // size - token // size + window - window // size
            # RoPE knows the difference of the positions alone.
            scores.append(rotate(query[head], own if own < window else grouped) @ key)
        weights = (torch.stack(scores) * SCALE).softmax(0)
        rows.append(weights @ torch.stack([value[head // GROUP] for value in values]))
    return torch.stack(rows)


def random_states(heads, tokens, generator):
    return torch.randn(2, heads, tokens, HEAD_DIM, dtype=torch.float64, generator=generator).to(DEVICE)


def listed(states, row, first=0):
    """[heads, tokens, d] of a row, token by token."""
    return list(states[row, :, first:].transpose(0, 1).cpu())


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "static"])
@pytest.mark.parametrize(
    ("parameters", "parts"),
    [
        ({}, [20, 7, 36]),
        ({"group_size": 7, "window": 11}, [63]),
        ({"group_size": 4, "window": 1}, [8, 24, 24]),
        ({"group_size": 1, "window": 5}, [30]),  # the positions of dense attention
        ({"group_size": 5, "window": 12}, [6]),  # within the window at first
    ],
    ids=str,
)
@torch.inference_mode()
def test_prompt_and_steps_follow_the_definition(parameters, parts, max_cache_len):
    """Two rows, the second with left padding that fills the first chunk."""
    method = replace(SMALL, **parameters)
    padding, generator = (0, min(21, sum(parts) - 3)), torch.Generator().manual_seed(1)
    layer = make_layer(method, max_cache_len, Q_HEADS, padding=list(padding))
    layer.use_rope(RopeTables(shared_model("llama").model.rotary_emb, slots=method.rope_slots(POSITIONS)))
    rows = [([], []) for _ in padding]
    fed = 0
    for tokens in parts:
        query, key, value = (random_states(heads, tokens, generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        skipped = max(0, padding[1] - fed)
        for states in (key, value):
            states[1, :, :skipped] = 1000
        layer.update(key, value)
        out = method.prefill(query, layer, SCALE, None)
        for row, first in ((0, 0), (1, min(skipped, tokens))):
            keys, values = rows[row]
            for at in range(first, tokens):
                keys.append(listed(key, row)[at])
                values.append(listed(value, row)[at])
                expected = attended(listed(query, row)[at], keys, values, method)
                torch.testing.assert_close(out[row, :, at].cpu(), expected, **ROUNDING)
        fed += tokens
    for buffer in (layer.keys, layer.values):
        buffer[1, :, : padding[1]] = buffer[:, :, fed + 20 :] = torch.nan
    for _ in range(20):
        query, key, value = (random_states(heads, 1, generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        before = layer.counter.read()
        out = step(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], SCALE)
        for row, (keys, values) in enumerate(rows):
            keys.append(listed(key, row)[0])
            values.append(listed(value, row)[0])
            torch.testing.assert_close(
                out[row].cpu(), attended(listed(query, row)[0], keys, values, method), **ROUNDING
            )
        after = layer.counter.read()
        assert after.decode_steps - before.decode_steps == 1
        assert after.tokens_read - before.tokens_read == KV_HEADS * sum(len(keys) for keys, _ in rows)
        assert after.kv_bytes == after.dense_bytes
        assert after.metadata_bytes == 0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
@torch.inference_mode()
def test_groups_of_one_are_dense_with_every_rope(rope):
    """Both rotations, and in YaRN the factor on both sides, then give the stock model's scores."""
    settings = {"rope_theta": 10_000.0, "original_max_position_embeddings": POSITIONS, **rope}
    model, ids = make_model("llama", dtype=torch.float64, rope_parameters=settings), random_ids(2, 130)
    expected = model(ids).logits
    with sparse_attention(model, "self_extend", group_size=1, window=17, chunk_size=32):
        cache = SparseCache.for_model(model)
        logits = [model(ids[:, :120], past_key_values=cache).logits]
        logits += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(120, 130)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, **ANGLES)


@torch.inference_mode()
def test_chunks_change_nothing_and_groups_do():
    model, ids = shared_model("llama", torch.float64), random_ids(2, 150)
    dense, outputs = model(ids).logits, []
    for chunk_size in (16, 37, 200):
        with sparse_attention(model, replace(SMALL, chunk_size=chunk_size)):
            outputs.append(model(ids).logits)
    torch.testing.assert_close(outputs[1], outputs[0], **ANGLES)
    torch.testing.assert_close(outputs[2], outputs[0], **ANGLES)
    torch.testing.assert_close(outputs[0][:, :10], dense[:, :10], **ANGLES)
    assert (outputs[0][:, 20:] - dense[:, 20:]).abs().max() > 0.1


@pytest.mark.parametrize(("group_size", "window", "limit"), [(4, 16, 208), (1, 16, 64), (8, 64, 64), (8, 63, 64)])
@torch.inference_mode()
def test_prompts_are_as_long_as_the_trained_distances_allow(group_size, window, limit):
    """(64 - 16 + 4) * 4 = 208: then token 207 is 207 // 4 + 12 = 63 from the first."""
    model = make_model("llama", max_position_embeddings=64)
    patch_model(model, "self_extend", group_size=group_size, window=window, chunk_size=50)
    furthest = (limit - 1) // group_size + window - window // group_size if limit > window else limit - 1
    assert furthest <= 63
    assert model.generate(random_ids(2, limit), **GREEDY).shape == (2, limit + 8)
    stats = sparse_attention_stats(model)
    assert stats.kv_bytes == stats.dense_bytes > 0
    with pytest.raises(ValueError, match=rf"the prompt has {limit + 1} tokens, but the model has 64 positions"):
        model.generate(random_ids(1, limit + 1), **GREEDY)


@torch.inference_mode()
def test_steps_stop_at_twice_the_trained_distances():
    model = make_model("llama", max_position_embeddings=32)
    patch_model(model, "self_extend", group_size=2, window=20, chunk_size=8)
    longest = 2 * (2 * 32 - 10)
    cache = model(random_ids(1, 44)).past_key_values
    for at in range(44, longest):
        model(random_ids(1, 1, seed=at), past_key_values=cache)
    with pytest.raises(ValueError, match=rf"{longest + 1} tokens exceed the {longest} that group_size=2 and window=20"):
        model(random_ids(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == longest


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"dense_layers": 1}, "dense_layers must be 0"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        SelfExtend(**parameters)


def test_models_that_it_cannot_serve_are_refused():
    with pytest.raises(TypeError, match=r"window must be a whole number, got 2\.5"):
        SelfExtend(window=2.5)
    model = make_model("llama")
    with pytest.raises(ValueError, match="window must be at most the model's 512 positions, got 513"):
        patch_model(model, "self_extend", window=513)
    model = make_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="rope_type='dynamic' does not allow"):
        patch_model(model, "self_extend", window=16)
