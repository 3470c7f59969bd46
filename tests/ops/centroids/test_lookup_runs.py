import pytest
import torch
from hf_sparse_attn_kernels import centroid_weights, lookup_runs, select_runs

from tests.ops.centroids.context import NAN, Lookup, make_lookup, make_runs
from tests.ops.helpers import IMPLS, check_schema, device, int32


def make_arguments(clusters, *, batch=2, kv_heads=2, group=1, head_dim=64, shared=False, coarse=0, **of_runs):
    """Arguments of `lookup_runs` for random clusters and their runs; thresholds lie between two weights of their row.

    Only a rounding could then make a difference between implementations.
    """
    runs = make_runs(clusters, batch=batch, kv_heads=kv_heads, shared=shared, **of_runs)
    lookup = make_lookup(
        clusters, batch=batch, kv_heads=kv_heads, group=group, head_dim=head_dim, shared=shared, coarse=coarse,
        dtype=of_runs.get("dtype", torch.float32), scale=1.0,
    )  # fmt: skip
    drawn = torch.randn(lookup.centroids.shape, generator=torch.Generator().manual_seed(0)).to(lookup.centroids)
    is_empty = (runs.cluster_sizes == 0)[..., None]
    lookup.centroids = torch.where(is_empty, NAN, torch.where(lookup.centroids.isnan(), drawn, lookup.centroids))
    lookup.cluster_sizes = runs.cluster_sizes
    if coarse:
        lookup.parents = torch.where(runs.cluster_sizes > 0, lookup.parents % coarse, 1 << 30).int()
    ranked = centroid_weights(**vars(lookup), impl="reference").flatten(1).sort(dim=1)[0]
    middle = int(0.8 * ranked.shape[1])
    threshold = (ranked[:, middle] + ranked[:, middle - 1]) / 2
    arguments = vars(lookup) | vars(runs) | {"query": lookup.query[:, :, 0], "threshold": threshold}
    return {name: value for name, value in arguments.items() if value is not None}


def composed(arguments, impl):
    """The choice of `centroid_weights` and `select_runs`."""
    of_lookup = {
        name: value for name, value in arguments.items() if name in Lookup.__dataclass_fields__ or name == "scale"
    }
    weights = centroid_weights(**of_lookup | {"query": arguments["query"][:, :, None]}, impl=impl)
    names = ("cluster_sizes", "run_starts", "run_clusters", "threshold", "max_tokens")
    return select_runs(weights, **{name: arguments[name] for name in names if name in arguments}, impl=impl)


def check_lookup(arguments):
    """Both implementations choose the same runs, which are those of the two ops."""
    outputs = {impl: lookup_runs(**arguments, impl=impl) for impl in IMPLS}
    for impl, (indices, counts, clusters_read) in outputs.items():
        expected_indices, expected_counts = composed(arguments, impl)
        assert torch.equal(indices, expected_indices), impl
        assert torch.equal(counts, expected_counts), impl
        assert indices.dtype == counts.dtype == clusters_read.dtype == torch.int32
        assert clusters_read.tolist() == taking_part(arguments), impl
    for first, second in zip(*outputs.values(), strict=True):
        assert torch.equal(first, second)
    return outputs["reference"]


def taking_part(arguments):
    """The clusters that take part, counted one at a time: [batch][kv_heads]."""
    counts = torch.zeros(arguments["run_clusters"].shape[:2], dtype=torch.int32)
    for row, head, cluster in (arguments["cluster_sizes"] > 0).nonzero().tolist():
        if "parents" in arguments:
            parent = arguments["parents"][row, head, cluster]
            counts[row, head] += bool(
                arguments["parent_weights"][row, head, parent] > arguments["parent_threshold"][row]
            )
        else:
            counts[row, head] += 1
    return counts.tolist()


@pytest.mark.parametrize("max_tokens", [None, (70, 0)])
@pytest.mark.parametrize(
    ("clusters", "group", "head_dim", "shared", "coarse"),
    [(17, 1, 64, True, 0), (111, 3, 80, False, 0), (63, 4, 128, True, 7), (140, 3, 64, False, 9), (1, 9, 32, False, 0)],
)
def test_chooses_what_the_two_ops_choose(clusters, group, head_dim, shared, coarse, max_tokens):
    arguments = make_arguments(clusters, group=group, head_dim=head_dim, shared=shared, coarse=coarse)
    if max_tokens is not None:
        arguments["max_tokens"] = int32(max_tokens)
    _, counts, _ = check_lookup(arguments)
    assert (counts >= 2).all()  # those read always
    assert clusters < 60 or max_tokens is not None or (counts > 2).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_a_scale(dtype):
    arguments = make_arguments(90, group=3)
    arguments |= {name: arguments[name].to(dtype) for name in ("query", "centroids")}
    arguments["threshold"] = torch.full((2,), 1e-3, device=device)
    _, counts, _ = check_lookup(arguments | {"scale": 0.05})
    assert (counts > 2).any()


