"""Bounds in 8 bits: `page_bounds` writes them, `page_scores` uses them."""

import pytest
import torch
from hf_sparse_attn_kernels import page_bounds, page_scores
from hf_sparse_attn_kernels.pages import reference_bounds
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.helpers import (
    BOUNDS,
    IMPLS,
    Rows,
    dequantized,
    device,
    empty_bounds,
    exact_bounds,
    exact_levels,
    int32,
    make_rows,
)


def _update(rows, bounds, impl, *, page_size=16, num_new=10_000, end=None):
    page_bounds(
        rows.keys,
        seq_start=rows.start,
        seq_end=rows.end if end is None else end,
        page_size=page_size,
        num_new=num_new,
        impl=impl,
        **bounds,
    )


def _assert_same(bounds, expected):
    for name, tensor in bounds.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "page_size", "kv_heads", "head_dim", "dtype"),
    [
        ([1, 15, 16, 17, 63], 16, 2, 64, torch.float32),
        ([33, 0, 48, 5], 16, 1, 128, torch.bfloat16),
        ([7, 0, 3], 1, 2, 96, torch.float16),
        ([70, 64], 32, 1, 256, torch.bfloat16),
        ([50, 21], 8, 3, 80, torch.float32),
    ],
)
def test_new_rows_are_exact_and_the_rest_untouched(impl, lengths, page_size, kv_heads, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    rows.keys.mul_(torch.logspace(-3, 3, head_dim, base=10.0, device=device).to(dtype))  # channels of every magnitude
    rows.keys[..., 3] = rows.keys[..., 3].nan_to_num().zero_()
    bounds = empty_bounds(rows, page_size, int8=True)
    _update(rows, bounds, impl, page_size=page_size)
    _assert_same(bounds, exact_levels(rows, page_size))


@pytest.mark.parametrize("impl", IMPLS)
def test_limits_of_every_exponent(impl):
    # 90 * 2 ** c and 127 * 2 ** p still fit, the next float does not.
    largest = torch.tensor([0.0, 90.0, 90.00001, 45.0, 1e-30, 1e19, 0.70312506, 2.0**-67 * 90])
    for scale in (1.4111112, 127 / 90, 1.42, 1000.0):
        rows = make_rows([17, 17], kv_heads=1, head_dim=8)
        rows.keys[0, 0, :17] = largest.to(device)
        rows.keys[1, 0, 3:20] = -largest.to(device)
        bounds = empty_bounds(rows, 16, int8=True)
        _update(rows, bounds, impl)
        _assert_same(bounds, exact_levels(rows, 16))
        channels = bounds["channel_exponent"].clone()
        rows.keys[0, 0, 16] *= scale
        rows.keys[1, 0, 19] *= scale
        _update(rows, bounds, impl, num_new=1)
        assert torch.equal(bounds["channel_exponent"], channels)
        lower, upper = dequantized(bounds)
        exact_lower, exact_upper = exact_bounds(rows, 16, lower.shape[2])
        assert (lower <= exact_lower.double())[:, :, :2].all()
        assert (upper >= exact_upper.double())[:, :, :2].all()


@pytest.mark.parametrize("impl", IMPLS)
def test_bounds_are_outward_and_tight(impl):
    rows = make_rows([100, 40], head_dim=64)
    rows.keys[:, :, 90:] *= 50  # a page beyond the range of the first tokens
    bounds = empty_bounds(rows, 16, int8=True)
    _update(rows, bounds, impl, end=torch.minimum(rows.start + 96, rows.end))
    for end in range(97, 101):  # as decode steps append them
        _update(rows, bounds, impl, num_new=1, end=torch.minimum(rows.start + end, rows.end))
    lower, upper = dequantized(bounds)
    exact_lower, exact_upper = (bound.double() for bound in exact_bounds(rows, 16, lower.shape[2]))
    for row, length in enumerate(rows.lengths):
        pages = slice(0, -(-length // 16))
        exponents = bounds["channel_exponent"][row, :, None].double() + bounds["page_exponent"][row, ..., None].double()
        level = exponents.exp2()[:, pages]
        for gap in (
            exact_lower[row, :, pages] - lower[row, :, pages],
            upper[row, :, pages] - exact_upper[row, :, pages],
        ):
            assert (gap >= 0).all()
            assert (gap < level).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_by_token_equals_recomputing(impl, dtype):
    rows = make_rows([37, 21], head_dim=16, dtype=dtype)
    rows.keys[:, :, 30:] *= 20
    bounds = empty_bounds(rows, 8, int8=True)
    start = 10
    options = {"page_size": 8}
    _update(rows, bounds, impl, end=rows.end - start, **options)
    channels = bounds["channel_exponent"].clone()
    for missing in range(start - 1, -1, -1):
        _update(rows, bounds, impl, num_new=1, end=rows.end - missing, **options)
    assert torch.equal(bounds["channel_exponent"], channels)

    scratch = empty_bounds(rows, 8, int8=True)
    scratch["channel_exponent"].copy_(channels)
    # Of the last page alone, from all of its tokens.
    _update(rows, scratch, impl, num_new=1, end=rows.end, **options)
    for row, length in enumerate(rows.lengths):
        for name in (*BOUNDS, "page_exponent"):
            page = (length - 1) // 8
            assert torch.equal(bounds[name][row, :, page], scratch[name][row, :, page]), name
    assert torch.equal(scratch["channel_exponent"], channels)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_single_token_sets_only_its_own_rows_exponents(impl):
    rows = make_rows([1, 2, 0, 16, 17, 40])
    rows.keys[:, :, 10:] *= 1000
    bounds = empty_bounds(rows, 16, int8=True)
    bounds["channel_exponent"].fill_(-3)
    _update(rows, bounds, impl, num_new=1)
    assert torch.equal(bounds["channel_exponent"][0], exact_levels(rows, 16)["channel_exponent"][0])
    assert (bounds["channel_exponent"][1:] == -3).all()


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("splits", [(1, 60), (2, 16, 17), (33, 2, 30, 2), (7, 7, 7, 40, 3)])
def test_bounds_do_not_depend_on_the_split_into_calls(splits, impl, on_host, monkeypatch):
    """A short first call, such as a chat's first turn, must not fix the exponents for later text."""
    if not on_host:  # as for CUDA tensors, whose lengths the reference does not read
        monkeypatch.setattr(reference_bounds, "host_lengths", lambda *rows: None)
    rows = make_rows([70, 70, 41], head_dim=32)
    rows.keys[1, :, 3:8] /= 500  # a quiet beginning
    rows.keys[0, 0, 20:] *= 30  # one head grows louder
    rows.keys[2, :, :, 5] *= 1e4
    bounds = empty_bounds(rows, 16, int8=True)
    end = 0
    for count in (*splits, 70 - sum(splits)):
        end += count
        if count > 1 or end == 1:
            now = torch.minimum(rows.start + end, rows.end)
            _update(rows, bounds, impl, num_new=count, end=now)
    _assert_same(bounds, exact_levels(rows, 16))


@pytest.mark.parametrize("impl", IMPLS)
def test_pages_are_recomputed_only_where_an_exponent_rises(impl):
    rows = make_rows([64, 64], kv_heads=2, head_dim=16)
    bounds = empty_bounds(rows, 16, int8=True)
    for row, start in enumerate(rows.start.tolist()):
        rows.keys[row, :, start] = 50.0  # louder than all that follows, but for one head
    _update(rows, bounds, impl, end=rows.start + 40)
    rows.keys[0, 1, 40:] *= 1000
    for name in BOUNDS:
        bounds[name][:, :, 0] = 99
    _update(rows, bounds, impl, num_new=24)
    is_stale = (bounds["page_min"][:, :, 0] == 99).all(dim=-1)
    louder = torch.tensor([[False, True], [False, False]], device=device)
    if impl == "reference":  # which recomputes the row's other heads to the same bounds
        assert not is_stale[louder].any()
        assert is_stale[1].all()
    else:
        assert torch.equal(is_stale, ~louder)


@settings(max_examples=20, deadline=None)
@given(
    # CUDA takes float32 below 2 ** -126 for 0, and bounds are scaled by up to 2 ** -20 here.
    values=st.lists(
        st.floats(-1e6, 1e6, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-30),
        min_size=4,
        max_size=40,
    ),
    split=st.integers(0, 9),
)
def test_any_finite_keys_are_bracketed(values, split):
    tokens = torch.tensor(values[: len(values) // 4 * 4]).view(1, 1, -1, 4).to(device)
    count = tokens.shape[2]
    rows = Rows(tokens, tokens, tokens[:, :, 0], int32([0]), int32([count]), [count])
    for impl in IMPLS:
        bounds = empty_bounds(rows, 4, int8=True)
        if split:
            _update(rows, bounds, impl, page_size=4, end=int32([min(split, count)]))
            for end in range(split + 1, count + 1):
                _update(rows, bounds, impl, page_size=4, num_new=1, end=int32([end]))
        else:
            _update(rows, bounds, impl, page_size=4)
            _assert_same(bounds, exact_levels(rows, 4))
        lower, upper = dequantized(bounds)
        exact_lower, exact_upper = exact_bounds(rows, 4, lower.shape[2])
        assert (lower <= exact_lower).all()
        assert (upper >= exact_upper).all()


@pytest.mark.parametrize("group_reduce", ["softmax", "mean", "max"])
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([1, 15, 16, 17, 63, 0], 2, 1, 64, torch.float32),
        ([200, 130], 2, 3, 128, torch.bfloat16),
        ([77, 300], 1, 9, 80, torch.float16),
    ],
)
def test_scores_follow_the_formula_and_bound_every_token(lengths, kv_heads, group, head_dim, dtype, group_reduce):
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    bounds = empty_bounds(rows, 16, int8=True)
    _update(rows, bounds, "reference")
    num_pages = -(-max(lengths) // 16)
    options = {"seq_start": rows.start, "seq_end": rows.end, "page_size": 16, "num_pages": num_pages}
    lower, upper = dequantized(bounds)
    exact = page_scores(
        rows.query.double(), lower, upper, group_reduce=group_reduce, impl="reference", **options
    )  # checked against the formula by the tests of bounds that are not quantized
    for impl in IMPLS:
        scores = page_scores(rows.query, group_reduce=group_reduce, impl=impl, **bounds, **options)
        assert scores.dtype == torch.float32
        # The kernels multiply in the query's precision.
        tolerance = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=tolerance)
        if group_reduce == "max":
            for row, length in enumerate(lengths):
                begin = 3 * row
                tokens = rows.keys[row, :, begin : begin + length].double()
                queries = rows.query[row].double().view(kv_heads, group, head_dim)
                products = (queries @ tokens.transpose(1, 2)).amax(dim=1) * head_dim**-0.5  # [kv_heads, length]
                bound = scores[row].repeat_interleave(16, dim=-1)[:, :length].double()
                assert (bound >= products - tolerance).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"page_exponent": None},
            ValueError,
            r"page_exponent is None; allowed: a tensor \[batch",
        ),
        (
            {"channel_exponent": None},
            ValueError,
            r"channel_exponent is None; allowed: a tensor",
        ),
        (
            {"page_exponent": torch.zeros(1, 2, 2)},
            TypeError,
            r"page_exponent has dtype torch.float32; allowed",
        ),
        (
            {"channel_exponent": torch.zeros(1, 2, 3).char()},
            ValueError,
            r"channel_exponent has shape \[1, 2, 3\]",
        ),
        ({"page_max": torch.zeros(1, 2, 2, 64)}, TypeError, r"page_max has dtype torch.float32; allowed: torch.int8"),
        (
            {"page_min": torch.zeros(1, 2, 2, 64), "page_max": torch.zeros(1, 2, 2, 64)},
            ValueError,
            r"page_exponent is given; allowed: None, because page_min has dtype torch.float32",
        ),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows = make_rows([20])
    bounds = empty_bounds(rows, 16, int8=True)
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        _update(rows, bounds | change, None)
    with pytest.raises(error, match=message):
        page_scores(rows.query, seq_start=rows.start, seq_end=rows.end, page_size=16, **(bounds | change))
