"""The selection cache of `select_tokens`, and the op's writes."""

import pytest
import torch
from hf_sparse_attn_kernels import select_tokens
from torch._dynamo.testing import CompileCounterWithBackend

from tests.ops.helpers import IMPLS, check_schema, device, int32, make_rows

NAN = float("nan")
BUDGET = {"max_tokens": 20, "sink_tokens": 3, "recent_tokens": 5}


def _select(rows, impl, **options):
    return select_tokens(rows.query, rows.keys, rows.start, rows.end, impl=impl, **(BUDGET | options))


def _new_cache(rows, num_voted=12):
    """Create an empty selection cache."""
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
def test_cache_reuses_a_selection_without_reading_keys(impl, dtype):
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
    rows.query[1] *= 2  # same direction
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
        check_schema("select_tokens", arguments | options)


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
    ("name", "value", "error", "message"),
    [
        ("cached_query", torch.zeros(1, 2, 64).half(), TypeError, r"cached_query has dtype torch.float16; allowed"),
        ("cached_tokens", torch.zeros(1, 20).int(), ValueError, r"allowed: \[batch, num_voted\] = \[1, 12\]"),
        (
            "cached_tokens",
            torch.zeros(1, 24, device=device).int()[:, ::2],
            ValueError,
            r"cached_tokens has strides \[24, 2\]",
        ),
        ("cached_valid", torch.zeros(1).bool(), TypeError, r"cached_valid has dtype torch.bool; allowed: torch.int32"),
    ],
)
def test_bad_caches(name, value, error, message):
    rows = make_rows([20])
    with pytest.raises(error, match=message):
        _select(rows, None, **(_new_cache(rows) | {name: value.to(device)}))
