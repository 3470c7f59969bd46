import pytest
import torch
from hf_sparse_attn_kernels import dense_decode

from tests.ops.helpers import IMPLS, allowed_error, device, int32, make_rows


def _eager(rows, dtype, scale=None):
    """Plain attention of each query head over its row, every step rounded to `dtype`."""
    batch, q_heads, head_dim = rows.query.shape
    group = q_heads // rows.keys.shape[1]
    out = torch.zeros(batch, q_heads, head_dim, device=device, dtype=dtype)
    lse = torch.full((batch, q_heads), float("-inf"), device=device, dtype=dtype)
    for row, length in enumerate(rows.lengths):
        tokens = slice(3 * row, 3 * row + length)
        for head in range(q_heads if length else 0):
            k, v = (buffer[row, head // group, tokens].to(dtype) for buffer in (rows.keys, rows.values))
            scores = (k @ rows.query[row, head].to(dtype)) * (head_dim**-0.5 if scale is None else scale)
            out[row, head] = scores.softmax(dim=0) @ v
            lse[row, head] = scores.logsumexp(dim=0)
    return out, lse


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([1, 15, 16, 17, 63, 0], 2, 1, 64, torch.float32),
        ([1, 127, 128, 129], 1, 3, 80, torch.bfloat16),
        ([63, 17, 200], 2, 7, 128, torch.float16),
        ([1000, 0, 333], 2, 8, 64, torch.bfloat16),
        ([200, 77], 1, 9, 256, torch.float32),
        ([300], 12, 1, 32, torch.float32),
    ],
)
def test_error_is_bounded_by_the_eager_error(lengths, kv_heads, group, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    exact, exact_lse = _eager(rows, torch.float64)
    eager, _ = _eager(rows, dtype)
    arguments = (rows.query, rows.keys, rows.values, rows.start, rows.end)
    for impl in IMPLS:
        out, lse = dense_decode(*arguments, impl=impl)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        allowed = allowed_error(eager, exact, head_dim, impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        for row, length in enumerate(lengths):
            assert length > 0 or (out[row] == 0).all()


def test_reference_is_exact_in_float64():
    rows = make_rows([100, 40], group=3, dtype=torch.float64)
    out, lse = dense_decode(rows.query, rows.keys, rows.values, rows.start, rows.end, scale=0.7, impl="reference")
    exact, exact_lse = _eager(rows, torch.float64, scale=0.7)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(impl):
    rows = make_rows([300], kv_heads=1, group=2)
    rows.query = rows.query * 1000
    out, lse = dense_decode(rows.query, rows.keys, rows.values, rows.start, rows.end, impl=impl)
    exact, exact_lse = _eager(rows, torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_counter_adds_every_token(impl):
    rows = make_rows([40, 0, 17], kv_heads=3, group=2)
    counter = torch.tensor([1, 2, 3, 4], device=device)
    for _ in range(2):
        dense_decode(rows.query, rows.keys, rows.values, rows.start, int32([40, 2, 23]), counter=counter, impl=impl)
    assert counter.tolist() == [1 + 2 * 3 * 57, 2 + 2 * 3 * 57, 3, 4 + 2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": torch.zeros(1, 2, 3, 64)}, ValueError, r"values has shape \[1, 2, 3, 64\]; allowed"),
        ({"keys": torch.zeros(1, 2, 25, 64).half()}, TypeError, r"keys has dtype torch.float16; allowed"),
        ({"query": torch.zeros(1, 3, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        ({"query": torch.zeros(1, 2, 64).int()}, TypeError, r"query has dtype torch.int32; allowed"),
        ({"seq_start": torch.zeros(2).int()}, ValueError, r"seq_start has shape \[2\]; allowed: \[batch\] = \[1\]"),
        ({"counter": torch.zeros(4).int()}, TypeError, r"counter has dtype torch.int32; allowed: torch.int64"),
        ({"impl": "flash"}, ValueError, r"impl='flash'; allowed: None, 'triton', 'reference'"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows = make_rows([20])
    arguments = {
        "query": rows.query,
        "keys": rows.keys,
        "values": rows.values,
        "seq_start": rows.start,
        "seq_end": rows.end,
    }
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        dense_decode(**(arguments | change))
