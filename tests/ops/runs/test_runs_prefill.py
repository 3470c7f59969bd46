import pytest
import torch
from hf_sparse_attn_kernels import runs_decode, runs_prefill

from tests.ops.helpers import IMPLS, allowed_error, check_schema, device, grid, int32
from tests.ops.runs.inputs import attend, make_runs

CASES = [
    ([63, 111], [17, 40], 17, {"group": 3, "head_dim": 80, "dtype": torch.bfloat16}),
    ([200, 90], [70, 5], 9, {"group": 2}),  # the second row's first queries are padding
    ([300], [12, 33, 1], 12, {"shared": True, "group": 4, "dtype": torch.float16}),
    ([150, 77], [20, 31], 20, {"in_place": True, "group": 7, "head_dim": 128, "dtype": torch.bfloat16}),
    ([40, 33], [64, 65], 1, {"kv_heads": 5, "head_dim": 32}),
    ([90], [130], 37, {"kv_heads": 4, "dtype": torch.float16}),  # a tail longer than the queries
    grid([260, 1], [70, 80], 70, {"group": 3, "kv_heads": 1, "dtype": torch.bfloat16}),
    ([60], [20], 17, {"head_dim": 256, "dtype": torch.bfloat16}),
    grid([60, 20], [9, 3], 3, {"head_dim": 256, "group": 2}),
    ([70], [9], 9, {"head_dim": 33, "group": 4}),
]
LAUNCHER = "hf_sparse_attn_kernels.runs.prefill"


@pytest.mark.parametrize(("sizes", "tails", "queries", "options"), CASES)
def test_error_is_bounded_by_the_eager_error(sizes, tails, queries, options):
    runs = make_runs(sizes, tails, queries=queries, **options)
    exact, exact_lse = attend(runs, torch.float64)
    query = runs.arguments["query"]
    eager, _ = attend(runs, query.dtype)
    for impl in IMPLS:
        out, lse = runs_prefill(**runs.arguments, impl=impl)
        assert out.dtype == query.dtype
        assert lse.dtype == torch.float32
        allowed = allowed_error(eager, exact, query.shape[-1], impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        nothing = exact_lse == float("-inf")
        assert (out[nothing] == 0).all()


def assert_is_exact(runs, impl, scale=None):
    exact, exact_lse = attend(runs, torch.float64, scale)
    out, lse = runs_prefill(**runs.arguments, scale=scale, impl=impl)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("least_tiles", "waves"), [(1, 1), (1, 3), (2, 20), (1, 20)])
def test_columns_are_cut_anywhere(least_tiles, waves, monkeypatch):
    monkeypatch.setattr(f"{LAUNCHER}.LEAST_TILES", least_tiles)
    monkeypatch.setattr(f"{LAUNCHER}.WAVES", waves)
    monkeypatch.setattr(f"{LAUNCHER}.multiprocessors", lambda device: 2)
    # Heads choose 30 %, 5 %, none and all. The last one's columns have 11 tiles of 32 keys, in 1, 3, 6 or 11 chunks.
    runs = make_runs([200, 260], [41, 63], queries=13, group=3, head_dim=16)
    assert_is_exact(runs, "triton")


