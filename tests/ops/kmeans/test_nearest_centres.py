"""nearest_centres against float64, its ties, and its errors."""

import pytest
import torch
from hf_sparse_attn_kernels import nearest_centres

from tests.ops.helpers import IMPLS, check_schema, device, grid


def make(groups, n, num_centres, dim, dtype, seed=0):
    """Points as a strided view with NaN around them, and centres of a buffer whose end is NaN."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n + 3, groups, dim + 1, generator=generator)
    centres = torch.randn(groups, num_centres + 2, dim, generator=generator)
    points[:2] = points[n + 2 :] = points[..., dim:] = torch.nan
    centres[:, num_centres:] = torch.nan
    points, centres = points.to(device, dtype), centres.to(device, dtype)
    return points.transpose(0, 1)[:, 2 : n + 2, :dim], centres[:, :num_centres]


def exact(points, centres):
    """Every squared distance in float64 [groups, n, num_centres]."""
    return (points.double()[:, :, None] - centres.double()[:, None]).square().sum(dim=3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("dtype", "groups", "n", "num_centres", "dim"),
    [
        (torch.float16, 2, 131, 300, 64),
        (torch.bfloat16, 3, 63, 111, 80),
        (torch.float32, 2, 111, 63, 20),
        grid(torch.float16, 1, 1, 1, 128),
        grid(torch.float16, 2, 129, 33, 130),
        grid(torch.bfloat16, 1, 300, 32, 3),
        grid(torch.float32, 1, 65, 65, 200),
    ],
    ids=str,
)
def test_finds_the_nearest_centre(impl, dtype, groups, n, num_centres, dim):
    points, centres = make(groups, n, num_centres, dim, dtype)
    every = exact(points, centres)
    expected, nearest = every.min(dim=2)
    # As exact as the products of a matrix multiplication, which are rounded to float32 once, at the most, when they are
    # added to the squares.
    wide = points.float(), centres.float()
    product_error = (wide[0] @ wide[1].transpose(1, 2)).double() - points.double() @ centres.double().transpose(1, 2)
    squares = points.double().square().sum(dim=2).max() + centres.double().square().sum(dim=2).max()
    bound = 8 * product_error.abs().max() + 4 * torch.finfo(torch.float32).eps * squares
    labels, distances = nearest_centres(points, centres, impl=impl)
    assert labels.dtype == torch.int32
    assert distances.dtype == torch.float32
    assert (distances.double() - expected).abs().max() <= bound
    chosen = every.gather(2, labels.long()[:, :, None])[:, :, 0]
    assert (chosen - expected).max() <= bound
    assert (labels == nearest).double().mean() > 0.99


def test_the_reference_is_exact_in_float64():
    points, centres = make(2, 63, 17, 20, torch.float64)
    expected, nearest = exact(points, centres).min(dim=2)
    labels, distances = nearest_centres(points, centres, impl="reference")
    assert distances.dtype == torch.float64
    assert torch.equal(labels, nearest.int())
    torch.testing.assert_close(distances, expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_lowest_of_equally_near_centres_wins(impl, dtype):
    """Small whole numbers, whose products and sums are exact: each centre stands three times, in several tiles."""
    generator = torch.Generator().manual_seed(0)
    once = torch.stack([torch.randperm(16, generator=generator).float() for _ in range(90)])[None]
    centres = once.repeat(1, 3, 1).to(device, dtype)
    points = once[:, torch.randperm(90, generator=generator)].to(device, dtype)
    points = torch.cat((points, torch.zeros(1, 1, 16, device=device, dtype=dtype)), dim=1)  # as near to all of them
    labels, distances = nearest_centres(points, centres, impl=impl)
    every = exact(points, centres)
    assert labels.tolist() == [[row.index(min(row)) for row in every[0].tolist()]]
    assert torch.equal(distances.double(), every.amin(dim=2))
    assert labels[0, -1] == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_point_without_a_distance_has_a_valid_label(impl):
    points, centres = make(1, 40, 50, 16, torch.float16)
    points = points.clone()
    clean = nearest_centres(points, centres, impl=impl)
    points[:, 7] = torch.nan
    points[:, 9] = 60000.0  # its squared norm is too large for float16
    labels, distances = nearest_centres(points, centres, impl=impl)
    assert ((labels >= 0) & (labels < 50)).all()
    others = [i for i in range(40) if i not in (7, 9)]
    assert torch.equal(labels[:, others], clean[0][:, others])
    assert torch.equal(distances[:, others], clean[1][:, others])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"points": torch.zeros(2, 8)}, ValueError, r"points.*\[groups, n, dim\]"),
        ({"points": torch.zeros(2, 3, 8).int()}, TypeError, "points has dtype torch.int32"),
        ({"points": torch.zeros(2, 8, 3).mT}, ValueError, "points has stride 3 in its last dimension"),
        ({"centres": torch.zeros(2, 0, 8)}, ValueError, r"centres.*\[groups, num_centres, dim\], all at least 1"),
        ({"centres": torch.zeros(1, 4, 8)}, ValueError, r"\[groups, num_centres, dim\] = \[2, 4, 8\]"),
        ({"centres": torch.zeros(2, 4, 8).half()}, TypeError, "centres has dtype torch.float16"),
    ],
)
def test_bad_input(impl, changes, error, message):
    arguments = {"points": torch.zeros(2, 3, 8), "centres": torch.zeros(2, 4, 8), **changes}
    with pytest.raises(error, match=message):
        nearest_centres(*(arguments[name].to(device) for name in ("points", "centres")), impl=impl)


@pytest.mark.parametrize(
    ("dtype", "dim", "error", "message"),
    [
        (torch.float64, 8, TypeError, "points has dtype torch.float64; allowed for impl='triton'"),
        (torch.float32, 257, ValueError, "head_dim=257 of points; allowed for impl='triton': at most 256"),
    ],
)
def test_the_kernel_s_limits(dtype, dim, error, message):
    zeros = torch.zeros(1, 3, dim, dtype=dtype, device=device)
    with pytest.raises(error, match=message):
        nearest_centres(zeros, zeros, impl="triton")


def test_is_one_node_under_compile():
    points, centres = make(2, 9, 5, 8, torch.float32)
    check_schema("nearest_centres", {"points": points, "centres": centres})
    compiled = torch.compile(nearest_centres, fullgraph=True, backend="eager")
    for ours, expected in zip(compiled(points, centres), nearest_centres(points, centres), strict=True):
        assert torch.equal(ours, expected)
