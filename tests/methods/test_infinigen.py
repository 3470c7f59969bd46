"""InfiniGen against its definition in plain loops, its rehearsed queries, and its effect on a model."""

import math
from dataclasses import replace

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import InfiniGen, SparseCache, patch_model, record_selections, sparse_attention, unpatch_model
from hf_sparse_attn.methods.infinigen import heaviest_columns
from tests.layers import hand_over, make_layer
from tests.methods.rotation import rotate
from tests.models import DEVICE, FAMILIES, ROUNDING, make_model, random_ids, shared_model

HEAD_DIM, KV_HEADS, Q_HEADS, SCALE = 16, 2, 6, 0.25
GROUP = Q_HEADS // KV_HEADS
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture(autouse=True)
def exact():
    with use_impl("reference"):
        yield


def random_states(heads, tokens, generator, batch=2):
    states = torch.randn(batch, heads, tokens, HEAD_DIM, dtype=torch.float64, generator=generator)
    return (states * torch.linspace(0.2, 3, HEAD_DIM).double()).to(DEVICE)


def columns_of(queries, keys, channels):
    """The paper's columns of a KV head: queries [n, d] of its group and keys [tokens, d], by an SVD of the queries."""
    _, _, vectors = torch.linalg.svd(queries, full_matrices=True)
    weights = [
        float(sum(abs(query @ column) for query in queries) / len(queries))
        + float(sum(abs(key @ column) for key in keys) / len(keys))
        for column in vectors
    ]
    chosen = sorted(range(len(vectors)), key=lambda number: -weights[number])[:channels]
    return vectors[chosen].T


