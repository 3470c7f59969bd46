"""Membership in lists of indices."""

import torch


def members(indices: torch.Tensor, counts: torch.Tensor, size: int) -> torch.Tensor:
    """Return which of `size` things each list [.., n] names, bool [.., size]."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    named = torch.where(listed & (indices >= 0) & (indices < size), indices.long(), size)
    return torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device).scatter_(
        -1, named, True
    )[..., :size]
