"""PSA against the paper's loop, one block at a time in plain torch, and what its counts and the recorder show."""

import itertools
import math

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import PSA, record_selections, sparse_attention, sparse_attention_stats
from hf_sparse_attn.record import SelectionRecord
from tests.layers import make_layer, step
from tests.models import DEVICE, make_model, random_ids, shared_model

HEAD_DIM, KV_HEADS, GROUP = 10, 3, 3
SCALE = 0.4
PADDING = [0, 37, 61, 100]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


def box_of(block, metadata):
    """Return the two corners of a block of keys [tokens, head_dim] between which a method scores it."""
    if metadata == "minmax":
        return block.amin(0), block.amax(0)
    if metadata == "cuboid_mean":
        centre = (block.amin(0) + block.amax(0)) / 2
        width = (centre - block).abs().mean(0)
        return centre - width, centre + width
    best = (block @ block.mean(0)).topk(min(4, len(block))).indices
    return block[best].mean(0), block[best].mean(0)


def ranking(queries, blocks, method):
    """Rank blocks of keys for the queries of a group: the newest, the sinks, then by score."""
    corners = [box_of(block, method.metadata) for block in blocks]
    bounds = [[SCALE * torch.maximum(q * low, q * high).sum() for low, high in corners] for q in queries]
    shares = [torch.stack(bound).softmax(0) for bound in bounds]
    score = sum(shares).tolist()
    newest, sinks = len(blocks) - 1, math.ceil(method.sink_tokens / method.block_size)
    first = [newest, *(block for block in range(sinks) if block < newest)]
    return first + sorted(set(range(len(blocks))) - set(first), key=lambda block: -score[block])


def papers_loop(queries, keys, values, order, method):
    """Read blocks in their order until P exceeds the threshold for all queries [group, head_dim] of a KV head.

    Returns the blocks read and the attention to them, [group, head_dim].
    """
    cap = len(order) if method.token_budget is None else method.token_budget // method.block_size
    accumulated = [0.0] * len(queries)
    least = [math.inf] * len(queries)
    counted = [[] for _ in queries]  # weights of the microbatch that the estimate by means is made of
    forced = 1 + math.ceil(method.sink_tokens / method.block_size)
    read = []
    for block in order[:cap]:
        tokens = slice(block * method.block_size, (block + 1) * method.block_size)
        read.append(block)
        for head, query in enumerate(queries):
            weight = (SCALE * keys[tokens] @ query).exp().sum().item()
            accumulated[head] += weight
            is_complete = len(keys[tokens]) == method.block_size
            if method.rest == "least" and is_complete:
                least[head] = min(least[head], weight)
            if method.rest == "last" and is_complete and len(read) > forced:
                counted[head].append(weight)
            if len(read) % method.microbatch == 0 and counted[head]:
                least[head] = min(least[head], sum(counted[head]) / len(counted[head]))
                counted[head] = []
        left = len(order) - len(read)
        if len(read) % method.microbatch == 0 and all(
            total > method.threshold * (total + low * left) for total, low in zip(accumulated, least, strict=True)
        ):
            break
    chosen = torch.cat([torch.arange(len(keys))[block * method.block_size :][: method.block_size] for block in read])
    return read, (SCALE * queries @ keys[chosen].T).softmax(1) @ values[chosen]


def decoded(method, length, impl="reference", max_cache_len=None, seed=0):
    """Decode one token of four rows, of which three are padded; heads are sharp, even and in between."""
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(method, max_cache_len, padding=PADDING)
    dtype = torch.float64 if impl == "reference" else torch.float32
    keys, values = torch.randn(2, len(PADDING), KV_HEADS, length, HEAD_DIM, generator=generator).to(DEVICE, dtype)
    keys *= torch.tensor([2.5, 1.0, 0.125], device=DEVICE)[:, None, None]
    query = torch.randn(len(PADDING), KV_HEADS * GROUP, HEAD_DIM, generator=generator).to(DEVICE, dtype)
    layer._shared.recorder = record = SelectionRecord()
    with use_impl(impl):
        layer.update(keys[:, :, :-1], values[:, :, :-1])
        output = step(layer, query, keys[:, :, -1], values[:, :, -1], SCALE)
    selection = record.selections(layer.layer_idx)[0]
    pairs = itertools.product(range(len(PADDING)), range(KV_HEADS))
    blocks = {
        (row, head): selection.block_indices[row, head, : selection.block_counts[row, head]].tolist()
        for row, head in pairs
    }
    return layer, query, keys, values, output, blocks


