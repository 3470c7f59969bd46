import pytest
import torch
from hf_sparse_attn_kernels import centroid_weights, select_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.centroids.context import NAN, Lookup, chosen_runs, make_lookup, make_runs
from tests.ops.helpers import IMPLS, check_schema, device


def make_weights(runs, *, levels, seed=0):
    """Random weights with many ties: one of `levels` values from 0 to 1."""
    shape = runs.cluster_sizes.shape
    drawn = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(seed))
    return (drawn / (levels - 1)).to(device)


def check_choice(weights, runs, threshold, max_tokens=None):
    """Both implementations against the definition."""
    threshold = torch.tensor(threshold, dtype=torch.float32, device=device)
    expected = chosen_runs(weights, runs, threshold, max_tokens)
    num_runs = runs.run_clusters.shape[2]
    for impl in IMPLS:
        indices, counts = select_runs(weights, **vars(runs), threshold=threshold, max_tokens=max_tokens, impl=impl)
        assert indices.dtype == counts.dtype == torch.int32
        assert indices.shape == runs.run_clusters.shape
        padded = [[of_head + [-1] * (num_runs - len(of_head)) for of_head in of_row] for of_row in expected]
        assert indices.tolist() == padded, impl
        assert counts.tolist() == [[len(of_head) for of_head in of_row] for of_row in expected], impl


@pytest.mark.parametrize(("clusters", "shared", "always"), [(1, False, 0), (17, True, 2), (111, False, 1)])
@pytest.mark.parametrize("threshold", [(-1.0, 0.0), (0.5, 0.25), (0.9, 2.0)])
def test_runs_of_heavy_clusters_and_those_always_read(clusters, shared, always, threshold):
    runs = make_runs(clusters, shared=shared, always=always)
    check_choice(make_weights(runs, levels=5), runs, threshold)


@pytest.mark.parametrize("max_tokens", [1, 6, 7, 50, 150, 299, 10000])
@pytest.mark.parametrize("threshold", [(-1.0, 0.3), (0.0, 0.75)])
def test_a_cap_raises_the_threshold_as_little_as_possible(threshold, max_tokens):
    """6 tokens are read always. Clusters of equal weight are dropped together."""
    runs = make_runs(60, max_run=4, always=2)
    for levels in (4, 1000):
        check_choice(make_weights(runs, levels=levels), runs, threshold, max_tokens)


def test_a_cap_is_only_exceeded_by_what_is_always_read():
    runs = make_runs(80, always=3, max_run=4)  # 9 tokens
    weights = make_weights(runs, levels=400)
    lengths = runs.run_starts.diff(dim=2)
    threshold = torch.zeros(2, device=device)
    for impl in IMPLS:
        for max_tokens in (1, 8, 9, 40, 200):
            indices, _ = select_runs(weights, **vars(runs), threshold=threshold, max_tokens=max_tokens, impl=impl)
            tokens = lengths.gather(2, indices.clamp(min=0).long()).masked_fill(indices < 0, 0).sum(dim=2)
            assert (tokens <= max(max_tokens, 9)).all()
            assert (tokens >= 9).all()


@pytest.mark.parametrize("max_tokens", [None, 30])
def test_nan_is_never_chosen(max_tokens):
    runs = make_runs(40)
    weights = make_weights(runs, levels=50)
    weights[:, :, ::3] = NAN
    weights[1, 1] = NAN
    check_choice(weights, runs, (-1.0, -float("inf")), max_tokens)


@pytest.mark.parametrize("max_tokens", [None, 20])
def test_weights_from_the_least_to_infinity(max_tokens):
    runs = make_runs(40, always=1)
    weights = make_weights(runs, levels=200)
    weights[0] *= 1e-38
    weights[1] *= 1e-44  # denormal
    weights[:, :, 3] = float("inf")
    weights[:, :, 5] = 3e38
    weights[:, :, 7] = -0.0
    check_choice(weights, runs, (-0.0, 1e-45), max_tokens)


