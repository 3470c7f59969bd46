"""Torch reference of `encode_keys`, in float64: no code depends on the order of additions."""

import torch

from .._reference import host_lengths, row_lengths, take_tokens
from . import MOST_HALF, STEP
from .centre import centre_levels
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
    correction: str,
    query_centre: torch.Tensor | None,
    shared_centre: bool,
    max_pages: int | None,
) -> None:
    """Reference of `hf_sparse_attn_kernels.encode_keys`."""
    pages = codes.shape[2] // page_size
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
        updates: list[tuple[torch.Tensor, torch.Tensor]] = []
        levels, scale = centres, centre_scale
        if not shared_centre:
            levels, scale = centre_of(taken)
            updates += [(centres, levels), (centre_scale, scale)]
        coded_keys = _encode(taken, levels, scale, query_centre, bits, correction)
        updates += zip((codes, factors), coded_keys, strict=True)
        for target, update in updates:
            by_page = target.view(*target.shape[:2], pages, -1)
            update = update.to(target.dtype).reshape(*page.shape, -1)
            index = page[..., None].expand_as(update)
            by_page.scatter_(2, index, torch.where(is_due[..., None], update, by_page.gather(2, index)))
    coded.copy_(torch.minimum(full_pages, coded + most))


def centre_of(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels of the mean of each page of float64 keys [..., page_size, head_dim], and the scale."""
    return centre_levels(keys.mean(dim=-2))


def residuals_of(
    keys: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the residuals of pages of float64 keys, the rotated ones, and the squared lengths [..., page_size, 1]."""
    residual = keys - (levels.double() * scale.double()[..., None])[..., None, :]
    rotated = residual @ rotation(keys.shape[-1], keys.device).double().T
    return residual, rotated, residual.square().sum(dim=-1, keepdim=True)


def values_of(rotated: torch.Tensor, squares: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of rotated residuals, uint8 [..., head_dim]."""
    if bits == 1:
        return (rotated >= 0).to(torch.uint8)
    unit = (squares / rotated.shape[-1]).sqrt_().mul_(STEP)
    steps = torch.where(unit > 0, rotated / unit, 0.0)  # all residuals 0: any value, with a factor of 0
    return (steps.floor_() + 2).clamp_(0, 3).to(torch.uint8)


def factors_of(
    residual: torch.Tensor,
    rotated: torch.Tensor,
    squares: torch.Tensor,
    value: torch.Tensor,
    query_centre: torch.Tensor | None,
    bits: int,
    correction: str,
) -> torch.Tensor:
    """Return the factors of residuals [batch, kv_heads, pages, page_size, head_dim], and with a centre the offsets."""
    symbols = 2 * value.double() - (2**bits - 1)
    along = (rotated * symbols).sum(dim=4, keepdim=True)
    if correction == "unbiased":
        factors = torch.where(along > 0, squares / along, 0.0)
    else:
        factors = along / symbols.square().sum(dim=4, keepdim=True)
    if query_centre is not None:
        offset = (residual @ query_centre.double()[:, :, None, :, None]) * residual.shape[4] ** -0.5
        factors = torch.cat((factors, offset), dim=4)
    return factors.clamp_(-MOST_HALF, MOST_HALF)


def _encode(
    keys: torch.Tensor,
    levels: torch.Tensor,
    scale: torch.Tensor,
    query_centre: torch.Tensor | None,
    bits: int,
    correction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Code pages of keys [batch, kv_heads, pages, page_size, head_dim] around centres of all pages or of each."""
    residual, rotated, squares = residuals_of(keys, levels, scale)
    value = values_of(rotated, squares, bits)
    return _pack(value, bits), factors_of(residual, rotated, squares, value, query_centre, bits, correction)


def _pack(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack values [..., head_dim] into bytes [..., bits, head_dim // 8]."""
    by_bit = value.view(*value.shape[:-1], 8, -1)  # channel i * (head_dim // 8) + j is bit i of byte j
    shifts = torch.arange(8, device=value.device, dtype=torch.uint8)[:, None]
    planes = [(((by_bit >> bit) & 1) << shifts).sum(dim=-2).to(torch.uint8) for bit in range(bits)]
    return torch.stack(planes, dim=-2)
