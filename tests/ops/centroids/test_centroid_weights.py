import pytest
import torch
from hf_sparse_attn_kernels import centroid_weights

from tests.ops.centroids.context import NAN, exact_weights, make_lookup
from tests.ops.helpers import IMPLS, check_schema, device, grid, int32


def check_errors(lookup, scale=None):
    """The error of the kernels is bounded by that of the reference, both against float64."""
    exact = exact_weights(lookup, scale)
    largest = exact.max().item()
    errors = {}
    for impl in IMPLS:
        weights = centroid_weights(**vars(lookup), scale=scale, impl=impl)
        assert weights.dtype == torch.float32
        assert weights.shape == exact.shape
        assert torch.equal(weights == 0, exact.float() == 0), impl
        errors[impl] = (weights.double() - exact).abs().max().item()
    assert errors["reference"] <= 1e-5 * largest
    assert errors["triton"] <= 4 * errors["reference"] + 2e-6 * largest


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    ("clusters", "group", "head_dim", "dtype", "shared", "coarse"),
    [
        (17, 1, 64, torch.float32, True, 0),
        (300, 3, 80, torch.bfloat16, False, 0),
        (111, 4, 128, torch.float16, True, 7),
        (1, 3, 64, torch.bfloat16, False, 0),
        grid(63, 1, 80, torch.bfloat16, True, 9),
        grid(300, 4, 64, torch.float32, False, 30),
        grid(130, 9, 256, torch.bfloat16, False, 0),
    ],
)
def test_error_is_bounded_by_that_of_the_reference(queries, clusters, group, head_dim, dtype, shared, coarse):
    check_errors(
        make_lookup(
            clusters, group=group, queries=queries, head_dim=head_dim, dtype=dtype, shared=shared, coarse=coarse
        )
    )


@pytest.mark.parametrize(
    ("queries", "group", "counts"), [(63, 1, [63, 40, 0]), (30, 3, [1, 30, 17]), (1, 3, [0, 1, 1])]
)
@pytest.mark.parametrize("coarse", [0, 5])
def test_only_the_last_queries_count(queries, group, counts, coarse):
    lookup = make_lookup(90, batch=3, group=group, queries=queries, dtype=torch.bfloat16, counts=counts, coarse=coarse)
    check_errors(lookup)
    for impl in IMPLS:
        weights = centroid_weights(**vars(lookup), impl=impl)
        alone = [slice(row, row + 1) for row, count in enumerate(counts) if count]
        assert (weights[[row for row, count in enumerate(counts) if not count]] == 0).all()
        for row in alone:
            cut = {
                name: value if value is None else value[row]
                for name, value in vars(lookup).items()
                if name not in ("query", "num_queries")
            }
            query = lookup.query[row, :, queries - counts[row.start] :]
            torch.testing.assert_close(weights[row], centroid_weights(query, **cut, impl=impl), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("queries", [1, 70])
def test_work_split_over_many_programs(monkeypatch, queries):
    """Few heads and many clusters: the clusters of a head are divided, in the prefill also its queries."""
    from hf_sparse_attn_kernels.centroids import decode, prefill

    for launcher in (decode, prefill):
        monkeypatch.setattr(launcher, "multiprocessors", lambda device: 3)
    monkeypatch.setitem(prefill.TILES, "kept", 16)
    monkeypatch.setitem(prefill.TILES, "passing", 16)
    check_errors(make_lookup(160, batch=1, kv_heads=1, queries=queries, group=2, dtype=torch.bfloat16))


@pytest.mark.parametrize("queries", [1, 3])
def test_nothing_takes_part(queries):
    lookup = make_lookup(40, queries=queries, coarse=4)
    lookup.parent_threshold[1] = 2.0  # no parent of the second row passes
    lookup.cluster_sizes[0, 1] = 0
    check_errors(lookup)
    for impl in IMPLS:
        weights = centroid_weights(**vars(lookup), impl=impl)
        assert (weights[1] == 0).all()
        assert (weights[0, 1] == 0).all()


@pytest.mark.parametrize("queries", [1, 3])
def test_a_negative_threshold_lets_parents_of_weight_zero_pass(queries):
    lookup = make_lookup(40, queries=queries, coarse=4)
    lookup.parent_weights.zero_()
    lookup.parent_threshold.fill_(-1.0)
    flat = {name: getattr(lookup, name) for name in ("query", "centroids", "cluster_sizes")}
    for impl in IMPLS:
        assert torch.equal(centroid_weights(**vars(lookup), impl=impl), centroid_weights(**flat, impl=impl))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("impl", IMPLS)
def test_centroids_of_dropped_clusters_are_not_read(queries, impl):
    lookup = make_lookup(50, queries=queries, coarse=4)
    expected = centroid_weights(**vars(lookup), impl=impl)
    lookup.centroids[expected == 0] = NAN
    assert torch.equal(centroid_weights(**vars(lookup), impl=impl), expected)


@pytest.mark.parametrize("queries", [1, 3])
def test_large_scores_stay_finite(queries):
    """The maximum is subtracted: scores of several thousands, of both signs, and one key that takes all the weight."""
    lookup = make_lookup(60, queries=queries, scale=4000.0)
    for scale in (None, -0.3):
        for impl in IMPLS:
            weights = centroid_weights(**vars(lookup), scale=scale, impl=impl)
            torch.testing.assert_close(weights.double(), exact_weights(lookup, scale), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 4])
