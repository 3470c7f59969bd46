"""The stored form of a centre: levels of 8 bits with one scale."""

import torch

from . import LEAST_HALF, MOST_HALF


def centre_levels(mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels of vectors [..., head_dim], int8, and their scales [...], float16, for `encode_keys`.

    The scale is the greatest magnitude over 127, at least 2 ** -14; the vector is about levels * scale.
    """
    scale = (mean.abs().amax(dim=-1) / 127).clamp_(LEAST_HALF, MOST_HALF).half()
    levels = (mean / scale[..., None] + 0.5).floor_().clamp_(-127, 127)
    return levels.to(torch.int8), scale
