import pytest
import torch
from hf_sparse_attn_kernels import page_bounds, page_scores, select_blocks

from tests.ops.helpers import IMPLS, device, exact_bounds, make_rows

CASES = [
    ([1, 15, 16, 17, 63], 2, 1, 64, torch.float32),
    ([1, 15, 16, 17, 63], 1, 3, 80, torch.bfloat16),
    ([200, 0, 130], 2, 7, 128, torch.float16),
    ([77, 300], 1, 8, 256, torch.float32),
    ([77, 300], 1, 9, 256, torch.bfloat16),
    ([1000, 640], 2, 4, 16, torch.float32),
]


def _inputs(lengths, kv_heads, group, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    lower, upper = exact_bounds(rows, 16, -(-rows.capacity // 16))
    return rows, lower, upper


@pytest.mark.parametrize("group_reduce", ["softmax", "mean", "max"])
@pytest.mark.parametrize(("lengths", "kv_heads", "group", "head_dim", "dtype"), CASES)
def test_scores_and_choice_agree(lengths, kv_heads, group, head_dim, dtype, group_reduce):
    rows, lower, upper = _inputs(lengths, kv_heads, group, head_dim, dtype)
    options = {"page_size": 16, "group_reduce": group_reduce}
    exact = page_scores(
        rows.query.double(), lower.double(), upper.double(), rows.start, rows.end, impl="reference", **options
    )
    assert exact.dtype == torch.float64
    chosen = []
    for impl in IMPLS:
        scores = page_scores(rows.query, lower, upper, rows.start, rows.end, impl=impl, **options)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=2e-5)
        for row, length in enumerate(lengths):
            pages = -(-length // 16)
            assert scores[row, :, :pages].isfinite().all()
            assert (scores[row, :, pages:] == float("-inf")).all()
        chosen.append(select_blocks(scores, rows.start, rows.end, block_size=16, max_blocks=5, impl=impl)[0])
    assert torch.equal(chosen[0], chosen[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_score_bounds_every_token_and_group_reductions_follow_their_formula(impl):
    rows, lower, upper = _inputs([100, 40], 2, 3, 64, torch.float32)
    arguments = (lower, upper, rows.start, rows.end)
    per_head = torch.stack(
        [
            page_scores(rows.query[:, [head, 3 + head]].contiguous(), *arguments, page_size=16, impl=impl)
            for head in range(3)
        ]
    )  # a group of one with "softmax": the log-softmax over the pages
    raw = torch.stack(
        [
            page_scores(
                rows.query[:, [head, 3 + head]].contiguous(), *arguments, page_size=16, group_reduce="max", impl=impl
            )
            for head in range(3)
        ]
    )
    torch.testing.assert_close(per_head, raw.log_softmax(dim=-1), rtol=1e-5, atol=1e-5)
    grouped = {
        name: page_scores(rows.query, *arguments, page_size=16, group_reduce=name, impl=impl)
        for name in ("softmax", "mean", "max")
    }
    torch.testing.assert_close(grouped["softmax"], per_head.logsumexp(dim=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grouped["mean"], raw.mean(dim=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grouped["max"], raw.amax(dim=0), rtol=1e-5, atol=1e-5)

    tokens = rows.keys[0, :, :100]  # row 0 starts at position 0
    exact = torch.einsum("hgd,hnd->hgn", rows.query[0].view(2, 3, 64), tokens).amax(dim=1) / 8
    assert (grouped["max"][0].repeat_interleave(16, dim=-1)[:, :100] >= exact - 1e-5).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_softmax_reduction_does_not_underflow(impl):
    rows, lower, upper = _inputs([200], 1, 1, 64, torch.float32)
    scores = page_scores(
        rows.query, lower, upper, rows.start, rows.end, page_size=16, scale=1000.0, num_pages=13, impl=impl
    )
    assert scores.isfinite().all()
    assert scores.unique().numel() == 13
    assert scores.amin() < -1000


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("group_reduce", ["softmax", "mean", "max"])
def test_queries_of_any_magnitude_choose_the_same_pages_by_levels(scale, group_reduce):
    rows = make_rows([250], kv_heads=2, group=3, head_dim=64, dtype=torch.bfloat16)
    lower, upper = (torch.zeros(1, 2, 16, 64, dtype=torch.int8, device=device) for _ in range(2))
    exponents = {
        "page_exponent": torch.zeros(1, 2, 16, dtype=torch.int8, device=device),
        "channel_exponent": torch.zeros(1, 2, 64, dtype=torch.int8, device=device),
    }
    ends = rows.start, rows.end
    page_bounds(rows.keys, lower, upper, *ends, page_size=16, num_new=250, impl="reference", **exponents)
    options = {"page_size": 16, "group_reduce": group_reduce, **exponents}
    found, chosen = {}, {}
    for impl in IMPLS:
        found[impl] = page_scores(rows.query * scale, lower, upper, *ends, impl=impl, **options)
        chosen[impl] = select_blocks(found[impl], *ends, block_size=16, max_blocks=6, impl=impl)[0]
    torch.testing.assert_close(found["triton"], found["reference"], rtol=2e-3, atol=2e-3 * min(scale, 1.0))
    assert torch.equal(chosen["triton"], chosen["reference"])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("group_reduce", ["softmax", "mean", "max"])
def test_leading_pages_only(impl, group_reduce):
    rows, lower, upper = _inputs([40, 17], 2, 3, 32, torch.float32)
    options = {"page_size": 16, "group_reduce": group_reduce, "impl": impl}
    every = page_scores(rows.query, lower, upper, rows.start, rows.end, **options)
    leading = page_scores(rows.query, lower, upper, rows.start, rows.end, num_pages=3, **options)
    assert leading.shape == (2, 2, 3)
    torch.testing.assert_close(leading, every[..., :3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_reduce": "sum"}, r"group_reduce='sum'; allowed: 'softmax', 'mean', 'max'"),
        ({"num_pages": 9}, r"num_pages=9; allowed: None, or 1 to max_pages=2"),
        ({"page_size": 24}, r"page_size=24; allowed: a power of two"),
        ({"query": torch.zeros(1, 3, 64)}, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
    ],
)
def test_errors_name_the_argument(change, message):
    rows, lower, upper = _inputs([20], 2, 1, 64, torch.float32)
    arguments = {
        "query": rows.query,
        "page_min": lower,
        "page_max": upper,
        "seq_start": rows.start,
        "seq_end": rows.end,
        "page_size": 16,
    }
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        page_scores(**(arguments | change))


def test_triton_refuses_wide_heads_and_float64():
    for head_dim, dtype, error in ((264, torch.float32, ValueError), (64, torch.float64, TypeError)):
        rows, lower, upper = _inputs([20], 1, 1, head_dim, dtype)
        with pytest.raises(error, match="allowed for impl='triton'"):
            page_scores(rows.query, lower, upper, rows.start, rows.end, page_size=16, impl="triton")
