import pytest
import torch
from hf_sparse_attn_kernels import dense_decode, dense_prefill

from tests.ops.helpers import IMPLS, allowed_error, check_schema, device, grid, make_rows


def _last_tokens(lengths, queries, **options):
    """Rows, and the queries of their last tokens as a strided view; NaN where a row has fewer tokens."""
    rows = make_rows(lengths, **options)
    batch, q_heads, head_dim = rows.query.shape
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(batch, queries, q_heads, head_dim, generator=generator)
    for row, length in enumerate(lengths):
        query[row, : max(0, queries - length)] = float("nan")
    return (query.to(device, rows.query.dtype).transpose(1, 2), rows.keys, rows.values, rows.start, rows.end)


def _eager(query, keys, values, start, end, dtype, scale=None):
    """Plain causal attention of each query head over its row, every step rounded to `dtype`."""
    _, q_heads, queries, head_dim = query.shape
    group = q_heads // keys.shape[1]
    out = torch.zeros(query.shape, device=device, dtype=dtype)
    lse = torch.full(query.shape[:3], float("-inf"), device=device, dtype=dtype)
    for row, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for token in range(max(0, queries - (last - first)), queries):
            tokens = slice(first, last - queries + 1 + token)
            for head in range(q_heads):
                k, v = (buffer[row, head // group, tokens].to(dtype) for buffer in (keys, values))
                scores = (k @ query[row, head, token].to(dtype)) * (head_dim**-0.5 if scale is None else scale)
                out[row, head, token] = scores.softmax(dim=0) @ v
                lse[row, head, token] = scores.logsumexp(dim=0)
    return out, lse


@pytest.mark.parametrize(
    ("lengths", "queries", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([200, 5, 0, 63], 5, 2, 4, 64, torch.float32),
        ([129, 3], 9, 1, 4, 128, torch.bfloat16),  # 36 queries in a tile of 64; a row shorter than the draft
        ([150], 17, 1, 7, 96, torch.float16),  # 119 queries: two launches of 9 and 8 tokens
        ([64, 81], 2, 2, 8, 80, torch.bfloat16),
        ([90], 8, 1, 3, 256, torch.float32),  # 24 queries, of which 16 fit: two launches
        ([40], 1, 2, 1, 64, torch.float32),
        grid([300], 12, 1, 1, 128, torch.float16),
        grid([70, 17], 16, 1, 9, 256, torch.bfloat16),
    ],
)
def test_error_is_bounded_by_the_eager_error(lengths, queries, kv_heads, group, head_dim, dtype):
    tensors = _last_tokens(lengths, queries, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    exact, exact_lse = _eager(*tensors, torch.float64)
    eager, _ = _eager(*tensors, dtype)
    for impl in IMPLS:
        out, lse = dense_prefill(*tensors, impl=impl)
        assert (out.shape, out.dtype, lse.dtype) == (tensors[0].shape, dtype, torch.float32)
        allowed = allowed_error(eager, exact, head_dim, impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        for row, length in enumerate(lengths):
            assert (out[row, :, : max(0, queries - length)] == 0).all()


def test_reference_is_exact_in_float64():
    tensors = _last_tokens([100, 4], 6, group=3, dtype=torch.float64)
    out, lse = dense_prefill(*tensors, scale=0.7, impl="reference")
    exact, exact_lse = _eager(*tensors, torch.float64, scale=0.7)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_single_token_attends_as_in_a_decode_step(impl):
    query, *rest = _last_tokens([70, 33], 1, group=4)
    out, lse = dense_prefill(query, *rest, impl=impl)
    expected, expected_lse = dense_decode(query[:, :, 0], *rest, impl=impl)
    torch.testing.assert_close(out[:, :, 0], expected)
    torch.testing.assert_close(lse[:, :, 0], expected_lse)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_without_tokens_are_zero(impl):
    out, lse = dense_prefill(*_last_tokens([0, 0], 3), impl=impl)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_schema():
    query, keys, values, start, end = _last_tokens([40, 17], 3, group=2)
    bounds = {"seq_start": start, "seq_end": end}
    check_schema("dense_prefill", {"query": query, "keys": keys, "values": values, **bounds})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, 2, 64)}, ValueError, r"query has shape \[1, 2, 64\]; allowed"),
        ({"query": torch.zeros(1, 3, 2, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        ({"query": torch.zeros(1, 2, 2, 64).int()}, TypeError, r"query has dtype torch.int32; allowed"),
        ({"values": torch.zeros(1, 2, 3, 64)}, ValueError, r"values has shape \[1, 2, 3, 64\]; allowed"),
        ({"seq_start": torch.zeros(2).int()}, ValueError, r"seq_start has shape \[2\]; allowed: \[batch\] = \[1\]"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    names = ("query", "keys", "values", "seq_start", "seq_end")
    arguments = dict(zip(names, _last_tokens([20], 2), strict=True))
    change = {name: value.to(device) for name, value in change.items()}
    with pytest.raises(error, match=message):
        dense_prefill(**(arguments | change))
