"""Statistics of the keys of a page other than minimum and maximum, for the reference of `page_bounds`.

Every sum has one order, the same as in the kernels and on every processor, so both implementations agree to the bit.
"""

import torch
from torch.nn.functional import pad

from . import REPRESENTATIVES, SUMMED_AS_TREE


def summarize(pages: torch.Tensor, counts: torch.Tensor, statistic: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lower and upper bounds [.., head_dim] by a statistic of `pages` [.., page_size, head_dim].

    `counts` [..] is the number of tokens of each page, at least 1; the tokens after them may be anything.
    """
    is_present = (torch.arange(pages.shape[-2], device=pages.device) < counts[..., None])[..., None]
    counts = counts[..., None]  # [.., 1]
    if statistic == "cuboid_mean":
        return _cuboid_mean(pages, is_present, counts)
    representative = _representative(pages.masked_fill(~is_present, 0), is_present, counts)
    return representative, representative


def _cuboid_mean(
    pages: torch.Tensor, is_present: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return c - delta and c + delta: c halfway between minimum and maximum, delta the mean of |c - k|."""
    lower = pages.masked_fill(~is_present, float("inf")).amin(dim=-2)
    upper = pages.masked_fill(~is_present, float("-inf")).amax(dim=-2)
    centre = lower * 0.5 + upper * 0.5
    deviation = _sum_tokens((centre.unsqueeze(-2) - pages).abs_().masked_fill_(~is_present, 0)) / counts
    return centre - deviation, centre + deviation


def _representative(pages: torch.Tensor, is_present: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean of the keys with the greatest k.m, m the mean of the page's keys; absent keys are 0."""
    mean = _sum_tokens(pages) / counts
    products = (pages * mean.unsqueeze(-2)).unsqueeze(-2)  # [.., page_size, 1, head_dim]
    while products.shape[-1] > 1:  # halves of the channels, padded to a power of two
        half = 1 << (products.shape[-1] - 1).bit_length() - 1
        products = products[..., :half] + pad(products[..., half:], (0, 2 * half - products.shape[-1]))
    scores = products[..., 0].nan_to_num_(float("-inf"), float("inf"), float("-inf"))
    scores = scores.masked_fill(~is_present, float("-inf"))  # [.., page_size, 1]
    # The sort is stable: the lower index comes first among equal scores, and present tokens before absent ones.
    best = scores.sort(dim=-2, descending=True, stable=True)[1][..., :REPRESENTATIVES, :]
    total = torch.zeros_like(mean)
    for key in pages.gather(-2, best.expand(*best.shape[:-1], pages.shape[-1])).unbind(dim=-2):
        total = total + key
    return total / counts.clamp(max=REPRESENTATIVES)


def _sum_tokens(pages: torch.Tensor) -> torch.Tensor:
    """Sum `pages` [.., page_size, head_dim] over the tokens, in the order of the kernels."""
    *shape, page_size, head_dim = pages.shape
    sums = pages.view(*shape, -1, min(SUMMED_AS_TREE, page_size), head_dim)
    while sums.shape[-2] > 1:
        half = sums.shape[-2] // 2
        sums = sums[..., :half, :] + sums[..., half:, :]
    total = sums[..., 0, 0, :]
    for chunk in range(1, sums.shape[-3]):
        total = total + sums[..., chunk, 0, :]
    return total