@pytest.mark.parametrize("metadata", ["cuboid_mean", "minmax", "representative"])
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.9, "microbatch": 1},
        {"threshold": 0.8, "microbatch": 3, "sink_tokens": 0},
        {"threshold": 0.98, "microbatch": 2, "sink_tokens": 9},
        {"threshold": 0.95, "microbatch": 4, "token_budget": 83},
        {"threshold": 1.0, "microbatch": 3},
        {"threshold": 1, "microbatch": 1, "token_budget": 40},
        {"threshold": 0.9, "microbatch": 2, "rest": "last"},
        {"threshold": 0.8, "microbatch": 3, "rest": "last", "sink_tokens": 0},
        {"threshold": 0.8, "microbatch": 1, "rest": "last", "sink_tokens": 24},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [111, 160])
def test_a_step_is_the_papers_loop(metadata, options, length):
    method = PSA(block_size=8, metadata=metadata, bounds_dtype="model", **options)
    layer, query, keys, values, output, blocks = decoded(method, length)
    tokens_read = blocks_cached = 0
    for row, head in blocks:
        mine, start = slice(head * GROUP, (head + 1) * GROUP), PADDING[row]
        own_keys, own_values = keys[row, head, start:], values[row, head, start:]
        order = ranking(query[row, mine], own_keys.split(8), method)
        read, expected = papers_loop(query[row, mine], own_keys, own_values, order, method)
        assert blocks[row, head] == sorted(read), (row, head)
        torch.testing.assert_close(output[row, mine], expected, rtol=1e-9, atol=1e-9)
        blocks_cached += len(order)
        tokens_read += sum(min(8, len(own_keys) - 8 * block) for block in read)
    assert layer.counter.own.tolist() == [sum(map(len, blocks.values())), blocks_cached]
    dense_tokens = KV_HEADS * sum(length - start for start in PADDING)
    metadata_bytes = blocks_cached * 2 * HEAD_DIM * keys.element_size()
    assert layer.counter.totals[:3].tolist() == [tokens_read, dense_tokens, metadata_bytes]


def test_rows_and_heads_stop_at_different_times():
    method = PSA(block_size=8, microbatch=1, bounds_dtype="model", threshold=0.9)
    *_, blocks = decoded(method, 160)
    read = {pair: len(indices) for pair, indices in blocks.items()}
    assert len(set(read.values())) >= 6
    assert all(read[row, 0] < read[row, 2] for row in range(len(PADDING)))  # a sharp head needs fewer


