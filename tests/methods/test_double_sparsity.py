"""Double Sparsity against its definition in plain loops, its calibration, and its labels."""

import errno
import json

import pytest
import torch

from hf_sparse_attn import (
    DoubleSparsity,
    SparseCache,
    calibrate_channels,
    patch_model,
    sparse_attention,
    sparse_attention_stats,
)
from hf_sparse_attn.methods.channels import label_values, make_labels
from tests.methods.coded import decode, generate_watched
from tests.models import DEVICE, ROUNDING, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")

GREEDY = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
PROMPT, BUDGET, KV_HEADS = 63, 24, 2
SMALL = {"token_budget": BUDGET, "channels": 6, "label_bits": 16, "dense_layers": 1, "calibration_queries": 20}


def heavy_channels(queries, keys, channels, statistic):
    """The channels with the greatest mean of |q_i k_i|, of [group, m, d] queries and [n, d] keys, pair by pair."""
    weights = []
    for channel in range(keys.shape[1]):
        if statistic == "k":
            weights.append(float(keys[:, channel].abs().mean()))
            continue
        total = 0.0
        for query in queries:
            products = query[:, channel, None] * (keys[:, channel] if statistic == "qk" else 1)
            total += float(products.abs().mean())
        weights.append(total)
    return sorted(sorted(range(len(weights)), key=lambda channel: -weights[channel])[:channels])


def quantized(values, bits):
    """The values of a label of few bits: evenly spaced levels from the least value to the greatest."""
    if bits == 16:
        return values
    least = values.min().to(torch.float16).double()
    step = ((values.max() - least) / (2**bits - 1)).to(torch.float16).double()
    return torch.stack(
        [least + step * min(max(round(float((value - least) / step)), 0), 2**bits - 1) for value in values]
    )


def chosen(queries, keys, channels, bits):
    """The tokens that a KV head reads, of [group, d] queries and [n, d] keys, by the summed softmax of estimates."""
    labels = torch.stack([quantized(key[channels], bits) for key in keys])
    estimates = torch.stack([labels @ query[channels] * keys.shape[1] ** -0.5 for query in queries])
    weights = estimates.softmax(1).sum(0).tolist()
    return sorted(sorted(range(len(keys)), key=lambda token: -weights[token])[:BUDGET])


@pytest.mark.parametrize(
    ("parameters", "head_dim"),
    [
        ({}, 16),
        ({"label_bits": 4}, 16),
        ({"label_bits": 2, "channels": 8, "statistic": "k"}, 80),
        ({"statistic": "q", "calibration_queries": 100}, 16),
    ],
    ids=str,
)
@torch.inference_mode()
def test_every_step_reads_the_tokens_that_the_definition_chooses(parameters, head_dim, monkeypatch):
    method = DoubleSparsity(**{**SMALL, **parameters})
    starts = [0, 23]
    steps, record, stats = generate_watched(monkeypatch, method, head_dim, PROMPT, starts, GREEDY)
    layer, scored = steps.layer, 0
    for row, start in enumerate(starts):
        known = min(method.calibration_queries, PROMPT - start)
        prompt_queries = layer.prompt_queries.states[row, :, -known:].double().unflatten(0, (KV_HEADS, -1)).cpu()
        for head in range(KV_HEADS):
            prompt_keys = layer.keys[row, head, start:PROMPT].double().cpu()
            channels = heavy_channels(prompt_queries[head], prompt_keys, method.channels, method.statistic)
            assert layer.metadata["channels"][row, head].tolist() == channels
            for step, query in enumerate(steps.queries):
                end = PROMPT + 1 + step
                reads = record.reads(1, step, row)[head, start - end :].cpu().nonzero().flatten().tolist()
                keys = layer.keys[row, head, start:end].double().cpu()
                queries = query[row].unflatten(0, (KV_HEADS, -1))[head].cpu()
                assert reads == chosen(queries, keys, channels, method.label_bits)
                scored += end - start
    assert len(steps.queries) == GREEDY["max_new_tokens"] - 1
    token_bytes = method.channels * method.label_bits // 8 + 4
    if method.label_bits == 16:
        token_bytes = method.channels * layer.keys.element_size()
    assert stats.layers[1].metadata_bytes == scored * token_bytes
    assert stats.layers[0].kv_bytes == stats.layers[0].dense_bytes  # the dense layer


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_labels_are_packed_and_come_back_within_half_a_step(bits):
    values = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    values[1, 2] = 0.75  # no range
    labels = make_labels(values, bits)
    assert labels["labels"].shape == (3, 5, bits)  # 8 channels
    back = label_values(labels["labels"], labels["label_range"], bits, torch.float32)
    step = labels["label_range"][..., 1:].float()
    error = (back - values).abs()
    assert (error <= step * 0.51 + 2e-3 * values.abs().amax()).all()  # and the rounding of two numbers to float16
    assert torch.equal(back[1, 2], torch.full((8,), 0.75, device=DEVICE))


