"""Attention of a chunk to selected tokens and to itself, against plain attention over the tokens one after another."""

import pytest
import torch
from hf_sparse_attn_kernels import sparse_decode, sparse_prefill

from tests.ops.helpers import IMPLS, allowed_error, check_schema, device, int32, make_rows, rope_table, rotate


def _chunk(lengths, queries, most, *, shared=True, rope=True, seed=0, group=1, **options):
    """Rows, their last tokens' queries, a random selection of at most `most` tokens before them, and RoPE's table."""
    rows = make_rows(lengths, group=group, seed=seed, **options)
    batch, kv_heads, _, head_dim = rows.keys.shape
    generator = torch.Generator().manual_seed(seed + 1)
    # Strided like the output of the projections; NaN for padding in the chunk.
    query = torch.randn(batch, queries, kv_heads * group, head_dim, generator=generator)
    heads = 1 if shared else kv_heads
    indices = torch.full((batch, heads, most), -1, dtype=torch.int32)
    counts = torch.zeros(batch, heads, dtype=torch.int32)
    for row, length in enumerate(lengths):
        query[row, : max(0, queries - length)] = float("nan")
        for head in range(heads):
            count = max(0, min(most, length - queries) - head)  # another number for every head
            chosen = torch.randperm(max(0, length - queries), generator=generator)[:count].sort()[0]
            indices[row, head, :count], counts[row, head] = chosen.int(), count
    rows.query = query.to(device, rows.keys.dtype).transpose(1, 2)
    return rows, indices.to(device), counts.to(device), rope_table(most + queries, head_dim) if rope else {}


def _eager(rows, indices, counts, rope, dtype, scale=None):
    """Plain attention of each query head over its tokens packed one after another, every step rounded to `dtype`.

    Returns the outputs and the log-sum-exps.
    """
    batch, q_heads, queries, head_dim = rows.query.shape
    kv_heads = rows.keys.shape[1]
    out = torch.zeros(batch, q_heads, queries, head_dim, device=device, dtype=dtype)
    lse = torch.full((batch, q_heads, queries), float("-inf"), device=device, dtype=dtype)
    for row, length in enumerate(rows.lengths):
        own = min(queries, length)
        start, end = rows.start[row].item(), rows.end[row].item()
        for head in range(q_heads):
            kv = head // (q_heads // kv_heads)
            listed = min(kv, indices.shape[1] - 1)
            count = counts[row, listed].item()
            tokens = [start + token for token in indices[row, listed, :count].tolist()] + list(range(end - own, end))
            k, v = (buffer[row, kv, tokens].to(dtype) for buffer in (rows.keys, rows.values))
            q = rows.query[row, head, queries - own :].to(dtype)
            slots = torch.arange(count + own, device=device)
            if rope:
                k, q = rotate(k, slots, **rope), rotate(q, slots[count:], **rope)
            scores = (q @ k.T) * (head_dim**-0.5 if scale is None else scale)
            scores = scores.masked_fill(slots > slots[count:, None], float("-inf"))
            out[row, head, queries - own :] = scores.softmax(dim=1) @ v
            lse[row, head, queries - own :] = scores.logsumexp(dim=1)
    return out, lse


def _prefill(rows, indices, counts, rope, **options):
    return sparse_prefill(rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end, **rope, **options)


