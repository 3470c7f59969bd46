"""K-means: its objective beside scikit-learn's on a model's keys, its determinism, and degenerate points."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.cluster import KMeans

from hf_sparse_attn.clusters.kmeans import Clusters, kmeans, normalised

KEYS = Path(__file__).parent / "golden/smollm2_keys.safetensors"
CLUSTERS = (40, 102)  # the larger is 5 % of the keys
SEEDS = range(3)  # single runs of either implementation differ by up to 1 % from the mean of several

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def points():
    """Normalised keys of three heads of SmolLM2, float32 [groups, n, dim]; see golden/README.md."""
    return normalised(load_file(KEYS)["keys"].float())


@pytest.fixture(scope="module")
def scikit_learn(points):
    """Mean objective of scikit-learn's k-means [groups], by number of clusters."""

    def objective(x, count, seed):
        return KMeans(count, init="k-means++", n_init=1, random_state=seed).fit(x).inertia_

    return {
        count: torch.tensor([sum(objective(x, count, seed) for seed in SEEDS) / len(SEEDS) for x in points])
        for count in CLUSTERS
    }


def random_points(groups=2, n=200, dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return normalised(torch.randn(groups, n, dim, generator=generator).to(dtype))


def exact_objective(points, clusters):
    """Sum of squared distances to the means of the clusters, in float64 [groups]."""
    totals = []
    for x, labels in zip(points.double(), clusters.labels.long(), strict=True):
        members = torch.nn.functional.one_hot(labels, clusters.offsets.shape[1] - 1).double()
        means = members.T @ x / members.sum(dim=0).clamp(min=1)[:, None]
        totals.append((x - means[labels]).square().sum())
    return torch.stack(totals)


def check_form(points, clusters: Clusters, num_clusters):
    """Labels are in range, and order and offsets are those of a stable sort by label."""
    groups, n, _ = points.shape
    labels, order, offsets, objective = clusters
    assert labels.shape == order.shape == (groups, n)
    assert offsets.shape == (groups, num_clusters + 1)
    assert labels.dtype == order.dtype == offsets.dtype == torch.int32
    assert objective.dtype == torch.float64
    assert labels.min() >= 0
    assert labels.max() < num_clusters
    expected = labels.sort(dim=1, stable=True)
    assert torch.equal(order, expected.indices.int())
    sizes = torch.stack([row.bincount(minlength=num_clusters) for row in labels.long()])
    assert torch.equal(offsets, torch.nn.functional.pad(sizes.cumsum(dim=1), (1, 0)).int())


@devices
@pytest.mark.parametrize("count", CLUSTERS)
@pytest.mark.parametrize(
    "options",
    [{"seeding": "exact"}, {"seeding": "rounds"}, {"batch_tokens": 1000, "iterations": 30}],
    ids=["exact", "rounds", "mini-batches"],
)
def test_the_objective_is_within_two_percent_of_scikit_learn_s(points, scikit_learn, device, count, options):
    on_device = points.to(device)
    runs = [kmeans(on_device, count, seed=seed, **options) for seed in SEEDS]
    for clusters in runs:
        check_form(on_device, clusters, count)
        assert (clusters.offsets.diff(dim=1) > 0).all()
    ratios = sum(exact_objective(on_device, clusters) for clusters in runs).cpu() / len(SEEDS) / scikit_learn[count]
    assert ratios.max() <= 1.02, ratios


def test_half_precision_costs_little(points):
    half = normalised(points.bfloat16())
    assert half.dtype == torch.float16
    objectives = [exact_objective(points, kmeans(x, CLUSTERS[1])).sum() for x in (points, half)]
    assert objectives[1] <= 1.01 * objectives[0]


def test_mini_batches_of_everything_improve_on_the_seeds_alone(points):
    one, many = (kmeans(points, CLUSTERS[0], batch_tokens=500, iterations=n).objective for n in (1, 20))
    assert (many < 0.97 * one).all()


@devices
@pytest.mark.parametrize("options", [{"seeding": "exact"}, {"seeding": "rounds"}, {"batch_tokens": 70}])
def test_a_seed_decides_the_result(device, options):
    points = random_points().to(device)
    first, again = (kmeans(points, 20, seed=3, **options) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first.labels, kmeans(points, 20, seed=4, **options).labels)


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    kmeans(random_points(), 5)
    assert torch.equal(torch.get_rng_state(), before)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_separate_clusters_are_found(device, dtype):
    """Six tight clusters of uneven size a group: a seed in each of them, and every point with its neighbours."""
    generator = torch.Generator().manual_seed(0)
    middles = 4 * torch.eye(6, 9)[None].repeat(3, 1, 1)
    truth = torch.arange(6).repeat_interleave(torch.tensor([1, 2, 5, 40, 100, 7])).repeat(3, 1)
    points = middles.gather(1, truth[:, :, None].expand(-1, -1, 9)) + 0.1 * torch.randn(3, 155, 9, generator=generator)
    clusters = kmeans(points.to(device, dtype), 6, seeding="exact")
    check_form(points, clusters, 6)
    for labels, expected in zip(clusters.labels.cpu(), truth, strict=True):
        pairs = set(zip(labels.tolist(), expected.tolist(), strict=True))
        assert len(pairs) == 6


def test_strided_points():
    points = random_points(groups=3, n=120)
    view = torch.full((120, 3, 20), torch.nan).transpose(0, 1)[:, :, :16]
    view.copy_(points)
    assert torch.equal(kmeans(view, 12).labels, kmeans(points, 12).labels)


@pytest.mark.parametrize("options", [{"seeding": "exact"}, {"seeding": "rounds"}, {"batch_tokens": 30}])
def test_one_cluster(options):
    points = random_points()
    clusters = kmeans(points, 1, **options)
    assert not clusters.labels.any()
    check_form(points, clusters, 1)


@pytest.mark.parametrize("seeding", ["exact", "rounds"])
def test_as_many_clusters_as_points(seeding):
    points = random_points(n=90)
    clusters = kmeans(points, 90, seeding=seeding)
    assert (clusters.offsets.diff(dim=1) == 1).all()
    assert (clusters.objective < 1e-4).all()


@pytest.mark.parametrize("options", [{"seeding": "exact"}, {"seeding": "rounds"}, {"batch_tokens": 30}])
def test_equal_points(options):
    """Ten points, each twelve times: fewer different points than clusters leave clusters empty."""
    points = random_points(n=10).repeat(1, 12, 1)
    clusters = kmeans(points, 25, **options)
    check_form(points, clusters, 25)
    assert (clusters.objective < 1e-3).all()
    for labels in clusters.labels.tolist():
        pairs = {(label, i % 10) for i, label in enumerate(labels)}
        assert len(pairs) == len(set(labels))  # a cluster has copies of one point only


def test_zeros():
    zeros = torch.zeros(2, 30, 8)
    clusters = kmeans(zeros, 4)
    check_form(zeros, clusters, 4)
    assert not clusters.labels.any()
    assert not clusters.objective.any()


def test_clusters_without_points_move_to_the_farthest(monkeypatch):
    """All seeds equal: every cluster but one is empty, until it moves."""
    points = random_points(n=60)
    monkeypatch.setattr(
        "hf_sparse_attn.clusters.kmeans._seeds_one_by_one", lambda points, count, _: points[:, :1].repeat(1, count, 1)
    )
    clusters = kmeans(points, 8, seeding="exact")
    assert (clusters.offsets.diff(dim=1) > 0).all()


def test_normalised():
    keys = torch.randn(2, 5, 7)
    keys[0, 1] = 0
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        unit = normalised(keys.to(dtype).transpose(0, 1))
        assert unit.dtype == (torch.float16 if dtype == torch.bfloat16 else dtype)
        expected = torch.nn.functional.normalize(keys.to(dtype).double(), dim=-1).transpose(0, 1)
        torch.testing.assert_close(unit, expected.to(unit.dtype))
        assert (unit[1, 0] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 201}, "num_clusters=201; allowed: 1 to n=200, the number of points"),
        ({"num_clusters": 0}, "num_clusters=0; allowed: 1 to n=200"),
        ({"iterations": 0}, "iterations=0; allowed: at least 1"),
        ({"tolerance": -1.0}, r"tolerance=-1.0; allowed: at least 0"),
        ({"tolerance": float("nan")}, "tolerance=nan; allowed: at least 0"),
        ({"batch_tokens": 0}, "batch_tokens=0; allowed: None, or at least 1"),
        ({"seeding": "random"}, "seeding='random'; allowed: None, 'exact', 'rounds'"),
        ({"points": torch.zeros(3, 4)}, r"points has shape \[3, 4\]; allowed: \[groups, n, dim\]"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        kmeans(**{"points": random_points(), "num_clusters": 5, **options})


def test_points_that_are_no_floats():
    with pytest.raises(TypeError, match=r"points has dtype torch\.int32"):
        kmeans(torch.zeros(1, 4, 2, dtype=torch.int32), 2)