def expected_selection(query, keys, columns, method):
    """Tokens a row reads: query [q_heads, d], keys [tokens, kv_heads, d], columns [d, channels] of each KV head."""
    estimates = [
        [float((query[head] @ columns[head // GROUP]) @ (key[head // GROUP] @ columns[head // GROUP])) for key in keys]
        for head in range(Q_HEADS)
    ]
    estimates = [[SCALE * estimate for estimate in head] for head in estimates]
    important = sum(sum(each >= max(head) - method.alpha for each in head) for head in estimates) // Q_HEADS
    most = max(1, int(len(keys) * method.max_share))
    if method.token_budget is not None:
        most = min(most, method.token_budget)
    number, chosen = min(important, most, len(keys)), []
    for kv_head in range(KV_HEADS):
        group = estimates[kv_head * GROUP : (kv_head + 1) * GROUP]
        totals = [sum(math.exp(head) for head in heads) for heads in group]
        shares = [
            sum(math.exp(head[at]) / total for head, total in zip(group, totals, strict=True))
            for at in range(len(keys))
        ]
        chosen.append(sorted(sorted(range(len(keys)), key=lambda at: -shares[at])[:number]))
    return chosen


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "static"])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"alpha": 0.5},
        {"alpha": 40.0},  # the share decides
        {"alpha": 40.0, "token_budget": 7},
        {"channel_share": 1.0},
        {"calibration_queries": 9},  # fewer than a head's channels, but not than those of its group
        {"alpha": math.inf, "max_share": 1.0},
    ],
    ids=str,
)
@torch.inference_mode()
def test_steps_follow_the_definition(parameters, max_cache_len, monkeypatch):
    """Two rows, the second with left padding, of NaN where it must not be read."""
    selected, stock = [], InfiniGen.attend

    def attend(self, query, layer, selection, scale):
        selected.append(selection)
        return stock(self, query, layer, selection, scale)

    monkeypatch.setattr(InfiniGen, "attend", attend)
    method = replace(InfiniGen(alpha=2.0, max_share=0.3), **parameters)
    generator, lengths, padding = torch.Generator().manual_seed(2), [63, 44], [0, 19]
    layer = make_layer(method, max_cache_len, Q_HEADS, padding=padding)
    query, key, value = (random_states(heads, 63, generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    for states in (query, key, value):
        states[1, :, :19] = torch.nan
    layer.update(key, value)
    layer.observe(query, SCALE)
    method.finish_prompt([layer])
    channels = max(1, int(HEAD_DIM * method.channel_share))
    columns, keys = [], []
    for row, length in enumerate(lengths):
        known = query[row, :, -min(length, method.calibration_queries) :].cpu()
        columns.append(
            [
                columns_of(
                    known[head * GROUP : (head + 1) * GROUP].flatten(0, 1), key[row, head, -length:].cpu(), channels
                )
                for head in range(KV_HEADS)
            ]
        )
        keys.append(list(key[row, :, -length:].transpose(0, 1).cpu()))
    numbers = set()
    for _ in range(12):
        rehearsed, new_query, new_key, new_value = (
            random_states(heads, 1, generator)[:, :, 0] for heads in (Q_HEADS, Q_HEADS, KV_HEADS, KV_HEADS)
        )
        hand_over(layer, new_key, new_value)
        layer.rehearsed_query = rehearsed
        selected.clear()
        before = layer.counter.read()
        assert method.decode(new_query, layer, new_key, new_value, SCALE).isfinite().all()
        layer.mark_written()
        (selection,) = selected
        for row in range(2):
            keys[row].append(new_key[row].cpu())
            expected = expected_selection(rehearsed[row].cpu(), keys[row], columns[row], method)
            for head in range(KV_HEADS):
                count = int(selection.block_counts[row, head])
                indices = selection.block_indices[row, head].tolist()
                assert sorted(indices[:count]) == expected[head]
                assert set(indices[count:]) <= {-1}
            numbers.add(len(expected[0]))
        read = layer.counter.read().metadata_bytes - before.metadata_bytes
        tokens = sum(map(len, keys)) * KV_HEADS
        assert read == 8 * channels * (tokens + 2 * KV_HEADS * HEAD_DIM)
    assert len(numbers) > 1 or method.token_budget is not None or method.alpha == 0.5


def test_columns_without_queries_are_those_of_the_keys_and_orthonormal():
    generator = torch.Generator().manual_seed(3)
    keys = random_states(KV_HEADS, 50, generator, batch=1)[0]
    columns = heaviest_columns(keys, None, 5)
    identity = torch.eye(5, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(columns.transpose(1, 2) @ columns, identity.expand(KV_HEADS, -1, -1))
    for head in range(KV_HEADS):
        expected = columns_of(keys[head].cpu(), keys[head].cpu(), 5)
        torch.testing.assert_close(columns[head].cpu() @ columns[head].cpu().T, expected @ expected.T)


def test_directions_without_queries_are_ordered_by_the_keys():
    """With fewer queries than channels an SVD leaves the other directions open: they are not the processor's choice."""
    generator = torch.Generator().manual_seed(4)
    keys, queries = random_states(1, 60, generator, batch=1)[0], random_states(1, 3, generator, batch=1)[0]
    chosen = heaviest_columns(keys, queries, 8)
    turn = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, dtype=torch.float64, generator=generator)).Q.to(DEVICE)
    turned = heaviest_columns(keys @ turn, queries @ turn, 8)
    span = turn.T @ (chosen @ chosen.transpose(1, 2)) @ turn
    torch.testing.assert_close(turned @ turned.transpose(1, 2), span, rtol=1e-4, atol=1e-4)


def expected_queries(model, states, position):
    """Each layer's query of the previous attention's input, by its weights: ``states`` are the attentions' inputs."""
    queries = {}
    for layer_idx, layer in enumerate(model.model.layers[1:], start=1):
        attention = layer.self_attn
        query = (states[layer_idx - 1] @ attention.q_proj.weight.T)[:, 0]
        if attention.q_proj.bias is not None:
            query = query + attention.q_proj.bias
        query = query.view(len(query), -1, HEAD_DIM)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        queries[layer_idx] = rotate(query.cpu(), position)
    return queries


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_layers_rehearse_with_the_input_of_the_attention_before(family, monkeypatch):
    model = shared_model(family, torch.float64)
    ids, inputs, seen = random_ids(2, 90), {}, {}
    select = InfiniGen.select

    def watched(self, query, layer, scale):
        seen[layer.layer_idx] = layer.rehearsed_query.cpu()
        return select(self, query, layer, scale)

    monkeypatch.setattr(InfiniGen, "select", watched)
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda module, args, output, at=at: inputs.__setitem__(at, output))
        for at, layer in enumerate(model.model.layers)
    ]
    with sparse_attention(model, "infinigen"):
        cache = model(ids[:, :-1]).past_key_values
        model(ids[:, -1:], past_key_values=cache)
        assert cache.attention_input is None
        assert all(layer.rehearsed_query is None for layer in cache.layers)
    for hook in hooks:
        hook.remove()
    expected = expected_queries(model, inputs, 89)
    assert set(seen) == {1, 2, 3}
    for layer_idx, query in seen.items():
        torch.testing.assert_close(query, expected[layer_idx], **ROUNDING)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