def test_a_weight_equal_to_the_threshold_is_not_chosen():
    """The fused kernel compares the very weights that `centroid_weights` returns, to the last bit."""
    arguments = make_arguments(80, group=3, kv_heads=1)
    for impl in IMPLS:
        weights = centroid_weights(
            arguments["query"][:, :, None], arguments["centroids"], arguments["cluster_sizes"], impl=impl
        )
        for cluster in range(0, 80, 3):
            arguments["threshold"] = weights[:, 0, cluster].contiguous()
            indices, counts, _ = lookup_runs(**arguments, impl=impl)
            expected_indices, expected_counts = composed(arguments, impl)
            assert torch.equal(indices, expected_indices)
            assert torch.equal(counts, expected_counts)


def test_work_split_over_many_programs(monkeypatch):
    """Clusters in several splits, runs in several tiles."""
    from hf_sparse_attn_kernels.centroids import decode, lookup

    monkeypatch.setattr(decode, "multiprocessors", lambda device: 7)
    monkeypatch.setitem(decode.SCORED, "block_c", 16)
    monkeypatch.setitem(lookup.CHOSEN, "block_r", 64)
    arguments = make_arguments(300, group=3)
    assert arguments["run_clusters"].shape[2] > 6 * 64
    check_lookup(arguments)


def test_nothing_takes_part():
    arguments = make_arguments(40, coarse=4)
    arguments["parent_threshold"][1] = 2.0  # no parent of the second row passes
    _, counts, clusters_read = check_lookup(arguments)
    assert counts[1].tolist() == [2, 2]
    assert clusters_read[1].tolist() == [0, 0]
    arguments["threshold"] = torch.full((2,), -1.0, device=device)  # every run with tokens
    _, counts, _ = check_lookup(arguments)
    assert torch.equal(counts, (arguments["run_starts"].diff(dim=2) > 0).sum(dim=2, dtype=torch.int32))


def test_nan_is_never_chosen():
    arguments = make_arguments(40)
    arguments["query"][1, 0] = NAN
    arguments["threshold"][:] = -1.0
    _, counts, _ = check_lookup(arguments)
    assert counts[1, 0] == 2


def test_float64_only_in_the_reference():
    arguments = make_arguments(30, coarse=4)
    arguments |= {name: arguments[name].double() for name in ("query", "centroids", "parent_weights")}
    for first, second in zip(
        lookup_runs(**arguments, impl="reference")[:2], composed(arguments, "reference"), strict=True
    ):
        assert torch.equal(first, second)
    with pytest.raises(TypeError, match=r"query has dtype torch.float64; allowed for impl='triton'"):
        lookup_runs(**arguments, impl="triton")


@pytest.mark.parametrize("max_tokens", [None, (30, 8)])
@torch.no_grad()
def test_one_opaque_node(max_tokens):
    arguments = make_arguments(30, group=2, shared=True, coarse=3)
    if max_tokens is not None:
        arguments["max_tokens"] = int32(max_tokens)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **tensors: lookup_runs(**tensors), fullgraph=True, backend="aot_eager")
    for first, second in zip(compiled(**arguments), lookup_runs(**arguments), strict=True):
        assert torch.equal(first, second)
    check_schema("lookup_runs", arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"query": torch.zeros(1, 2, 1, 16)},
            ValueError,
            r"query has shape \[1, 2, 1, 16\]; allowed: \[batch, q_heads, h",
        ),
        ({"query": torch.zeros(1, 3, 16)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        ({"query": torch.zeros(1, 2, 16).int()}, TypeError, r"query has dtype torch.int32; allowed"),
        ({"cluster_sizes": torch.ones(1, 2, 4).int()}, ValueError, r"cluster_sizes has shape \[1, 2, 4\]; allowed"),
        ({"run_starts": torch.zeros(1, 2, 7).int()}, ValueError, r"run_starts has shape \[1, 2, 7\]; allowed: .* 8\]"),
        ({"run_clusters": torch.zeros(1, 2, 7)}, TypeError, r"run_clusters has dtype torch.float32; allowed"),
        ({"threshold": torch.zeros(2)}, ValueError, r"threshold has shape \[2\]; allowed: \[batch\] = \[1\]"),
        ({"max_tokens": torch.ones(1)}, TypeError, r"max_tokens has dtype torch.float32; allowed: torch.int32"),
        (
            {"parents": torch.zeros(1, 2, 5).int()},
            ValueError,
            r"parent_weights, parent_threshold is None; allowed: all",
        ),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {
        "query": torch.zeros(1, 2, 16, device=device),
        "centroids": torch.zeros(1, 2, 5, 16, device=device),
        "cluster_sizes": torch.ones(1, 2, 5, dtype=torch.int32, device=device),
        "run_starts": torch.zeros(1, 2, 8, dtype=torch.int32, device=device),
        "run_clusters": torch.zeros(1, 2, 7, dtype=torch.int32, device=device),
        "threshold": torch.zeros(1, device=device),
    }
    change = {name: value.to(device) for name, value in change.items()}
    with pytest.raises(error, match=message):
        lookup_runs(**(arguments | change))
