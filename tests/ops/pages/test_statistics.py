"""Bounds that hold another statistic than minimum and maximum: the cuboid mean, and the mean of representative keys."""

import pytest
import torch
from hf_sparse_attn_kernels import append_and_select, page_bounds, page_scores
from hf_sparse_attn_kernels.pages import reference_bounds

from tests.ops.helpers import (
    BOUNDS,
    IMPLS,
    Rows,
    dequantized,
    device,
    empty_bounds,
    exact_levels,
    grid,
    int32,
    make_rows,
)

STATISTICS = ("cuboid_mean", "representative")


def _update(rows, bounds, statistic, impl, *, page_size=16, num_new=10_000, end=None):
    ends = rows.end if end is None else end
    row_bounds = {"seq_start": rows.start, "seq_end": ends, "page_size": page_size, "num_new": num_new}
    page_bounds(rows.keys, **row_bounds, statistic=statistic, impl=impl, **bounds)


def _defined(keys, statistic):
    """The definition for the keys of one page and KV head, float64 [tokens, head_dim]."""
    if statistic == "cuboid_mean":
        centre = (keys.amax(dim=0) + keys.amin(dim=0)) / 2
        deviation = (centre - keys).abs().mean(dim=0)
        return centre - deviation, centre + deviation
    products = keys @ keys.mean(dim=0)
    best = sorted(range(len(keys)), key=lambda token: (-products[token].item(), token))[:4]
    return (keys[best].mean(dim=0),) * 2