def test_reference_is_exact_in_float64(queries):
    lookup = make_lookup(60, group=3, queries=queries, dtype=torch.float64, coarse=5)
    lookup.parent_weights = lookup.parent_weights.double()
    weights = centroid_weights(**vars(lookup), scale=0.3, impl="reference")
    torch.testing.assert_close(weights, exact_weights(lookup, 0.3), rtol=1e-12, atol=1e-15)
    with pytest.raises(TypeError, match=r"query has dtype torch.float64; allowed for impl='triton'"):
        centroid_weights(**vars(lookup), impl="triton")


def test_reference_in_parts_is_the_same(monkeypatch):
    from hf_sparse_attn_kernels.centroids import reference

    lookup = make_lookup(30, queries=7, dtype=torch.float64, counts=[7, 4])
    expected = centroid_weights(**vars(lookup), impl="reference")
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", 3 * 2 * 2 * 30)  # three queries
    torch.testing.assert_close(centroid_weights(**vars(lookup), impl="reference"), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("queries", [1, 3])
@torch.no_grad()
def test_one_opaque_node(queries):
    lookup = make_lookup(30, queries=queries, counts=[queries, 1], coarse=3)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **tensors: centroid_weights(**tensors), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**vars(lookup)), centroid_weights(**vars(lookup)))
    check_schema("centroid_weights", vars(lookup))
    check_schema("centroid_weights", {name: getattr(lookup, name) for name in ("query", "centroids", "cluster_sizes")})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, 2, 16)}, ValueError, r"query has shape \[1, 2, 16\]; allowed: \[batch, q_heads"),
        ({"query": torch.zeros(1, 3, 2, 16)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        ({"query": torch.zeros(1, 2, 2, 8)}, ValueError, r"centroids has shape \[1, 2, 5, 16\]; allowed"),
        ({"query": torch.zeros(1, 2, 2, 16).half()}, TypeError, r"centroids has dtype torch.float32; allowed"),
        ({"cluster_sizes": torch.zeros(1, 2, 5)}, TypeError, r"cluster_sizes has dtype torch.float32; allowed"),
        ({"cluster_sizes": torch.zeros(1, 2, 4).int()}, ValueError, r"cluster_sizes has shape \[1, 2, 4\]; allowed"),
        ({"num_queries": torch.zeros(2).int()}, ValueError, r"num_queries has shape \[2\]; allowed: \[batch\] = \[1\]"),
        ({"parents": None}, ValueError, r"parents is None; allowed: all of parents, parent_weights, parent_threshold"),
        ({"parents": torch.zeros(1, 2, 5)}, TypeError, r"parents has dtype torch.float32; allowed: torch.int32"),
        ({"parent_weights": torch.zeros(1, 1, 3)}, ValueError, r"parent_weights has shape \[1, 1, 3\]; allowed"),
        (
            {"parent_weights": torch.zeros(1, 2, 3).half()},
            TypeError,
            r"parent_weights has dtype torch.float16; allowed",
        ),
        ({"parent_threshold": torch.zeros(2)}, ValueError, r"parent_threshold has shape \[2\]; allowed"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {
        "query": torch.zeros(1, 2, 2, 16, device=device),
        "centroids": torch.zeros(1, 2, 5, 16, device=device),
        "cluster_sizes": torch.ones(1, 2, 5, dtype=torch.int32, device=device),
        "num_queries": int32([2]),
        "parents": torch.zeros(1, 2, 5, dtype=torch.int32, device=device),
        "parent_weights": torch.zeros(1, 2, 3, device=device),
        "parent_threshold": torch.zeros(1, device=device),
    }
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        centroid_weights(**(arguments | change))