@torch.inference_mode()
def test_a_calibrated_file_gives_the_channels_of_its_text(model, tmp_path):
    """Channels that a text's keys and all of its queries choose, for texts other than the prompt."""
    ids, path = random_ids(2, 50), tmp_path / "channels.json"
    calibrate_channels(model, ids, path)
    entries = json.loads(path.read_text())
    assert len(entries) == 3 * model.config.num_hidden_layers
    assert {len(entries[f"model.layers.1.self_attn.{name}_proj"]) for name in ("q", "qk")} == {6}
    with sparse_attention(model, "full"):
        cache = SparseCache(model.config, "full", keep_queries=50)
        model(ids, past_key_values=cache)
    steps = random_ids(1, 5, seed=3)
    for statistic in ("qk", "k"):
        method = DoubleSparsity(token_budget=BUDGET, channels=4, calibration=str(path), statistic=statistic)
        with sparse_attention(model, method):
            own = SparseCache.for_model(model)
            model(random_ids(1, 70, seed=8), past_key_values=own)
            logits = decode(model, own, steps)
            assert sparse_attention_stats(model).kv_fraction < 1
            in_parts = SparseCache.for_model(model, max_cache_len=100)
            for part in random_ids(1, 70, seed=8).split([30, 2, 38], dim=1):
                model(part, past_key_values=in_parts)
            torch.testing.assert_close(decode(model, in_parts, steps), logits, **ROUNDING)
        layer = cache.layers[2]
        queries = layer.prompt_queries.states.transpose(0, 1).flatten(1, 2).unflatten(0, (KV_HEADS, -1)).cpu()
        keys = layer.keys[:, :, :50].transpose(0, 1).flatten(1, 2).cpu()
        for head in range(KV_HEADS):
            chosen_channels = own.layers[2].metadata["channels"][0, head].tolist()
            if statistic == "k":
                assert chosen_channels == heavy_channels(queries[head], keys[head], 4, statistic)
            else:  # the file ranks for each query head: its group takes those with the best mean place
                orders = entries["model.layers.2.self_attn.qk_proj"][3 * head : 3 * head + 3]
                places = [sum(order.index(channel) for order in orders) for channel in range(16)]
                cut = sorted(places)[3]
                assert all(places[channel] <= cut for channel in chosen_channels)
                group_heavy = [set(heavy_channels(queries[head][i : i + 1], keys[head], 1, "qk")) for i in range(3)]
                assert [{order[0]} for order in orders] == group_heavy


@torch.inference_mode()
def test_a_later_prompt_calibrates_anew_and_rows_keep_their_channels(model):
    ids, steps = random_ids(3, 90), random_ids(3, 6, seed=4)
    with sparse_attention(model, DoubleSparsity(**{**SMALL, "label_bits": 4})):
        cache = SparseCache.for_model(model)
        model(ids[:, :50], past_key_values=cache)
        decode(model, cache, steps[:, :1])
        cache.crop(-1)
        first = cache.layers[2].metadata["channels"].clone()
        model(ids[:, 50:], past_key_values=cache)
        expected = decode(model, cache, steps)
        assert not torch.equal(cache.layers[2].metadata["channels"], first)
        whole = SparseCache.for_model(model, max_cache_len=120)
        model(ids, past_key_values=whole)
        torch.testing.assert_close(decode(model, whole, steps), expected, **ROUNDING)
        cache.crop(-6)
        cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 1], device=DEVICE))
        torch.testing.assert_close(decode(model, cache, steps[[0, 2]]), expected[[0, 2]], **ROUNDING)


