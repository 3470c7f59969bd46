"""Triton kernel of `nearest_centres`: one program for each tile of points, with a running argmin over the centres."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from .._check import check_triton
from .._triton import cdiv, dot_dtype, launch_options, next_power_of_2, sum_of_products, wait_for_previous_kernel

FEW = 32  # up to so many centres are one small tile


@triton.jit
def nearest_centres_kernel(
    points_ptr,
    centres,  # descriptor of [groups * padded, BLOCK_D]
    half_norms_ptr,  # float32 [groups, padded]: half the squared norms; inf for padding
    labels_ptr,  # [groups, num_points], like the next
    distances_ptr,
    num_points,
    padded,  # number of centres: whole tiles
    points_stride_g,
    points_stride_n,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the nearest centres of a tile of points; grid (tiles, groups).

    The nearest centre has the largest score x.c - |c|²/2. Every lane of the tile of scores keeps its own best score and
    the tile where it saw it: a reduction over lanes happens once, at the end.
    """
    wait_for_previous_kernel(PDL)
    group = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    exists = rows < num_points
    points_at = points_ptr + group * points_stride_g + rows.to(tl.int64)[:, None] * points_stride_n + dims[None, :]
    points = tl.load(points_at, mask=exists[:, None] & (dims < DIM)[None, :], other=0.0)
    norms = sum_of_products(points.to(tl.float32), points.to(tl.float32), 1)
    points = points.to(DOT_DTYPE)

    first_row = (group * padded).to(tl.int32)
    half_norms_ptr += group * padded
    best = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    tile_of_best = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for first in range(0, padded, BLOCK_N):
        tile = centres.load([first_row + first, 0])  # [BLOCK_N, BLOCK_D]
        half_norms = tl.load(half_norms_ptr + first + lanes)
        scores = tl.dot(points, tl.trans(tile.to(DOT_DTYPE)), input_precision=PRECISION) - half_norms[None, :]
        is_better = scores > best  # an equal score keeps the earlier tile
        best = tl.where(is_better, scores, best)
        tile_of_best = tl.where(is_better, first, tile_of_best)

    highest = tl.max(best, axis=1)
    # NaN is never better: a point with NaN keeps -inf in every lane, and gets label 0.
    candidates = tl.where(best == highest[:, None], tile_of_best + lanes[None, :], padded)
    out_at = group * num_points + rows
    tl.store(labels_ptr + out_at, tl.min(candidates, axis=1), mask=exists)
    tl.store(distances_ptr + out_at, tl.maximum(norms - 2 * highest, 0.0), mask=exists)


def _tiles(points: torch.Tensor, num_centres: int) -> dict[str, Any]:
    """Choose the sizes of the tiles of points and centres, the warps and the stages.

    A tile of 128 points keeps the loads of centres, 32 KiB for 128 x 128 x 128 products, within L2's bandwidth.
    """
    width = max(16, next_power_of_2(points.shape[2]))
    most = FEW if num_centres <= FEW else 128
    if points.element_size() == 4:
        block_m, block_n, warps, stages = 64, min(most, 64 if width <= 128 else 32), 8, 2
    else:
        block_m, block_n, warps, stages = 128, min(most, 128 if width <= 128 else 64), 8, 3
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": width, "num_warps": warps, "num_stages": stages}


def nearest_centres(points: torch.Tensor, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `nearest_centres_kernel`."""
    check_triton("points", points)
    groups, n, dim = points.shape
    num_centres = centres.shape[1]
    tiles = _tiles(points, num_centres)
    padding = -num_centres % tiles["BLOCK_N"]
    padded = num_centres + padding
    half_norms = pad(centres.float().square().sum(dim=2) / 2, (0, padding), value=torch.inf)
    # Whole tiles, loaded by descriptor: one copy each, for any width.
    whole = pad(centres, (0, tiles["BLOCK_D"] - dim, 0, padding)).contiguous()
    labels = torch.empty((groups, n), dtype=torch.int32, device=points.device)
    distances = torch.empty((groups, n), dtype=torch.float32, device=points.device)
    nearest_centres_kernel[(cdiv(n, tiles["BLOCK_M"]), groups)](
        points,
        TensorDescriptor.from_tensor(whole.flatten(0, 1), [tiles["BLOCK_N"], tiles["BLOCK_D"]]),
        half_norms,
        labels,
        distances,
        n,
        padded,
        *points.stride()[:2],
        DIM=dim,
        DOT_DTYPE=dot_dtype(points.dtype),
        PRECISION="tf32x3",
        **tiles,
        **launch_options(points.device),
    )
    return labels, distances
