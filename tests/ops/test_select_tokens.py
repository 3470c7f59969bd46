import json
from pathlib import Path

import pytest
import torch
from hf_sparse_attn_kernels import select_tokens, token_votes
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend

from tests.ops.helpers import IMPLS, device, int32, make_rows

NAN, INF = float("nan"), float("inf")
GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
OPS = torch.ops.hf_sparse_attn_kernels
BUDGET = {"max_tokens": 20, "sink_tokens": 3, "recent_tokens": 5}


@pytest.fixture(autouse=True)
def nan_in_new_buffers(monkeypatch):
    """What a launcher allocates holds NaN, or a large number, until a kernel has written it."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(NAN if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(empty_like(*args, **kwargs)))


def _brute_force(votes, length, max_tokens, sink_tokens, recent_tokens, pool_size=0):
    """The selection of one row, by sorting (votes, lower index first)."""
    if length <= max_tokens:
        return list(range(length))
    candidates = range(sink_tokens, length - recent_tokens)
    votes = {t: -INF if votes[t] != votes[t] else votes[t] for t in candidates}
    reach = max(0, pool_size) // 2
    pooled = {t: max(votes[n] for n in range(t - reach, t + reach + 1) if n in votes) for t in candidates}
    voted = sorted(candidates, key=lambda t: (-pooled[t], t))[: max_tokens - sink_tokens - recent_tokens]
    return [*range(sink_tokens), *sorted(voted), *range(length - recent_tokens, length)]


def _select(rows, impl, **options):
    return select_tokens(rows.query, rows.keys, rows.start, rows.end, impl=impl, **(BUDGET | options))


def _check(rows, impl, num_tokens=None, vote="soft", pool_size=0, **budget):
    """A selection against the brute force over the same implementation's votes."""
    budget = BUDGET | budget
    indices, counts = _select(rows, impl, num_tokens=num_tokens, vote=vote, pool_size=pool_size, **budget)
    votes = token_votes(
        rows.query, rows.keys, rows.start, rows.end, num_tokens=num_tokens, vote=vote, impl=impl, **budget
    )
    batch, max_tokens = len(rows.lengths), budget["max_tokens"]
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.shape == (batch, 1, max_tokens)
    assert counts.shape == (batch, 1)
    for row, length in enumerate(rows.lengths):
        expected = _brute_force(votes[row].tolist(), min(length, votes.shape[1]), pool_size=pool_size, **budget)
        assert counts[row].item() == len(expected), impl
        assert indices[row, 0].tolist() == expected + [-1] * (max_tokens - len(expected)), (impl, row)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "budget", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([600, 1, 0, 20, 21], {}, 2, 1, 64, torch.float32),
        ([1030, 300], {"max_tokens": 257, "sink_tokens": 0, "recent_tokens": 0}, 1, 3, 80, torch.bfloat16),
        ([600, 519, 64], {"max_tokens": 65, "sink_tokens": 17, "recent_tokens": 47}, 2, 7, 128, torch.float16),
        ([520], {"max_tokens": 519, "sink_tokens": 1, "recent_tokens": 0}, 1, 2, 16, torch.float32),
    ],
)
def test_matches_brute_force(impl, lengths, budget, kv_heads, group, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    _check(rows, impl, num_tokens=max(lengths), **budget)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("vote", "pool_size"), [("soft", 1), ("soft", 7), ("logits", 0), ("logits", 3), ("head", 0)])
def test_every_vote_and_pooling(impl, vote, pool_size):
    _check(make_rows([530, 30, 19], kv_heads=1, head_dim=16, group=2), impl, vote=vote, pool_size=pool_size)


def test_tokens_with_clearly_more_votes_are_chosen():
    rows = make_rows([1500], group=3, dtype=torch.bfloat16)
    exact = token_votes(
        rows.query.double(), rows.keys.double(), rows.start, rows.end, sink_tokens=3, recent_tokens=5, impl="reference"
    )[0]
    least = exact.topk(12)[0][-1]
    for impl in IMPLS:
        indices, _ = _select(rows, impl)
        chosen = torch.zeros(rows.capacity, dtype=torch.bool, device=device)
        chosen[indices[0, 0, 3:-5].long()] = True
        assert chosen[exact > 1.001 * least].all()
        assert not chosen[exact < 0.999 * least].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vote", ["soft", "logits"])
def test_ties_over_many_tiles(impl, vote):
    rows = make_rows([1700, 1100], kv_heads=1, head_dim=16)
    rows.query.fill_(1.0)
    for row in range(2):
        start = rows.start[row].item()
        rows.keys[row, :, start : start + rows.lengths[row]] = 0.0
        rows.keys[row, :, start + 500 : start + 900 : 50, 0] = 2.0
    for max_tokens in (12, 1000):
        _check(rows, impl, vote=vote, max_tokens=max_tokens)