def _expected(rows, page_size, statistic, num_new=10_000):
    """Both bounds of every page that holds one of the last `num_new` tokens, float64; NaN elsewhere."""
    batch, kv_heads, capacity, head_dim = rows.keys.shape
    lower = torch.full((batch, kv_heads, -(-capacity // page_size), head_dim), float("nan"), device=device).double()
    upper = lower.clone()
    for row, length in enumerate(rows.lengths):
        for page in range(max(0, length - num_new) // page_size, -(-length // page_size)):
            tokens = slice(3 * row + page * page_size, 3 * row + min((page + 1) * page_size, length))
            for head in range(kv_heads):
                keys = rows.keys[row, head, tokens].double()
                lower[row, head, page], upper[row, head, page] = _defined(keys, statistic)
    return lower, upper


def _assert_same(bounds, expected):
    for name, tensor in bounds.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize(
    ("lengths", "page_size", "num_new", "kv_heads", "head_dim", "dtype"),
    [
        ([1, 15, 16, 17, 63], 16, 1, 2, 64, torch.float32),
        ([33, 0, 48, 5], 16, 17, 3, 80, torch.bfloat16),
        ([111, 63, 1], 32, 40, 1, 128, torch.float16),
        ([7, 0, 3], 1, 2, 2, 16, torch.float32),
        ([70, 5], 64, 1000, 1, 256, torch.bfloat16),
        grid([300, 257], 256, 3, 1, 8, torch.float32),
        grid([9, 2, 3], 2, 1000, 2, 96, torch.bfloat16),
    ],
)
def test_touched_pages_follow_the_definition(impl, statistic, lengths, page_size, num_new, kv_heads, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    bounds = empty_bounds(rows, page_size, int8=False)
    _update(rows, bounds, statistic, impl, page_size=page_size, num_new=num_new)
    # Means are of float32 precision, then rounded once: a few units in the last place of float32, half of one of dtype.
    largest = rows.keys.nan_to_num().abs().max().item()
    tolerance = 4 * torch.finfo(torch.float32).eps * largest
    for name, expected in zip(BOUNDS, _expected(rows, page_size, statistic, num_new), strict=True):
        rounding = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(bounds[name].double(), expected, rtol=rounding, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_reference_takes_float64(statistic):
    rows = make_rows([37, 20], head_dim=48, dtype=torch.float64)
    bounds = empty_bounds(rows, 8, int8=False)
    _update(rows, bounds, statistic, "reference", page_size=8)
    for name, expected in zip(BOUNDS, _expected(rows, 8, statistic), strict=True):
        torch.testing.assert_close(bounds[name], expected, rtol=1e-14, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype"),
    [(16, 80, torch.float32), (64, 32, torch.bfloat16), (8, 96, torch.float16), grid(128, 16, torch.float32)],
)
def test_implementations_agree_to_the_bit(page_size, head_dim, dtype, statistic, int8, monkeypatch):
    rows = make_rows([63, 0, 1, 17], kv_heads=2, head_dim=head_dim, dtype=dtype)
    rows.keys[:, :, 40:] *= 30
    results = []
    for impl, on_host in (("triton", True), ("reference", True), ("reference", False)):
        if not on_host:  # as for CUDA tensors, whose lengths the reference does not read
            monkeypatch.setattr(reference_bounds, "host_lengths", lambda *rows: None)
        bounds = empty_bounds(rows, page_size, int8=int8)
        _update(rows, bounds, statistic, impl, page_size=page_size)
        _update(rows, bounds, statistic, impl, page_size=page_size, num_new=3)
        results.append(bounds)
    _assert_same(results[0], results[1])
    _assert_same(results[2], results[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("splits", [(1, 40), grid((21, 2, 16, 3))])
def test_bounds_do_not_depend_on_the_split_into_calls(splits, statistic, int8, impl):
    rows = make_rows([50, 31], head_dim=16)
    rows.keys[1, :, 3:8] /= 500  # a quiet beginning
    rows.keys[0, 0, 20:] *= 30  # one head grows louder
    bounds, expected = (empty_bounds(rows, 16, int8=int8) for _ in range(2))
    end = 0
    for count in (*splits, 50 - sum(splits)):
        end += count
        now = torch.minimum(rows.start + end, rows.end)
        _update(rows, bounds, statistic, impl, num_new=count, end=now)
    _update(rows, expected, statistic, impl)
    _assert_same(bounds, expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_appending_token_by_token_equals_all_at_once(statistic, int8, impl):
    """The page of a new token is computed again from its keys: no rounding is kept from step to step."""
    lengths, first = [20, 11], 7
    rows = make_rows(lengths, head_dim=16, dtype=torch.bfloat16)
    bounds, expected = (empty_bounds(rows, 8, int8=int8) for _ in range(2))
    _update(rows, bounds, statistic, impl, page_size=8, end=rows.end - first)
    given = {name: tensor.clone() for name, tensor in bounds.items()}
    keys, values = (torch.full_like(rows.keys, float("nan")) for _ in range(2))
    for row, length in enumerate(lengths):
        held = slice(3 * row, 3 * row + length - first)
        keys[row, :, held] = rows.keys[row, :, held]
    for missing in range(first - 1, -1, -1):
        end = rows.end - missing
        token = torch.stack([rows.keys[row, :, last - 1] for row, last in enumerate(end.tolist())])
        append_and_select(
            rows.query, token, token, keys, values, seq_start=rows.start, seq_end=end, page_size=8, max_blocks=3,
            recent_blocks=1, statistic=statistic, impl=impl, **bounds,
        )  # fmt: skip
    if int8:  # single tokens raise no channel exponent
        assert torch.equal(bounds["channel_exponent"], given["channel_exponent"])
        expected["channel_exponent"].copy_(given["channel_exponent"])
        for row, length in enumerate(lengths):
            for page in range(-(-length // 8)):
                upto = int32([int(start) for start in rows.start])
                upto[row] += min(length, 8 * (page + 1))
                _update(rows, expected, statistic, "reference", page_size=8, num_new=1, end=upto)
    else:
        _update(rows, expected, statistic, "reference", page_size=8)
    _assert_same(bounds, expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_bounds_in_8_bits_are_outward_and_tight(statistic, impl):
    rows = make_rows([63, 40], head_dim=64)
    rows.keys *= torch.logspace(-3, 3, 64, base=10.0, device=device)  # channels of every magnitude
    bounds = empty_bounds(rows, 16, int8=True)
    _update(rows, bounds, statistic, impl)
    # The exponents of channels are those of the keys.
    assert torch.equal(bounds["channel_exponent"], exact_levels(rows, 16)["channel_exponent"])
    lower, upper = dequantized(bounds)
    exact_lower, exact_upper = _expected(rows, 16, statistic)
    for row, length in enumerate(rows.lengths):
        pages = slice(0, -(-length // 16))
        exponents = bounds["channel_exponent"][row, :, None].double() + bounds["page_exponent"][row, ..., None].double()
        level = exponents.exp2()[:, pages]
        for gap in (exact_lower[row] - lower[row], upper[row] - exact_upper[row]):
            assert (gap[:, pages] >= -1e-5 * level).all()
            assert (gap[:, pages] < 1.00001 * level).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lower_index_wins_among_equal_representatives(impl, dtype):
    keys = torch.eye(8, device=device, dtype=dtype)[None, None]  # k.mean(k) is 1 / 8 for all
    keys = torch.cat((keys, keys.flip(2)), dim=2)
    rows = Rows(keys, keys, keys[:, :, 0], int32([0]), int32([15]), [15])
    bounds = empty_bounds(rows, 8, int8=False)
    _update(rows, bounds, "representative", impl, page_size=8)
    first, last = torch.tensor([[0.25] * 4 + [0.0] * 4, [0.0] * 4 + [0.25] * 4], device=device, dtype=dtype)
    for name in BOUNDS:
        assert torch.equal(bounds[name][0, 0], torch.stack((first, last)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_representative_scores_as_the_sum_of_its_keys(int8, impl):
    """InfLLM adds q.k of the representatives; the page's score is a quarter of that."""
    rows = make_rows([32], kv_heads=1, group=3, head_dim=64)
    bounds = empty_bounds(rows, 16, int8=int8)
    _update(rows, bounds, "representative", impl)
    row_bounds = {"seq_start": rows.start, "seq_end": rows.end, "page_size": 16}
    scores = page_scores(rows.query, group_reduce="mean", scale=1.0, impl=impl, **row_bounds, **bounds)
    for page in range(2):
        keys = rows.keys[0, 0, 16 * page : 16 * (page + 1)].double()
        best = keys[(keys @ keys.mean(dim=0)).topk(4)[1]]
        sums = (rows.query[0].double() @ best.T).sum(dim=1)  # [query heads]
        # Rounded outwards, a score is at most a level of each channel above that.
        error = (rows.query[0].double().abs() @ _levels(bounds, page)).mean() if int8 else 1e-5
        assert -1e-5 <= scores[0, 0, page] - sums.mean() / 4 <= error


def _levels(bounds, page):
    """The size of a level of each channel of a page, in the first row and KV head."""
    return (bounds["channel_exponent"][0, 0].double() + bounds["page_exponent"][0, 0, page].double()).exp2()


def test_errors_name_the_argument():
    rows = make_rows([20])
    arguments = {"seq_start": rows.start, "seq_end": rows.end, "page_size": 16, "statistic": "mean"}
    arguments |= empty_bounds(rows, 16, int8=False)
    token = rows.keys[:, :, 0]
    message = r"statistic='mean'; allowed: 'minmax', 'cuboid_mean', 'representative'"
    with pytest.raises(ValueError, match=message):
        page_bounds(rows.keys, num_new=1, **arguments)
    with pytest.raises(ValueError, match=message):
        append_and_select(
            rows.query, token, token, rows.keys, rows.values, max_blocks=2, recent_blocks=1, **arguments
        )  # fmt: skip
