"""Calibration of Squeezed Attention (arXiv 2411.09688): one threshold for all layers and heads."""

from collections.abc import Sequence

import torch

KEEP_EVERYTHING = -1.0
"""Threshold of target sparsity 0: weights are at least 0, and the comparison with the threshold is strict."""


def global_threshold(
    weights: Sequence[torch.Tensor], cluster_sizes: Sequence[torch.Tensor], target_sparsity: float
) -> float:
    """Return the threshold that drops a share of the keys, counted over all layers and heads together.

    Every key has the weight of its cluster. The threshold is the `target_sparsity` quantile of the weights of all keys.
    Heads whose attention is spread keep more keys than heads whose attention is concentrated.

    Parameters
    ----------
    weights : sequence of torch.Tensor
        Weights of the clusters, one floating-point tensor for each layer, such as [1, kv_heads, clusters].
    cluster_sizes : sequence of torch.Tensor
        Number of keys of each cluster, of the shape of the layer's weights.
    target_sparsity : float
        Share of keys to drop, at least 0 and below 1. 0 keeps all of them.

    Raises
    ------
    ValueError
        The target is out of range, or `weighted_quantile` cannot rank the weights.
    """
    if not 0 <= target_sparsity < 1:
        raise ValueError(f"target_sparsity={target_sparsity!r}; allowed: at least 0 and below 1")
    if target_sparsity == 0:
        return KEEP_EVERYTHING
    device = weights[0].device
    values = torch.cat([layer.flatten().to(device) for layer in weights])
    counts = torch.cat([layer.flatten().to(device) for layer in cluster_sizes])
    return weighted_quantile(values, counts, target_sparsity).item()


def weighted_quantile(values: torch.Tensor, counts: torch.Tensor, q: float) -> torch.Tensor:
    """Return a quantile of `values`, each repeated `counts` times, without repeating them.

    Interpolates linearly between neighbours, like `torch.quantile` of the repeated values. Positions are float64, exact
    for up to 2 ** 53 repetitions.

    Parameters
    ----------
    values : torch.Tensor
        Floating-point numbers [n].
    counts : torch.Tensor
        Whole numbers [n], at least 0, not all 0. Values with count 0 are ignored.
    q : float
        0 (least value) to 1 (greatest value).

    Returns
    -------
    torch.Tensor
        float64, without dimensions.

    Raises
    ------
    ValueError
        Shapes differ, q is out of range, a count is negative, all counts are 0, or a counted value is NaN.
    """
    if values.dim() != 1 or counts.shape != values.shape:
        shapes = f"values has shape {list(values.shape)}, counts {list(counts.shape)}"
        raise ValueError(f"{shapes}; allowed: one dimension, the same for both")
    if not 0 <= q <= 1:
        raise ValueError(f"q={q!r}; allowed: 0 to 1")
    if bool((counts < 0).any()):
        raise ValueError(f"counts has {counts.min().item()}; allowed: at least 0")
    values, counts = values[counts > 0], counts[counts > 0].long()
    if len(values) == 0:
        raise ValueError("counts are all 0; allowed: at least one that is not")
    if bool(values.isnan().any()):
        raise ValueError("values has NaN; allowed: numbers that can be ranked")
    ranked, order = values.sort()
    ends = counts[order].cumsum(0)  # value i of `ranked` has the positions before ends[i]
    last = ends[-1] - 1
    position = q * last.double()
    below = position.floor().long()
    neighbours = torch.stack((below, torch.minimum(below + 1, last)))
    low, high = ranked[torch.searchsorted(ends, neighbours, right=True)].double()
    return torch.lerp(low, high, position - below)