@pytest.mark.parametrize("impl", IMPLS)
def test_votes_that_vanish_are_ties(impl):
    rows = make_rows([1100], head_dim=64)
    rows.query *= 40  # softmax weights underflow to 0 for all but a few tokens
    _check(rows, impl, max_tokens=200)


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_and_infinite_votes(impl):
    rows = make_rows([600], kv_heads=1, head_dim=16)
    rows.query.fill_(1.0)
    rows.keys[0, 0, 10:300] = NAN
    rows.keys[0, 0, 400:405] = INF
    rows.keys[0, 0, 410:420] = -INF
    for max_tokens in (20, 590):
        _check(rows, impl, vote="logits", max_tokens=max_tokens)


def _new_cache(rows, num_voted=12):
    """A selection cache that holds nothing."""
    batch = len(rows.lengths)
    return {
        "cached_query": torch.full_like(rows.query, NAN),
        "cached_tokens": int32([[-7] * num_voted] * batch),
        "cached_valid": int32([0] * batch),
        "reuse_counter": torch.zeros(2, dtype=torch.int64, device=device),
        "counter": torch.zeros(4, dtype=torch.int64, device=device),
    }


def _grow(rows, new_tokens):
    rows.end += new_tokens
    rows.lengths = [length + new_tokens for length in rows.lengths]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_takes_a_selection_again_without_reading_keys(impl, dtype):
    rows = make_rows([560, 60, 12, 25], group=3, dtype=dtype)
    cache = _new_cache(rows)
    first, _ = _select(rows, impl, threshold=0.9, **cache)
    assert torch.equal(first, _select(rows, impl)[0])
    assert cache["cached_valid"].tolist() == [1, 1, 0, 1]
    assert torch.equal(cache["cached_query"][[0, 1, 3]], rows.query[[0, 1, 3]])
    assert torch.equal(cache["cached_tokens"][[0, 1, 3]], first[[0, 1, 3], 0, 3:-5])
    key_bytes = rows.keys.element_size() * 2 * 64
    assert cache["counter"].tolist() == [0, 0, (552 + 52 + 17) * key_bytes, 0]
    assert cache["reuse_counter"].tolist() == [0, 3]

    before = {name: tensor.clone() for name, tensor in cache.items()}
    _grow(rows, 3)
    kept_query = rows.query.clone()
    rows.query[1] *= 2  # as far as its direction goes, the same
    rows.query[3] = -rows.query[3]
    keys = rows.keys.clone()
    rows.keys[:3] = NAN
    again, counts = _select(rows, impl, threshold=0.9, **cache)
    rows.keys.copy_(keys)
    assert counts.flatten().tolist() == [20, 20, 15, 20]
    for row in (0, 1):
        length = rows.lengths[row]
        assert again[row, 0].tolist() == [0, 1, 2, *first[row, 0, 3:-5].tolist(), *range(length - 5, length)]
        for name in ("cached_query", "cached_tokens", "cached_valid"):
            assert torch.equal(cache[name][row], before[name][row])
    assert again[2, 0].tolist() == [*range(15), *[-1] * 5]
    assert torch.equal(again[3], _select(rows, impl)[0][3])
    assert torch.equal(cache["cached_tokens"][3], again[3, 0, 3:-5])
    assert torch.equal(cache["cached_query"][3], rows.query[3])
    assert (cache["counter"] - before["counter"]).tolist() == [0, 0, 20 * key_bytes, 0]
    assert (cache["reuse_counter"] - before["reuse_counter"]).tolist() == [2, 3]

    rows.query.copy_(kept_query)
    cache["cached_valid"][0] = 0  # a row that does not continue the one before
    anew, _ = _select(rows, impl, threshold=0.9, **cache)
    assert torch.equal(anew[0], _select(rows, impl)[0][0])
    assert cache["cached_valid"].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_that_became_short_has_no_cached_selection(impl):
    rows = make_rows([40, 30])
    cache = _new_cache(rows)
    _select(rows, impl, threshold=-1.0, **cache)
    rows.end[0] -= 25
    _select(rows, impl, threshold=-1.0, **cache)
    assert cache["cached_valid"].tolist() == [0, 1]
    assert cache["reuse_counter"].tolist() == [1, 3]


@pytest.mark.parametrize("impl", IMPLS)
def test_threshold_of_the_cosine(impl):
    rows = make_rows([40] * 5, kv_heads=1, head_dim=16, group=2)
    cache = _new_cache(rows)
    cache["cached_query"].zero_()
    cache["cached_query"][:, 0, 0] = 3.0
    cache["cached_valid"].fill_(1)
    rows.query.zero_()
    rows.query[0, 0, 0] = 2.0  # cosine 1
    rows.query[1, 0, 0], rows.query[1, 1, 5] = 6.0, 8.0  # cosine 0.6, over both heads
    rows.query[2, 1, 0] = 1.0  # cosine 0
    rows.query[4, 0, 0] = -1.0  # cosine -1; query 3 is 0
    for threshold, reused in ((0.99, 1), (0.601, 1), (0.599, 2), (0.01, 2), (-0.01, 3), (-0.99, 3), (-1.01, 4)):
        given = {name: tensor.clone() for name, tensor in cache.items()}
        _select(rows, impl, threshold=threshold, **given)
        assert given["reuse_counter"].tolist() == [reused, 5], threshold
    given = {name: tensor.clone() for name, tensor in cache.items()}
    indices, _ = _select(rows, impl, threshold=1.0, **given)
    assert torch.equal(indices, _select(rows, impl)[0])
    assert given["reuse_counter"].tolist() == [0, 5]
    for name in ("cached_query", "cached_tokens", "cached_valid"):
        assert torch.equal(given[name], cache[name])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["soft_vote0", "soft_vote1", "soft_vote2"])
