"""RoPE as its paper writes it."""

import torch


def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    """Turn the pairs of channels (i, i + d/2) of ``x`` [..., d], as complex numbers, by a position; in float64."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones(half).double(), position * frequencies
    )
    return torch.cat([turned.real, turned.imag], dim=-1)
