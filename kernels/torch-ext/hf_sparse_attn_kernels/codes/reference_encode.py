"""Torch reference of `encode_keys`, in float64: no code depends on the order of additions."""

import torch

from .._reference import host_lengths, row_lengths, take_tokens
from . import LEAST_HALF, MOST_HALF, STEP
from .rotation import rotation


def encode_keys(
    keys: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    bits: int,
    query_centre: torch.Tensor | None,
    max_pages: int | None,
) -> None:
    """Reference of `hf_sparse_attn_kernels.encode_keys`."""
    pages = centre_scale.shape[2]
    full_pages = (row_lengths(seq_start, seq_end) // page_size).clamp_(max=pages)[:, None]  # [batch, 1]
    most = pages if max_pages is None else min(max_pages, pages)
    if host_lengths(seq_start, seq_end) is not None:
        most = min(most, int((full_pages - coded).max()))
    if most > 0:
        # A row and head with fewer pages to code stores others as they are. No page comes twice.
        page = coded[..., None] + torch.arange(most, device=keys.device)  # [batch, kv_heads, most]
        is_due = page < full_pages[..., None]
        page = (page % pages).long()
        tokens = page[..., None] * page_size + torch.arange(page_size, device=keys.device)
        (taken,) = take_tokens((keys,), tokens.flatten(2) + seq_start[:, None, None])
        taken = taken.view(*page.shape, page_size, keys.shape[3]).double()
        for target, update in zip(
            (codes, factors, centres, centre_scale), _encode(taken, query_centre, bits), strict=True
        ):
            by_page = target.view(*target.shape[:2], pages, -1)
            update = update.to(target.dtype).reshape(*page.shape, -1)
            index = page[..., None].expand_as(update)
            by_page.scatter_(2, index, torch.where(is_due[..., None], update, by_page.gather(2, index)))
    coded.copy_(torch.minimum(full_pages, coded + most))


def _encode(
    keys: torch.Tensor, query_centre: torch.Tensor | None, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Code pages of keys [batch, kv_heads, pages, page_size, head_dim]."""
    head_dim = keys.shape[-1]
    mean = keys.mean(dim=3)
    scale = (mean.abs().amax(dim=3) / 127).clamp_(LEAST_HALF, MOST_HALF).half()
    levels = (mean / scale[..., None] + 0.5).floor_().clamp_(-127, 127)
    residual = keys - (levels * scale[..., None])[..., None, :]
    rotated = residual @ rotation(head_dim, keys.device).double().T
    squares = residual.square().sum(dim=4, keepdim=True)
    if bits == 1:
        value = (rotated >= 0).to(torch.uint8)
    else:
        unit = (squares / head_dim).sqrt_().mul_(STEP)
        steps = torch.where(unit > 0, rotated / unit, 0.0)  # all residuals 0: any value, with a factor of 0
        value = (steps.floor_() + 2).clamp_(0, 3).to(torch.uint8)
    symbols = 2 * value.double() - (2**bits - 1)
    along = (rotated * symbols).sum(dim=4, keepdim=True)
    factors = torch.where(along > 0, squares / along, 0.0)
    if query_centre is not None:
        offset = (residual @ query_centre.double()[:, :, None, :, None]) * head_dim**-0.5
        factors = torch.cat((factors, offset), dim=4)
    return _pack(value, bits), factors.clamp_(-MOST_HALF, MOST_HALF), levels, scale


def _pack(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack values [..., head_dim] into bytes [..., bits, head_dim // 8]."""
    by_bit = value.view(*value.shape[:-1], 8, -1)  # channel i * (head_dim // 8) + j is bit i of byte j
    shifts = torch.arange(8, device=value.device, dtype=torch.uint8)[:, None]
    planes = [(((by_bit >> bit) & 1) << shifts).sum(dim=-2).to(torch.uint8) for bit in range(bits)]
    return torch.stack(planes, dim=-2)