@pytest.mark.parametrize(
    ("lengths", "queries", "most", "shared", "rope", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([100, 1, 7, 40, 0], 5, 20, True, True, 2, 3, 64, torch.float32),
        ([200, 90, 33], 70, 63, False, True, 2, 7, 128, torch.bfloat16),
        ([150, 75], 70, 80, True, False, 1, 1, 80, torch.float16),
        ([300, 171], 1, 111, False, False, 2, 3, 128, torch.bfloat16),
        ([111], 1, 100, True, True, 1, 7, 80, torch.float32),
        ([64, 50, 3], 70, 9, True, True, 2, 1, 64, torch.float16),  # no row has a token before its chunk
        ([260, 70], 70, 130, True, True, 1, 3, 80, torch.bfloat16),
        ([90], 17, 40, True, True, 3, 2, 16, torch.float32),
        ([60], 17, 40, False, True, 2, 1, 256, torch.bfloat16),
        ([60, 20], 3, 40, False, True, 2, 2, 256, torch.float32),
        ([70], 9, 30, True, False, 2, 2, 33, torch.float32),
    ],
)
def test_error_is_bounded_by_the_eager_error(lengths, queries, most, shared, rope, kv_heads, group, head_dim, dtype):
    rows, *selection, table = _chunk(
        lengths, queries, most, shared=shared, rope=rope, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype
    )
    exact, exact_lse = _eager(rows, *selection, table, torch.float64)
    eager, eager_lse = _eager(rows, *selection, table, dtype)
    for impl in IMPLS:
        out, lse = _prefill(rows, *selection, table, impl=impl)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        allowed = allowed_error(eager, exact, head_dim, impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        assert torch.equal(lse.isinf(), exact_lse.isinf()), impl
        allowed_lse = allowed_error(eager_lse, exact_lse, head_dim, impl)
        assert (lse.double() - exact_lse).nan_to_num().abs().max().item() <= allowed_lse, impl


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_reference_is_exact_in_float64(rope, shared):
    rows, *rest = _chunk([100, 40, 9], 12, 30, shared=shared, rope=rope, group=3, dtype=torch.float64)
    result = _prefill(rows, *rest, scale=0.3, impl="reference")
    torch.testing.assert_close(result, _eager(rows, *rest, torch.float64, scale=0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_padded_row_equals_the_row_alone(impl):
    rows, indices, counts, rope = _chunk([60, 9, 80], 20, 30, shared=False, group=3)
    out, lse = _prefill(rows, indices, counts, rope, scale=0.3, impl=impl)
    for row, length in enumerate(rows.lengths):
        begin, own, one = 3 * row, min(length, 20), slice(row, row + 1)
        keys, values = (buffer[one, :, begin : begin + length] for buffer in (rows.keys, rows.values))
        alone = sparse_prefill(
            rows.query[one, :, 20 - own :], keys, values, indices[one], counts[one], int32([0]), int32([length]),
            scale=0.3, impl=impl, **rope,
        )  # fmt: skip
        result = (out[one, :, 20 - own :], lse[one, :, 20 - own :])
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)
        assert (out[one, :, : 20 - own] == 0).all()
        assert (lse[one, :, : 20 - own] == float("-inf")).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_but_the_chosen_tokens_and_the_chunk_is_read(impl):
    rows, indices, counts, rope = _chunk([90, 61], 10, 30, shared=False, group=2)
    expected = _prefill(rows, indices, counts, rope, impl=impl)
    for row, length in enumerate(rows.lengths):
        for head in range(2):
            chosen = indices[row, head, : counts[row, head].item()].tolist()
            for token in set(range(length - 10)) - set(chosen):
                rows.keys[row, head, 3 * row + token] = float("nan")
                rows.values[row, head, 3 * row + token] = float("inf")
    assert all(map(torch.equal, _prefill(rows, indices, counts, rope, impl=impl), expected))


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_may_lie_further_apart_than_32_bits_count(impl):
    rows, indices, counts, rope = _chunk([90], 3, 33)
    expected = _prefill(rows, indices, counts, rope, impl=impl)
    heads, queries, head_dim = rows.query.shape[1:]
    memory = torch.empty((1 << 30) * queries, dtype=torch.float16, device=device)  # on a CPU no memory until it is used
    far = memory.as_strided(rows.query.shape, (heads * head_dim, head_dim, 1 << 30, 1))
    rows.query = far.copy_(rows.query)
    rows.keys, rows.values = rows.keys.half(), rows.values.half()
    found = _prefill(rows, indices, counts, rope, impl=impl)
    torch.testing.assert_close(tuple(each.float() for each in found), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_query_is_a_decode_step(impl):
    rows, indices, counts, rope = _chunk([90, 61, 1], 1, 33, group=3)
    expected = _prefill(rows, indices, counts, rope, impl=impl)
    own = (rows.end - rows.start - 1)[:, None]
    with_own = torch.cat((indices, torch.full_like(indices[..., :1], -1)), dim=2)
    with_own.scatter_(2, counts[..., None].long(), own[..., None])
    arguments = (rows.query[:, :, 0], rows.keys, rows.values, with_own, counts + 1, rows.start, rows.end)
    decoded = sparse_decode(*arguments, block_size=1, **rope, impl=impl)
    torch.testing.assert_close(tuple(each[:, :, 0] for each in expected), decoded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_negative_scale(dtype, impl):
    rows, *selection, table = _chunk([60, 33], 5, 20, dtype=dtype, group=2, rope=False)
    exact, exact_lse = _eager(rows, *selection, table, torch.float64, -0.3)
    out, lse = _prefill(rows, *selection, table, scale=-0.3, impl=impl)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(impl):
    rows, *rest = _chunk([100], 12, 50, group=2)
    rows.query = rows.query * 1000
    result = tuple(each.double() for each in _prefill(rows, *rest, impl=impl))
    torch.testing.assert_close(result, _eager(rows, *rest, torch.float64), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_tiles_may_have_only_scores_of_minus_infinity(impl):
    rows, *rest = _chunk([320], 16, 256, group=1, rope=False)
    rows.query = rows.query.abs()
    first = rows.start.item()
    rows.keys[:, :, first : first + 200, 0] = -float("inf")
    result = tuple(each.double() for each in _prefill(rows, *rest, impl=impl))
    torch.testing.assert_close(result, _eager(rows, *rest, torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_compiled_is_one_node_with_the_results_of_an_eager_call(impl):
    torch._dynamo.reset()
    rows, indices, counts, rope = _chunk([40, 5], 7, 9, group=2)
    compiled = torch.compile(_prefill, fullgraph=True, backend="aot_eager")
    expected = _prefill(rows, indices, counts, rope, impl=impl)
    torch.testing.assert_close(compiled(rows, indices, counts, rope, impl=impl), expected)


def test_schema_and_fake_agree_with_a_call():
    rows, indices, counts, rope = _chunk([40, 5], 7, 9, group=2)
    arguments = {
        "query": rows.query, "keys": rows.keys, "values": rows.values, "block_indices": indices,
        "block_counts": counts, "seq_start": rows.start, "seq_end": rows.end, **rope,
    }  # fmt: skip
    check_schema("sparse_prefill", arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, 2, 64)}, ValueError, r"query has shape \[1, 2, 64\]; allowed"),
        ({"query": torch.zeros(1, 3, 4, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        ({"values": torch.zeros(1, 2, 3, 64)}, ValueError, r"values has shape \[1, 2, 3, 64\]; allowed"),
        ({"block_indices": torch.zeros(1, 3, 6).int()}, ValueError, r"block_indices has shape \[1, 3, 6\]; allowed"),
        ({"block_counts": torch.zeros(1, 2).int()}, ValueError, r"block_counts has shape \[1, 2\]; allowed"),
        ({"rope_sin": None}, ValueError, r"rope_sin is None; allowed: a tensor, because rope_cos is one"),
        ({"rope_cos": torch.zeros(9, 32)}, ValueError, r"slots=9 of rope_cos; allowed: at least n \+ queries=10"),
        ({"rope_sin": torch.zeros(10, 64)}, ValueError, r"rope_sin has shape \[10, 64\]; allowed"),
        ({"rope_cos": torch.zeros(10, 32).double()}, TypeError, r"rope_cos has dtype torch.float64; allowed"),
        ({"seq_end": torch.zeros(1)}, TypeError, r"seq_end has dtype torch.float32; allowed"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows, indices, counts, rope = _chunk([20], 4, 6)
    arguments = {
        "query": rows.query, "keys": rows.keys, "values": rows.values, "block_indices": indices,
        "block_counts": counts, "seq_start": rows.start, "seq_end": rows.end, **rope,
    }  # fmt: skip
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        sparse_prefill(**(arguments | change))
