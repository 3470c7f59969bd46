"""cluster_sums against float64, for clusters of very uneven sizes, and its errors."""

from itertools import pairwise

import pytest
import torch
from hf_sparse_attn_kernels import cluster_sums

from tests.ops.helpers import IMPLS, check_schema, device, grid, int32

SIZES = {
    "small": [3, 0, 5, 1, 0, 0, 17, 16, 40, 0],
    "one huge": [0, 2, 600, 0, 1],
    "borders of shares": [128, 128, 0, 127, 129, 1, 0],
    "empty ends": [0, 0, 0, 131, 0],
    "one": [77],
}


def make(sizes, groups, dim, dtype):
    """Points in a buffer with NaN around them, and clusters of these sizes, in another order in each group."""
    generator = torch.Generator().manual_seed(0)
    n = sum(sizes)
    points = torch.randn(groups, n + 2, dim + 1, generator=generator)
    points[:, 0] = points[:, n + 1] = points[..., dim:] = torch.nan
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(groups)]).int()
    rolled = torch.tensor([sizes[group:] + sizes[:group] for group in range(groups)])
    offsets = torch.nn.functional.pad(rolled.cumsum(dim=1), (1, 0)).int()
    return points.to(device, dtype)[:, 1 : n + 1, :dim], order.to(device), offsets.to(device)


def exact(points, order, offsets):
    """The sums in float64, cluster by cluster."""
    sums = []
    for group, bounds in enumerate(offsets.tolist()):
        for begin, stop in pairwise(bounds):
            sums.append(points[group, order[group, begin:stop].long()].double().sum(dim=0))
    return torch.stack(sums).view(len(points), -1, points.shape[2])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("name", "groups", "dim", "dtype"),
    [
        ("small", 2, 64, torch.float16),
        ("one huge", 3, 80, torch.bfloat16),
        ("borders of shares", 2, 5, torch.float32),
        grid("empty ends", 1, 128, torch.float16),
        grid("one", 1, 130, torch.float32),
    ],
    ids=str,
)
def test_is_the_sum_of_the_members(impl, name, groups, dim, dtype):
    points, order, offsets = make(SIZES[name], groups, dim, dtype)
    expected = exact(points, order, offsets)
    sums = cluster_sums(points, order, offsets, impl=impl)
    assert sums.dtype == torch.float32
    # A sum of n numbers rounds n times, each time by at most half a unit of the largest partial sum.
    absolute = exact(points.abs(), order, offsets)
    assert ((sums.double() - expected).abs() <= absolute * torch.finfo(torch.float32).eps * 24).all()
    assert (sums[absolute == 0] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_whole_numbers_are_summed_exactly(impl):
    points, order, offsets = make(SIZES["one huge"], 2, 16, torch.float32)
    points = (points * 100).round().nan_to_num()
    assert torch.equal(cluster_sums(points, order, offsets, impl=impl).double(), exact(points, order, offsets))


def test_the_reference_is_exact_in_float64():
    points, order, offsets = make(SIZES["small"], 2, 7, torch.float64)
    sums = cluster_sums(points, order, offsets, impl="reference")
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums, exact(points, order, offsets))


@pytest.mark.gpu
def test_does_not_change_from_run_to_run():
    points, order, offsets = make([1, 0, 50000, *range(300)], 4, 128, torch.float16)
    first = cluster_sums(points, order, offsets)
    assert all(torch.equal(cluster_sums(points, order, offsets), first) for _ in range(5))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"points": torch.zeros(3, 8)}, ValueError, r"points.*\[groups, n, dim\]"),
        ({"order": int32([[0, 1]])}, ValueError, r"order.*allowed: \[groups, n\] = \[1, 3\]"),
        ({"order": int32([[0, 1, 2]]).long()}, TypeError, "order has dtype torch.int64; allowed: torch.int32"),
        ({"offsets": int32([[3]])}, ValueError, r"offsets.*\[groups, num_clusters \+ 1\], at least 2"),
        ({"offsets": int32([[0, 3], [0, 3]])}, ValueError, r"\[groups, num_clusters \+ 1\] = \[1, 2\]"),
        ({"offsets": int32([[0, 9, 3]])[:, ::2]}, ValueError, "offsets has strides .* allowed: contiguous"),
    ],
)
def test_bad_input(impl, changes, error, message):
    arguments = {"points": torch.zeros(1, 3, 8), "order": int32([[0, 1, 2]]), "offsets": int32([[0, 3]]), **changes}
    with pytest.raises(error, match=message):
        cluster_sums(*(arguments[name].to(device) for name in ("points", "order", "offsets")), impl=impl)


def test_is_one_node_under_compile():
    arguments = dict(zip(("points", "order", "offsets"), make([2, 0, 7], 2, 8, torch.float32), strict=True))
    check_schema("cluster_sums", arguments)
    compiled = torch.compile(cluster_sums, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments.values()), cluster_sums(*arguments.values()))