@pytest.mark.parametrize("bounds_dtype", ["int8", "model"])
def test_a_higher_threshold_reads_on_in_the_same_order(bounds_dtype):
    before = None
    for threshold in (0.3, 0.6, 0.9, 0.95, 0.98, 1.0):
        method = PSA(block_size=8, microbatch=2, bounds_dtype=bounds_dtype, threshold=threshold)
        *_, blocks = decoded(method, 160)
        if before is not None:
            assert all(set(before[pair]) <= set(blocks[pair]) for pair in blocks)
            assert sum(map(len, before.values())) < sum(map(len, blocks.values()))
        before = blocks
    assert all(len(indices) == -(-(160 - PADDING[row]) // 8) for (row, _), indices in before.items())


@pytest.mark.parametrize("metadata", ["cuboid_mean", "minmax", "representative"])
def test_8_bits_change_the_order_little_and_the_attention_to_a_block_not_at_all(metadata):
    exact, rounded = (
        PSA(block_size=8, microbatch=1, metadata=metadata, bounds_dtype=dtype, threshold=0.95)
        for dtype in ("model", "int8")
    )
    *_, blocks = decoded(exact, 160)
    layer, query, keys, values, output, in_8_bits = decoded(rounded, 160)
    counts = [sum(map(len, chosen.values())) for chosen in (blocks, in_8_bits)]
    assert abs(counts[0] - counts[1]) <= 0.05 * counts[0]
    for (row, head), chosen in in_8_bits.items():
        mine, start = slice(head * GROUP, (head + 1) * GROUP), PADDING[row]
        own = torch.cat([torch.arange(8 * block, min(8 * block + 8, 160 - start)) for block in chosen])
        read_keys, read_values = keys[row, head, start:][own], values[row, head, start:][own]
        expected = (SCALE * query[row, mine] @ read_keys.T).softmax(1) @ read_values
        torch.testing.assert_close(output[row, mine], expected, rtol=1e-9, atol=1e-9)
    assert layer.metadata["page_min"].dtype == torch.int8


def test_the_block_being_filled_ends_no_step():
    """With even attention P is the share of blocks read; the one token of the newest block weighs an eighth."""
    method = PSA(block_size=8, microbatch=1, threshold=0.9, sink_tokens=0)
    layer = make_layer(method)
    tokens = torch.zeros(2, 1, 1, 161, 4)
    layer.update(tokens[0, :, :, :-1], tokens[1, :, :, :-1])
    step(layer, torch.ones(1, 1, 4), tokens[0, :, :, -1], tokens[1, :, :, -1], 1.0)
    newest_weighs = 1 / 8
    share = [(read + newest_weighs) / (20 + newest_weighs) for read in range(21)]
    complete = next(read for read in range(21) if share[read] > 0.9)
    assert layer.counter.own.tolist() == [complete + 1, 21]


@pytest.mark.parametrize(
    ("max_cache_len", "options"), [(None, {"threshold": 0.9}), (150, {"threshold": 0.98, "token_budget": 48})], ids=str
)
def test_the_kernels_read_the_same_blocks_as_the_references(max_cache_len, options):
    method = PSA(block_size=16, microbatch=2, **options)
    *_, expected, blocks = decoded(method, 123, max_cache_len=max_cache_len)
    *_, actual, read = decoded(method, 123, "triton", max_cache_len)
    assert read == blocks
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_the_recorder_and_the_counts_show_what_was_read():
    model, ids = shared_model("llama"), random_ids(2, 150)
    method = PSA(block_size=8, microbatch=2, threshold=0.7, dense_layers=1)
    with sparse_attention(model, method), record_selections(model) as record:
        model.generate(ids, **GREEDY)
        stats = sparse_attention_stats(model)
    assert record.selections(0) == [None] * 7
    for index, layer in enumerate(stats.layers):
        reads = [record.reads(index, at, row) for at, row in itertools.product(range(7), range(2))]
        assert layer.tokens_read == sum(int(each.sum()) for each in reads)
        assert all(bool((each[:, -1] & each[:, 0]).all()) for each in reads)  # the newest block, the sinks
        if index == 0:
            assert layer.method_counts == {}  # dense
            continue
        counted = [selection.block_counts.sum().item() for selection in record.selections(index)]
        cached = 2 * 2 * sum(-(-length // 8) for length in range(151, 158))
        assert layer.method_counts == {"blocks_read": sum(counted), "blocks_cached": cached}
        assert 0 < layer.kv_bytes < layer.dense_bytes
        for selection in record.selections(index):
            pairs = zip(selection.block_indices.flatten(0, 1), selection.block_counts.flatten(), strict=True)
            for indices, count in pairs:
                assert torch.equal(indices[:count], indices[:count].unique())
                assert (indices[count:] == -1).all()
    assert stats.method_counts["blocks_read"] == sum(layer.method_counts["blocks_read"] for layer in stats.layers[1:])
    assert len({layer.method_counts["blocks_read"] for layer in stats.layers[1:]}) > 1


@torch.inference_mode()
def test_metadata_bytes_are_counted():
    model = make_model("llama", num_hidden_layers=1)
    read = {}
    for bounds_dtype in ("int8", "model"):
        with sparse_attention(model, PSA(block_size=16, microbatch=1, bounds_dtype=bounds_dtype)):
            model.generate(random_ids(1, 100), **{**GREEDY, "max_new_tokens": 2})
            read[bounds_dtype] = sparse_attention_stats(model).metadata_bytes
    blocks, kv_heads, head_dim = 7, 2, 16
    assert read["model"] == blocks * kv_heads * 2 * head_dim * 4
    assert read["int8"] == kv_heads * (blocks * (2 * head_dim + 1) + head_dim)


@pytest.mark.parametrize("sink_tokens", [0, 16])
@torch.inference_mode()
def test_an_offloaded_model_estimates_the_rest_by_means_too(sink_tokens):
    model, ids = shared_model("llama", torch.float64), random_ids(2, 150)
    options = {"block_size": 8, "microbatch": 3, "threshold": 0.7, "sink_tokens": sink_tokens}
    results = []
    for parameters in ({"rest": "last"}, {"rest": "last", "offload": True, "gpu_cache_tokens": 2000}, {}):
        with use_impl("reference"), sparse_attention(model, PSA(**options, **parameters)):
            tokens = model.generate(ids, **GREEDY)
            results.append((tokens.tolist(), sparse_attention_stats(model).tokens_read))
    assert results[0] == results[1]
    assert results[0][1] > results[2][1]  # than the paper's estimate reads


def test_what_fits_into_one_microbatch_is_covered():
    assert PSA().covers(256)
    assert not PSA().covers(257)
    assert not PSA(threshold=0.999).covers(257)
    assert PSA(threshold=1.0).covers(10**6)
    assert PSA(threshold=1, token_budget=1024).covers(1024)
    assert not PSA(threshold=1, token_budget=1024).covers(1025)
    assert PSA(token_budget=100).covers(96)
    assert not PSA(token_budget=100).covers(97)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, r"threshold must be above 0 and at most 1, got 0"),
        ({"threshold": 1.01}, r"threshold must be above 0 and at most 1, got 1\.01"),
        ({"threshold": -0.5}, r"threshold must be above 0"),
        ({"threshold": math.nan}, r"threshold must be above 0 and at most 1, got nan"),
        ({"block_size": 24}, r"block_size must be a power of two, such as \d+, got 24"),
        ({"block_size": 0}, r"block_size must be a power of two"),
        ({"microbatch": 0}, r"microbatch must be at least 1 block, got 0"),
        ({"metadata": "mean"}, r"metadata must be one of cuboid_mean, minmax, representative, got 'mean'"),
        ({"rest": "mean"}, r"rest must be 'least' or 'last', got 'mean'"),
        ({"sink_tokens": -1}, r"sink_tokens must be 0 or more, got -1"),
        ({"token_budget": 63}, r"token_budget must be None, or at least 64: .* sink_tokens=16.* blocks of 32, got 63"),
        ({"token_budget": 0, "sink_tokens": 0}, r"token_budget must be None, or at least 32"),
        ({"group_reduce": "sum"}, r"group_reduce must be one of softmax, mean, max, got 'sum'"),
        ({"bounds_dtype": "int4"}, r"bounds_dtype must be one of int8, model, got 'int4'"),
        ({"dense_layers": -1}, r"dense_layers must be 0 or more, got -1"),
    ],
    ids=str,
)
def test_a_value_that_is_not_allowed_is_named(options, message):
    with pytest.raises(ValueError, match=f"psa: {message}"):
        PSA(**options)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("threshold", "a number"),
        ("block_size", "a whole number"),
        ("microbatch", "a whole number"),
        ("token_budget", "a whole number or None"),
        ("sink_tokens", "a whole number"),
    ],
)
@pytest.mark.parametrize("value", ["8", True])
def test_a_value_that_is_no_number_is_named(name, allowed, value):
    with pytest.raises(TypeError, match=rf"{name} must be {allowed}, got {value!r}"):
        PSA(**{name: value})