def test_golden_selections(name, impl):
    if not (GOLDEN / "selection.safetensors").exists():
        pytest.skip(f"shared/ data absent: no golden vectors at {GOLDEN}")
    count = json.loads((GOLDEN / "selection.json").read_text())[name]["k"]
    tensors = load_file(GOLDEN / "selection.safetensors")
    keys, query = tensors[f"{name}.keys"].to(device), tensors[f"{name}.query"].to(device)[:, :, 0]
    rows = (int32([0]), int32([keys.shape[2]]))
    indices, _ = select_tokens(query, keys, *rows, max_tokens=count, sink_tokens=0, recent_tokens=0, impl=impl)
    assert torch.equal(indices[0, 0].long(), tensors[f"{name}.selected"].to(device))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_opaque_node_that_declares_its_writes(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def step(query, keys, seq_start, seq_end, **cache):
        seq_end += 1
        return select_tokens(query, keys, seq_start, seq_end, threshold=0.5, **BUDGET, **cache)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    states = []
    for function in (compiled, step):
        rows = make_rows([60, 12], group=2)
        cache = _new_cache(rows)
        results = []
        for sign in (1, 1, -1):
            query = rows.query * sign
            results.append([t.clone() for t in function(query, rows.keys, rows.start, rows.end, **cache)])
        states.append((results, cache))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count == 1

    rows = make_rows([60, 12], group=2)
    arguments = {"query": rows.query, "keys": rows.keys, "seq_start": rows.start, "seq_end": rows.end, **BUDGET}
    for options in ({}, {**_new_cache(rows), "threshold": 0.5}):
        checked = arguments | options
        torch.library.opcheck(OPS.select_tokens.default, (), checked, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_a_cuda_graph_follows_the_lengths():
    rows = make_rows([900, 300], group=2, dtype=torch.bfloat16)
    cache = _new_cache(rows)
    graph = torch.cuda.CUDAGraph()
    _select(rows, "triton", threshold=0.9, **cache)
    with torch.cuda.graph(graph):
        indices, counts = _select(rows, "triton", threshold=0.9, **cache)
    for new_tokens, valid in ((0, 0), (0, 1), (-285, 0), (285, 1)):
        rows.end += new_tokens
        cache["cached_valid"].fill_(valid)
        expected_cache = {name: tensor.clone() for name, tensor in cache.items()}
        expected = _select(rows, "triton", threshold=0.9, **expected_cache)
        graph.replay()
        torch.testing.assert_close((indices, counts), expected, rtol=0, atol=0)
        torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"max_tokens": 8}, ValueError, r"sink_tokens=3 and recent_tokens=5; allowed: together less than max_tokens=8"),
        ({"sink_tokens": -1}, ValueError, r"sink_tokens=-1; allowed: an int of at least 0"),
        ({"pool_size": 4}, ValueError, r"pool_size=4; allowed: 0, or an odd number"),
        ({"vote": "mean"}, ValueError, r"vote='mean'; allowed: 'soft', 'logits', 'head'"),
        ({"num_tokens": 0}, ValueError, r"num_tokens=0; allowed: None, or 1 to capacity=25"),
        (
            {"cached_valid": torch.zeros(1).int()},
            ValueError,
            r"cached_valid given; allowed: cached_query",
        ),
        ({"counter": torch.zeros(3).long()}, ValueError, r"counter has shape \[3\]; allowed: \[4\]"),
        ({"reuse_counter": torch.zeros(2)}, TypeError, r"reuse_counter has dtype torch.float32; allowed: torch.int64"),
        ({"finished": torch.zeros(1, 1).int()}, ValueError, r"finished has shape \[1, 1\]; allowed: \[batch, kv_head"),
    ],
)
def test_bad_arguments(changed, error, message):
    rows = make_rows([20])
    changed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in changed.items()}
    with pytest.raises(error, match=message):
        _select(rows, None, **changed)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("cached_query", torch.zeros(1, 2, 64).half(), TypeError, r"cached_query has dtype torch.float16; allowed"),
        ("cached_tokens", torch.zeros(1, 20).int(), ValueError, r"allowed: \[batch, num_voted\] = \[1, 12\]"),
        ("cached_tokens", torch.zeros(1, 24).int()[:, ::2], ValueError, r"cached_tokens has strides \[24, 2\]"),
        ("cached_valid", torch.zeros(1).bool(), TypeError, r"cached_valid has dtype torch.bool; allowed: torch.int32"),
    ],
)
def test_bad_caches(name, value, error, message):
    rows = make_rows([20])
    with pytest.raises(error, match=message):
        _select(rows, None, **(_new_cache(rows) | {name: value.to(device)}))
