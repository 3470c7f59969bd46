import pytest
import torch
from hf_sparse_attn_kernels import runs_prefill

from tests.ops.helpers import check_schema
from tests.ops.runs.inputs import attend, make_runs

IMPLS = ("reference",)
CASES = [
    ([63, 111], [17, 40], 17, {"group": 3, "head_dim": 80, "dtype": torch.bfloat16}),
    ([200, 90], [70, 5], 9, {"group": 2}),  # the second row's first queries are padding
    ([300], [12, 33, 1], 12, {"shared": True, "group": 4, "dtype": torch.float16}),
    ([150, 77], [20, 31], 20, {"in_place": True, "group": 7, "head_dim": 128, "dtype": torch.bfloat16}),
    ([40, 33], [64, 65], 1, {"kv_heads": 5, "head_dim": 32}),
]


@pytest.mark.parametrize(("sizes", "tails", "queries", "options"), CASES)
def test_error_is_bounded_by_the_eager_error(sizes, tails, queries, options):
    runs = make_runs(sizes, tails, queries=queries, **options)
    exact, exact_lse = attend(runs, torch.float64)
    dtype = runs.arguments["query"].dtype
    allowed = 2 * (attend(runs, dtype)[0].double() - exact).abs().max().item() + 1e-6
    for impl in IMPLS:
        out, lse = runs_prefill(**runs.arguments, impl=impl)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        nothing = exact_lse == float("-inf")
        assert (out[nothing] == 0).all()


def test_reference_is_exact_in_float64(monkeypatch):
    runs = make_runs([100, 40], [30, 20], queries=30, group=3, dtype=torch.float64, in_place=True)
    exact = attend(runs, torch.float64, scale=0.7)
    for at_once in (1 << 24, 1000):  # all queries, and a few at a time
        monkeypatch.setattr("hf_sparse_attn_kernels.runs.reference.SCORES_AT_ONCE", at_once)
        out = runs_prefill(**runs.arguments, scale=0.7, impl="reference")
        torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


def test_schema():
    runs = make_runs([20], [6], queries=4)
    check_schema("runs_prefill", runs.arguments | {"impl": "reference"})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, 2, 64)}, ValueError, r"query has shape \[1, 2, 64\]; allowed: \[batch, q_heads, q"),
        ({"query": torch.zeros(1, 2, 64, 4).mT}, ValueError, r"query has stride 4 in its last dimension; allowed: 1"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    runs = make_runs([20], [6], queries=4)
    change = {name: value.to(runs.arguments["query"].device) for name, value in change.items()}
    with pytest.raises(error, match=message):
        runs_prefill(**(runs.arguments | change))
