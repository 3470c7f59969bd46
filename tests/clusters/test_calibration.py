import numpy as np
import pytest
import torch
from hf_sparse_attn_kernels import centroid_weights

from hf_sparse_attn.clusters.calibration import global_threshold, weighted_quantile
from tests.ops.helpers import IMPLS, device, golden


def _random(size, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values[: size // 3] = values[0]  # ties
    counts = torch.randint(0, 6, (size,), generator=generator, dtype=torch.int32)
    counts[-1] = 2
    return values, counts


@pytest.mark.parametrize("q", [0.0, 1e-9, 0.1, 0.5, 1 / 3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("size", [1, 2, 63, 400])
def test_equals_the_quantile_of_the_repeated_values(size, q):
    values, counts = _random(size, seed=size)
    repeated = values.repeat_interleave(counts)
    quantile = weighted_quantile(values.to(device), counts.to(device), q)
    assert quantile.dtype == torch.float64
    assert quantile.shape == ()
    assert quantile.item() == torch.quantile(repeated, q).item()
    np.testing.assert_allclose(quantile.item(), np.quantile(repeated.numpy(), q), rtol=1e-13, atol=1e-15)


def test_billions_of_repetitions():
    values = torch.tensor([3.0, 1.0, 2.0], device=device)
    counts = torch.tensor([4 * 10**9 + 1, 3 * 10**9, 3 * 10**9], device=device)  # positions 0 to 10^10
    for q, expected in ((0.2999999998, 1.0), (0.2999999999, 1.0), (0.29999999995, 1.5), (0.3, 2.0), (0.6, 3.0)):
        assert weighted_quantile(values, counts, q).item() == pytest.approx(expected, abs=1e-5)


def test_values_that_are_not_counted_have_no_influence():
    values, counts = _random(50, seed=1)
    expected = weighted_quantile(values, counts, 0.7)
    values[counts == 0] = float("nan")
    assert torch.equal(weighted_quantile(values, counts, 0.7), expected)


@pytest.mark.parametrize(
    ("values", "counts", "q", "message"),
    [
        ([1.0, 2.0], [1], 0.5, r"values has shape \[2\], counts \[1\]; allowed: one dimension, the same for both"),
        ([[1.0]], [[1]], 0.5, r"values has shape \[1, 1\], counts \[1, 1\]; allowed"),
        ([1.0], [1], 1.5, r"q=1.5; allowed: 0 to 1"),
        ([1.0, 2.0], [3, -2], 0.5, r"counts has -2; allowed: at least 0"),
        ([1.0, 2.0], [0, 0], 0.5, r"counts are all 0; allowed: at least one that is not"),
        ([1.0, float("nan")], [0, 2], 0.5, r"values has NaN; allowed: numbers that can be ranked"),
    ],
)
def test_bad_arguments(values, counts, q, message):
    with pytest.raises(ValueError, match=message):
        weighted_quantile(torch.tensor(values), torch.tensor(counts), q)


@pytest.mark.parametrize("impl", IMPLS)
def test_thresholds_of_the_released_code(impl):
    """Given the labels and centroids of two layers; one quantile over both layers, all heads and all keys."""
    vectors = golden("squeezed")
    weights, sizes = [], []
    for layer in range(2):
        centroids = vectors[f"centroids{layer}"]
        labels = vectors[f"labels{layer}"].long()
        of_layer = torch.zeros(centroids.shape[:3], dtype=torch.int32, device=device)
        sizes.append(of_layer.scatter_add_(2, labels, torch.ones_like(labels, dtype=torch.int32)))
        weights.append(centroid_weights(vectors[f"queries{layer}"], centroids, sizes[layer], impl=impl))
    for target, expected in zip(vectors["targets"].tolist(), vectors["thresholds"].tolist(), strict=True):
        assert global_threshold(weights, sizes, target) == pytest.approx(expected, rel=1e-6)
        kept = sum((of_layer * (layer > expected)).sum().item() for layer, of_layer in zip(weights, sizes, strict=True))
        assert kept / sum(of_layer.sum().item() for of_layer in sizes) == pytest.approx(1 - target, abs=0.02)


def test_target_sparsity_0_keeps_clusters_of_weight_0():
    weights = [torch.tensor([[[0.0, 0.5]]]), torch.tensor([[[0.0, 0.1]]])]
    sizes = [torch.tensor([[[3, 1]]], dtype=torch.int32)] * 2
    assert global_threshold(weights, sizes, 0) == -1.0
    assert all((layer > global_threshold(weights, sizes, 0)).all() for layer in weights)
    assert global_threshold(weights, sizes, 0.5) == 0.0


@pytest.mark.parametrize("target", [-0.1, 1.0, float("nan")])
def test_a_target_out_of_range(target):
    with pytest.raises(ValueError, match=r"target_sparsity=.*; allowed: at least 0 and below 1"):
        global_threshold([torch.ones(1)], [torch.ones(1)], target)
