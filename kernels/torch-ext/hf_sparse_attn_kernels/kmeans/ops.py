"""The ops of k-means clustering, for many groups of points at once."""

import torch

from .._check import (
    check_contiguous,
    check_device,
    check_dims,
    check_dtype,
    check_float,
    check_last_stride,
    check_like,
    check_shape,
)
from .._op import op, output
from .._reference import compute_dtype


def _check_points(points: torch.Tensor) -> None:
    check_dims("points", points, "groups, n, dim")
    check_float("points", points)
    check_last_stride("points", points)


@op(launcher="nearest")
def nearest_centres(
    points: torch.Tensor, centres: torch.Tensor, *, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the nearest centre of every point, by squared Euclidean distance.

    The assignment of Lloyd's algorithm, for every group on its own. Products are taken in the dtype of `points` and
    summed in float32. The matrix of distances is never in memory.

    Parameters
    ----------
    points : torch.Tensor
        [groups, n, dim]; float32, bfloat16 or float16 (float64 in the reference); the last stride is 1.
    centres : torch.Tensor
        [groups, num_centres, dim], of the dtype of `points`; the last stride is 1.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    labels : torch.Tensor
        int32 [groups, n]: index of the nearest centre; the lowest one among equal distances.
    distances : torch.Tensor
        float32 [groups, n] (float64 for float64): squared distance to that centre, at least 0.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride or device, or dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    _check_points(points)
    groups, n, dim = points.shape
    check_dims("centres", centres, "groups, num_centres, dim")
    check_shape("centres", centres, "groups, num_centres, dim", (groups, centres.shape[1], dim))
    check_like("centres", centres, "points", points)
    check_last_stride("centres", centres)
    return output(points, (groups, n), torch.int32), output(points, (groups, n), compute_dtype(points.dtype))


@op(launcher="sums")
def cluster_sums(
    points: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:
    """Sum the members of every cluster.

    The sums do not change from run to run. The kernels divide the work by points, so that one huge cluster takes no
    longer than many small ones.

    Parameters
    ----------
    points : torch.Tensor
        [groups, n, dim]; float32, bfloat16 or float16 (float64 in the reference); the last stride is 1.
    order : torch.Tensor
        int32 [groups, n], contiguous: the points sorted by cluster.
    offsets : torch.Tensor
        int32 [groups, num_clusters + 1], contiguous: cluster c has the points order[offsets[c]] to
        order[offsets[c + 1] - 1]. Ascending, from 0 to n.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    torch.Tensor
        float32 [groups, num_clusters, dim] (float64 for float64); 0 for an empty cluster.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride or device, or dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    _check_points(points)
    groups, n, dim = points.shape
    check_dims("offsets", offsets, "groups, num_clusters + 1")
    num_clusters = offsets.shape[1] - 1
    if num_clusters < 1:
        raise ValueError(f"offsets has shape {list(offsets.shape)}; allowed: [groups, num_clusters + 1], at least 2")
    check_shape("order", order, "groups, n", (groups, n))
    check_shape("offsets", offsets, "groups, num_clusters + 1", (groups, num_clusters + 1))
    for name, tensor in (("order", order), ("offsets", offsets)):
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, "points", points)
        check_contiguous(name, tensor)
    return output(points, (groups, num_clusters, dim), compute_dtype(points.dtype))