@pytest.mark.parametrize("tile", [32, 64])
def test_whole_tiles(tile):
    runs = make_runs([tile], [tile], queries=tile, kv_heads=4, head_dim=16)  # the fourth head chooses all
    assert len(runs.chosen[0][3]) == tile
    assert_is_exact(runs, "triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_without_a_choice_this_is_causal_attention_to_the_tail(impl):
    runs = make_runs([50, 20], [40, 21], queries=30, group=2)
    runs.arguments["run_counts"].zero_()
    runs.arguments["run_indices"].fill_(-1)
    runs.chosen = [[[], []], [[], []]]
    for name in ("context_keys", "context_values"):
        runs.arguments[name].fill_(float("nan"))
    assert_is_exact(runs, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_padding_only(impl):
    runs = make_runs([50, 20], [0, 5], queries=6, group=2)
    runs.arguments["query"][0] = float("nan")
    runs.arguments["query"][1, :, 0] = float("nan")
    out, lse = runs_prefill(**runs.arguments, impl=impl)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    assert (out[1, :, 0] == 0).all()
    assert out[1, :, 1:].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [-0.4, 0.0, 0.3])
def test_any_scale(impl, scale):
    assert_is_exact(make_runs([80], [12], queries=9, group=3), impl, scale)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(impl):
    runs = make_runs([100], [12], queries=12, group=2)
    runs.arguments["query"] *= 1000
    out, _ = runs_prefill(**runs.arguments, impl=impl)
    torch.testing.assert_close(out.double(), attend(runs, torch.float64)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_tiles_may_have_only_scores_of_minus_infinity(impl):
    generator = torch.Generator().manual_seed(0)
    context, tail = (torch.randn(1, 1, size, 64, generator=generator) for size in (256, 16))
    values = torch.randn(1, 1, 272, 64, generator=generator).to(device)
    query = torch.rand(1, 1, 16, 64, generator=generator).to(device)
    context[:, :, :128, 0] = -float("inf")
    context, tail = context.to(device), tail.to(device)
    starts = torch.arange(0, 257, 16, device=device).int()[None, None]
    runs = starts, torch.arange(16, device=device).int()[None, None], int32([[16]])
    out, lse = runs_prefill(
        query,
        context,
        values[:, :, :256],
        int32([0]),
        *runs,
        tail,
        values[:, :, 256:],
        int32([0]),
        int32([16]),
        impl=impl,
    )
    scores = query[0, 0].double() @ torch.cat([context[0, 0], tail[0, 0]]).double().T / 8
    scores[:, 256:].masked_fill_(torch.ones(16, 16, device=device, dtype=torch.bool).triu(1), -float("inf"))
    torch.testing.assert_close(out[0, 0].double(), scores.softmax(1) @ values[0, 0].double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[0, 0].double(), scores.logsumexp(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_run_without_tokens_may_come_first(ordered, impl):
    """Its place is behind the context, where nothing may be read."""
    generator = torch.Generator().manual_seed(0)
    context, new = (torch.randn(1, 1, size, 16, generator=generator).to(device) for size in (8, 4))
    context[:, :, 5:] = float("nan")
    runs = (int32([[[0, 5, 5]]]), int32([[[1, 0]]]), int32([[2]]))
    order = {"token_order": int32([[[4, 2, 0, 1, 3]]])} if ordered else {}
    query = torch.randn(1, 1, 2, 16, generator=generator).to(device)
    out, _ = runs_prefill(
        query, context, context, int32([0]), *runs, new, new, int32([0]), int32([4]), **order, impl=impl
    )
    keys = torch.cat([context[0, 0, :5], new[0, 0]])
    scores = (query[0, 0] @ keys.T) * 0.25
    scores[0, 8] = -float("inf")
    torch.testing.assert_close(out[0, 0], scores.softmax(1) @ keys, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_query_is_a_decode_step(impl):
    runs = make_runs([90, 61], [1, 33], queries=1, group=3, in_place=True)
    out, lse = runs_prefill(**runs.arguments, impl=impl)
    query = runs.arguments.pop("query")[:, :, 0]
    decoded, decoded_lse = runs_decode(query, **runs.arguments, impl=impl)
    torch.testing.assert_close(out[:, :, 0], decoded, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[:, :, 0], decoded_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_do_not_influence_each_other(impl):
    runs = make_runs([70], [30, 9, 14], queries=12, group=2, shared=True)
    together = runs_prefill(**runs.arguments, impl=impl)
    for row in range(3):
        one = {name: x if x is None else x[row : row + 1] for name, x in runs.arguments.items()}
        for both, alone in zip(together, runs_prefill(**one, impl=impl), strict=True):
            torch.testing.assert_close(both[row : row + 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_compiled_is_one_node_with_the_results_of_an_eager_call(impl):
    torch._dynamo.reset()
    runs = make_runs([40, 15], [7, 9], queries=5, group=2)
    compiled = torch.compile(
        lambda **arguments: runs_prefill(**arguments, impl=impl), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(**runs.arguments), runs_prefill(**runs.arguments, impl=impl))


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