@pytest.mark.parametrize("counted_from", [2, 1000])
def test_runs_of_several_tiles(monkeypatch, counted_from):
    """The runs before a tile are counted by its own program, or by a launch before."""
    from hf_sparse_attn_kernels.centroids import cap, select

    monkeypatch.setattr(select, "COUNTED_FROM", counted_from)
    monkeypatch.setitem(select.TILE, "block_r", 64)
    monkeypatch.setitem(cap.TILE, "block", 128)
    runs = make_runs(300)
    assert runs.run_clusters.shape[2] > 6 * 64
    weights = make_weights(runs, levels=100)
    for max_tokens in (None, 200, 1000):
        check_choice(weights, runs, (0.1, 0.7), max_tokens)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), st.integers(0, 3), st.integers(0, 3), st.integers(2, 30), st.integers(0, 9),
    st.sampled_from([-1.0, 0.0, 0.3, 0.8, 1.0]), st.none() | st.integers(1, 400),
)  # fmt: skip
def test_matches_the_definition(clusters, always, absent, levels, seed, threshold, max_tokens):
    runs = make_runs(clusters, always=always, absent=absent, seed=seed)
    check_choice(make_weights(runs, levels=levels, seed=seed), runs, (threshold, 0.5), max_tokens)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("max_tokens", [None, 70])
def test_both_implementations_choose_the_same_runs_for_a_query(queries, max_tokens):
    """Thresholds lie between weights: only a rounding could make a difference."""
    runs = make_runs(64)
    lookup = make_lookup(64, queries=queries, scale=1.0)
    drawn = torch.randn(lookup.centroids.shape, generator=torch.Generator().manual_seed(0)).to(device)
    centroids = torch.where(lookup.centroids.isnan(), drawn, lookup.centroids)  # no two are equal
    lookup = Lookup(lookup.query, centroids, runs.cluster_sizes)
    ranked = centroid_weights(**vars(lookup), impl="reference").flatten(1).sort(dim=1)[0]
    threshold = (ranked[:, 90] + ranked[:, 91]) / 2
    first, second = (
        select_runs(
            centroid_weights(**vars(lookup), impl=impl),
            **vars(runs),
            threshold=threshold,
            max_tokens=max_tokens,
            impl=impl,
        )
        for impl in IMPLS
    )
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert (first[1] > 2).any()


def test_float64_only_in_the_reference():
    runs = make_runs(20)
    weights = make_weights(runs, levels=30).double()
    threshold = torch.full((2,), 0.5, device=device)
    first = select_runs(weights, **vars(runs), threshold=threshold, max_tokens=50, impl="reference")
    second = select_runs(weights.float(), **vars(runs), threshold=threshold, max_tokens=50, impl="reference")
    assert torch.equal(first[0], second[0])
    with pytest.raises(TypeError, match=r"weights has dtype torch.float64; allowed for impl='triton': torch.float32"):
        select_runs(weights, **vars(runs), threshold=threshold, impl="triton")


@pytest.mark.parametrize("max_tokens", [None, 30])
@torch.no_grad()
def test_one_opaque_node(max_tokens):
    runs = make_runs(20, shared=True)
    arguments = {
        "weights": make_weights(runs, levels=30), **vars(runs), "threshold": torch.full((2,), 0.5, device=device)
    }  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **tensors: select_runs(**tensors, max_tokens=max_tokens), fullgraph=True, backend="aot_eager"
    )
    for first, second in zip(compiled(**arguments), select_runs(**arguments, max_tokens=max_tokens), strict=True):
        assert torch.equal(first, second)
    check_schema("select_runs", arguments | {"max_tokens": max_tokens})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"weights": torch.zeros(1, 2, 5).half()},
            TypeError,
            r"weights has dtype torch.float16; allowed: torch.float32",
        ),
        (
            {"weights": torch.zeros(2, 5)},
            ValueError,
            r"weights has shape \[2, 5\]; allowed: \[batch, kv_heads, clusters",
        ),
        ({"weights": torch.zeros(1, 2, 4)}, ValueError, r"cluster_sizes has shape \[1, 2, 5\]; allowed"),
        ({"run_starts": torch.zeros(1, 2, 7).int()}, ValueError, r"run_starts has shape \[1, 2, 7\]; allowed: .* 8\]"),
        ({"run_clusters": torch.zeros(1, 2, 7)}, TypeError, r"run_clusters has dtype torch.float32; allowed"),
        ({"threshold": torch.zeros(2)}, ValueError, r"threshold has shape \[2\]; allowed: \[batch\] = \[1\]"),
        ({"threshold": torch.zeros(1).double()}, TypeError, r"threshold has dtype torch.float64; allowed"),
        ({"max_tokens": 0}, ValueError, r"max_tokens=0; allowed: an int of at least 1"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {
        "weights": torch.zeros(1, 2, 5, device=device),
        "cluster_sizes": torch.ones(1, 2, 5, dtype=torch.int32, device=device),
        "run_starts": torch.zeros(1, 2, 8, dtype=torch.int32, device=device),
        "run_clusters": torch.zeros(1, 2, 7, dtype=torch.int32, device=device),
        "threshold": torch.zeros(1, device=device),
    }
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        select_runs(**(arguments | change))
