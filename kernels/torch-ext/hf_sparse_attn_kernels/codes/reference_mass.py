"""Torch reference of `select_tokens_by_mass`: the candidates sorted by weight, and summed in this order."""

import torch
from torch.nn.functional import pad

from .._reference import row_lengths
from . import MOST_HALF
from .mass_weights import SHARE_BITS, STEPS, STEPS_PER_NAT, step_weights, whole_share


def select_tokens_by_mass(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    top_p: float,
    sink_tokens: int,
    page_size: int,
    max_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.select_tokens_by_mass`."""
    width = scores.shape[2]
    max_tokens = width if max_tokens is None else max_tokens
    length = row_lengths(seq_start, seq_end).clamp_(max=width)[:, None]
    tokens = torch.arange(width, device=scores.device)
    exists = tokens < length  # [batch, width]
    is_forced = exists & ((tokens < sink_tokens) | (tokens >= (length - 1) // page_size * page_size))
    is_candidate = (exists & ~is_forced)[:, None] & (scores > float("-inf"))  # false for NaN
    steps = _steps_below_greatest(scores, is_candidate)

    # Heaviest first; of equal weights the lower index.
    steps, order = steps.sort(dim=-1, stable=True)
    weights = pad(step_weights(scores.device), (0, 1))[steps]
    until = weights.cumsum(dim=-1)
    mass, share = until[..., -1:], whole_share(top_p)
    unit = 1 << SHARE_BITS
    need = mass // unit * share + (mass % unit * share + unit - 1) // unit  # mass * top_p, rounded up
    room = (max_tokens - is_forced.sum(dim=-1))[:, None, None]
    is_taken = (until - weights < need) & (tokens < room) & (steps < STEPS)
    is_chosen = torch.zeros_like(is_taken).scatter_(2, order, is_taken) | is_forced[:, None]

    indices = torch.where(is_chosen, tokens, width).sort(dim=-1)[0][..., :max_tokens].int()
    indices.masked_fill_(indices == width, -1)
    return pad(indices, (0, max_tokens - indices.shape[2]), value=-1), is_chosen.sum(dim=-1).int()


def _steps_below_greatest(scores: torch.Tensor, is_candidate: torch.Tensor) -> torch.Tensor:
    """Return by how many steps each candidate's weight is below the greatest, int64, and STEPS for others."""
    exact = scores if scores.dtype == torch.float64 else scores.float()
    exact = exact.clamp(max=MOST_HALF).masked_fill(~is_candidate, float("-inf"))
    below = (exact.amax(dim=-1, keepdim=True) - exact) * STEPS_PER_NAT
    below = below.masked_fill_(~is_candidate, STEPS).clamp_(max=STEPS - 1)
    return below.long().masked_fill_(~is_candidate, STEPS)
