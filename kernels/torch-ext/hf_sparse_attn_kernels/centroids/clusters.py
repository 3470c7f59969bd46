"""The clusters that take part in a lookup, shared by the kernels of `centroid_weights`."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)  # replaces -inf where differences are taken


class Clusters(NamedTuple):
    """The clusters of each row and KV head, and the parents that some lookups require."""

    sizes: torch.Tensor
    parents: torch.Tensor | None
    parent_weights: torch.Tensor | None
    parent_threshold: torch.Tensor | None

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of `sizes_taking_part` after `exists`, except the last."""
        sizes = self.sizes
        parents = sizes if self.parents is None else self.parents
        weights = sizes if self.parent_weights is None else self.parent_weights
        threshold = sizes if self.parent_threshold is None else self.parent_threshold.contiguous()
        return sizes, parents, weights, threshold, *sizes.stride()[:2], *parents.stride()[:2], *weights.stride()[:2]


@triton.jit
def sizes_taking_part(
    row,
    head,
    cluster,
    exists,
    sizes_ptr,
    parents_ptr,  # for PARENTS only, like the next two
    parent_weights_ptr,
    parent_threshold_ptr,
    sizes_stride_b,
    sizes_stride_h,
    parents_stride_b,
    parents_stride_h,
    parent_weights_stride_b,
    parent_weights_stride_h,
    PARENTS: tl.constexpr,
):
    """Return the sizes of a tile of clusters, and 0 for clusters that do not take part."""
    sizes = tl.load(sizes_ptr + row * sizes_stride_b + head * sizes_stride_h + cluster, mask=exists, other=0)
    if PARENTS:
        parents_ptr += row * parents_stride_b + head * parents_stride_h
        parent_weights_ptr += row * parent_weights_stride_b + head * parent_weights_stride_h
        parent = tl.load(parents_ptr + cluster, mask=sizes > 0, other=0)
        weight = tl.load(parent_weights_ptr + parent, mask=sizes > 0, other=0.0)
        sizes = tl.where(weight > tl.load(parent_threshold_ptr + row), sizes, 0)
    return sizes
