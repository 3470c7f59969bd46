"""Weights of tokens in whole numbers, so that their sums do not depend on the order of additions."""

import math

import torch

from .shared import shared

STEPS = 1024
"""Weights that are told apart: the greatest, and so many less one below it. The last also stands for all below it."""
STEPS_PER_OCTAVE = 32
STEPS_PER_NAT = STEPS_PER_OCTAVE * math.log2(math.e)
GREATEST_BITS = 40
"""The greatest weight is 2 ** GREATEST_BITS."""
SHARE_BITS = 20
"""A share of the weight is a multiple of 2 ** -SHARE_BITS."""
MOST_TOKENS = 1 << 22
"""The weight of so many tokens is below 2 ** 63."""


@shared
def step_weights(device: torch.device) -> torch.Tensor:
    """Return the weight of each step, int64 [STEPS], descending. It is shared: do not write to it."""
    weights = [round(2 ** (GREATEST_BITS - step / STEPS_PER_OCTAVE)) for step in range(STEPS)]
    return torch.tensor(weights, dtype=torch.int64, device=device)


def whole_share(top_p: float) -> int:
    """Return a share in units of 2 ** -SHARE_BITS, at least one."""
    return max(1, round(top_p * (1 << SHARE_BITS)))