@torch.inference_mode()
def test_keys_alone_calibrate_where_no_query_is_known(model):
    ids, steps = random_ids(1, 60), random_ids(1, 4, seed=4)
    logits = []
    for statistic in ("qk", "k"):
        with sparse_attention(model, DoubleSparsity(**SMALL, statistic=statistic)):
            cache = SparseCache.for_model(model)
            model(random_ids(1, 5, seed=2), past_key_values=cache)
            cache.crop(-5)
        model(ids, past_key_values=cache)  # the unpatched model
        with sparse_attention(model, DoubleSparsity(**SMALL, statistic=statistic)):
            logits.append(decode(model, cache, steps))
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"channels": 0}, ValueError, "double_sparsity: channels must be a multiple of 2: .*label_bits=4, got 0"),
        ({"channels": 5}, ValueError, "channels must be a multiple of 2: whole bytes of label_bits=4, got 5"),
        ({"channels": 18}, ValueError, "channels must be at most the model's head_dim=16, got 18"),
        ({"channels": 2.5}, TypeError, "channels must be a whole number, got 2.5"),
        ({"label_bits": 3}, ValueError, "label_bits must be one of 2, 4, 8, 16, got 3"),
        ({"statistic": "kk"}, ValueError, "statistic must be one of qk, q, k, got 'kk'"),
        ({"calibration": 3}, TypeError, "calibration must be the path of a file or None, got 3"),
        ({"calibration": "/nowhere"}, FileNotFoundError, "calibration='/nowhere' is not a file"),
        ({"calibration_queries": 0}, ValueError, "calibration_queries must be at least 1, got 0"),
        ({"group_reduce": "sum"}, ValueError, "group_reduce must be one of softmax, mean, max, got 'sum'"),
    ],
)
def test_bad_arguments_are_named(parameters, error, message):
    model = make_model("llama")
    with pytest.raises(error, match=message):
        patch_model(model, "double_sparsity", **parameters)
    assert "forward" not in model.model.__dict__


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("layers", "channels.json' must be a JSON file: Expecting value"),
        ("[]", "must be a JSON object of layers, got list"),
        ("{}", "has no entry 'model.layers.2.self_attn.qk_proj'; calibrate_channels writes one for every layer"),
        (
            json.dumps({"model.layers.2.self_attn.qk_proj": [[1, 0]] * 2}),
            "must list the channels 0 to 15 for each of 6 query heads or 2 KV heads; it is of another model",
        ),
    ],
)
def test_files_of_other_models_are_refused(content, message, tmp_path):
    path = tmp_path / "channels.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        patch_model(make_model("llama"), "double_sparsity", calibration=str(path))


@pytest.mark.parametrize("entry", [5, None, [1, 2], [[0, "a"] * 8] * 2, [[False, True, *range(2, 16)]] * 2], ids=repr)
def test_an_entry_that_lists_no_channels_is_refused(entry, tmp_path):
    path = tmp_path / "channels.json"
    path.write_text(json.dumps({"model.layers.2.self_attn.qk_proj": entry}))
    with pytest.raises(ValueError, match=r"channels\.json': 'model\.layers\.2.*must list the channels 0 to 15"):
        patch_model(make_model("llama"), "double_sparsity", calibration=str(path))


def test_a_full_disk_leaves_the_former_channels(model, tmp_path, monkeypatch):
    def full(name):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "channels.json"
    calibrate_channels(model, random_ids(1, 20), path)
    before = path.read_bytes()
    monkeypatch.setattr("hf_sparse_attn.whole_file._flush", full)
    with pytest.raises(OSError, match="No space left"):
        calibrate_channels(model, random_ids(1, 30), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_calibration_takes_a_batch_of_texts(model, tmp_path):
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, tokens\] with at least one token, got \(5,\)"):
        calibrate_channels(model, random_ids(1, 5)[0], tmp_path / "channels.json")