@torch.inference_mode()
def test_a_rehearsal_with_the_own_input_finds_the_tokens_that_score_highest(monkeypatch):
    """With every column, and the layer's own query rehearsed, the choice is that of exact scores."""
    model = shared_model("llama", torch.float64)
    monkeypatch.setattr("hf_sparse_attn.patch.patch.rehearse", rehearse_with_own_input)
    ids, records = random_ids(2, 150), []
    for method, parameters in (
        ("infinigen", {"alpha": math.inf, "max_share": 0.1, "channel_share": 1.0}),
        ("oracle_topk", {"token_budget": 15, "dense_layers": 1}),
    ):
        with sparse_attention(model, method, **parameters), record_selections(model) as record:
            cache = model(ids).past_key_values
            model(ids[:, :1], past_key_values=cache)
        records.append(record)
    for row in range(2):
        for layer in range(1, 4):
            reads = [record.reads(layer, step=0, row=row) for record in records]
            assert torch.equal(*reads)
            assert reads[0].sum(1).tolist() == [15, 15]


def rehearse_with_own_input(module, args, kwargs):
    from hf_sparse_attn.patch.rehearsal import query_of

    layer = kwargs["sparse_cache"].layers[module.layer_idx]
    if kwargs["hidden_states"].shape[1] == 1 and module.layer_idx:
        layer.rehearsed_query = query_of(module, kwargs["hidden_states"], kwargs["position_embeddings"])


@torch.inference_mode()
def test_a_failed_step_leaves_no_input_behind():
    model, ids = make_model("llama"), random_ids(1, 80)
    patch_model(model, "infinigen")
    cache = SparseCache.for_model(model)
    model(ids[:, :70], past_key_values=cache)
    hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, :1], past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 70
    cache.recover()
    assert cache.attention_input is None
    assert all(layer.rehearsed_query is None for layer in cache.layers)
    unpatch_model(model)


@torch.inference_mode()
def test_keys_in_host_memory_give_the_same_tokens():
    model, ids = make_model("llama"), random_ids(2, 150)
    outputs = []
    for kv_storage in ("device", "host"):
        with sparse_attention(model, "infinigen", alpha=2.0, kv_storage=kv_storage):
            outputs.append(model.generate(ids, **GREEDY))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dense_layers": 0}, "dense_layers must be at least 1: nothing comes before the first layer, got 0"),
        ({"token_budget": 0}, "token_budget must be None, or at least 1, got 0"),
        ({"alpha": -1}, "alpha must be 0 or more, got -1"),
        ({"alpha": math.nan}, "alpha must be 0 or more, got nan"),
        ({"max_share": 0}, "max_share must be above 0 and at most 1, got 0"),
        ({"max_share": 1.5}, "max_share must be above 0 and at most 1"),
        ({"channel_share": 0.0}, "channel_share must be above 0 and at most 1"),
        ({"calibration_queries": 0}, "calibration_queries must be at least 1"),
        ({"group_reduce": "sum"}, "group_reduce must be one of softmax, mean, max, got 'sum'"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        InfiniGen(**parameters)


def test_wrong_types_and_layers_without_a_model_are_refused():
    with pytest.raises(TypeError, match="alpha must be a number, got '4'"):
        InfiniGen(alpha="4")
    with pytest.raises(TypeError, match=r"calibration_queries must be a whole number, got 2\.5"):
        InfiniGen(calibration_queries=2.5)
    method = InfiniGen()
    layer = make_layer(method, q_heads=Q_HEADS)
    generator = torch.Generator().manual_seed(0)
    layer.update(*(random_states(KV_HEADS, 20, generator) for _ in range(2)))
    method.finish_prompt([layer])
    query, key, value = (random_states(heads, 1, generator)[:, :, 0] for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    hand_over(layer, key, value)
    with pytest.raises(ValueError, match="layer 0 has no rehearsed query; use a patched model"):
        method.decode(query, layer, key, value, SCALE)
