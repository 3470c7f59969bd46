"""Torch reference of `page_bounds`."""

import torch
from torch.nn.functional import pad

from .._reference import compute_dtype, host_lengths, power_of_two, row_lengths, take_tokens
from .reference_summaries import summarize

MAX_LEVEL = 127  # of bounds in 8 bits; -128 stays unused, so that levels are symmetric
MAX_EXPONENT = 60


def page_bounds(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    num_new: int,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    statistic: str,
) -> None:
    """Reference of `hf_sparse_attn_kernels.page_bounds`."""
    if num_new == 0:
        return
    lengths = host_lengths(seq_start, seq_end)
    if lengths is None:
        exponents = (page_exponent, channel_exponent)
        _on_device(keys, page_min, page_max, seq_start, seq_end, page_size, num_new, *exponents, statistic)
        return
    for row, (start, length) in enumerate(zip(seq_start.tolist(), lengths, strict=True)):
        if length == 0:
            continue
        first_page = max(0, length - num_new) // page_size
        if channel_exponent is not None and length > num_new > 1:
            needed = _channel_exponents(*_extremes(keys[row, :, start + length - num_new : start + length], num_new))
            if (needed > channel_exponent[row]).any():
                channel_exponent[row] = torch.maximum(channel_exponent[row], needed)
                first_page = 0
        tokens = keys[row, :, start + first_page * page_size : start + length]
        if statistic == "minmax":
            lower, upper = _extremes(tokens, page_size)  # [kv_heads, pages, head_dim]
        else:
            lower, upper = _summarize_pages(tokens, page_size, statistic)
        pages = slice(first_page, first_page + lower.shape[1])
        if page_exponent is not None and channel_exponent is not None:
            if length <= num_new:
                all_bounds = (lower, upper) if statistic == "minmax" else _extremes(tokens, length)
                channel_exponent[row] = _channel_exponents(*all_bounds)
            lower, upper, exponent = _quantize(lower, upper, channel_exponent[row])
            page_exponent[row, :, pages] = exponent
        page_min[row, :, pages] = lower
        page_max[row, :, pages] = upper


def _on_device(
    keys: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    page_size: int,
    num_new: int,
    page_exponent: torch.Tensor | None,
    channel_exponent: torch.Tensor | None,
    statistic: str,
) -> None:
    """Update the bounds of all rows at once, with lengths known only on the device."""
    batch, kv_heads, capacity, head_dim = keys.shape
    raises = channel_exponent is not None and num_new > 1
    # The maximum number of pages that num_new consecutive tokens can touch; all pages if exponents may be raised.
    most_pages = page_min.shape[2]
    if not raises:
        most_pages = min((min(num_new, capacity) + page_size - 2) // page_size + 1, most_pages)
    length = row_lengths(seq_start, seq_end).long()[:, None, None]  # [batch, 1, 1]
    first_touched = (length - num_new).clamp(min=0) // page_size
    last_page = (length - 1).clamp(min=0) // page_size
    # A row with fewer pages recomputes its last one: writing the same value again is harmless.
    first_page = torch.zeros_like(first_touched) if raises else first_touched
    pages = torch.minimum(first_page + torch.arange(most_pages, device=keys.device)[:, None], last_page)
    first_token = pages * page_size  # [batch, pages, 1]
    tokens = first_token + torch.arange(page_size, device=keys.device)
    # An absent token reads the page's first one instead, which changes no minimum and no maximum.
    positions = torch.where(tokens < length, tokens, first_token) + seq_start[:, None, None]
    (taken,) = take_tokens((keys,), positions.flatten(1)[:, None])
    taken = taken.view(batch, kv_heads, most_pages, page_size, head_dim)
    if statistic == "minmax":
        lower, upper = taken.amin(dim=3), taken.amax(dim=3)
    else:
        counts = (length - first_token)[:, None, :, 0].clamp(1, page_size).expand(-1, kv_heads, -1)
        lower, upper = summarize(taken.to(compute_dtype(keys.dtype)), counts, statistic)

    is_due = (length > 0)[..., None].expand(-1, kv_heads, most_pages, 1)
    updates = {page_min: lower, page_max: upper}
    if page_exponent is not None and channel_exponent is not None:
        has_older = length > num_new
        is_old = tokens < (length - num_new)  # [batch, pages, page_size]
        new = taken.masked_fill(is_old[:, None, ..., None], 0)
        needed = _channel_exponents(new.amin(dim=3), new.amax(dim=3))
        if not raises:
            needed = torch.where(has_older, channel_exponent, needed)
        raised = has_older & (needed > channel_exponent).any(dim=2, keepdim=True)  # [batch, kv_heads, 1]
        exponent = torch.where(has_older, torch.maximum(needed, channel_exponent), needed)
        channel_exponent.copy_(torch.where(length > 0, exponent, channel_exponent))
        is_due = is_due & (raised[..., None] | (pages >= first_touched)[:, None])
        lower, upper, level_exponent = _quantize(lower, upper, channel_exponent)
        updates = {page_min: lower, page_max: upper, page_exponent[..., None]: level_exponent[..., None]}
    for target, update in updates.items():
        index = pages[:, None].expand_as(update)
        target.scatter_(2, index, torch.where(is_due, update.to(target.dtype), target.gather(2, index)))


def _summarize_pages(tokens: torch.Tensor, page_size: int, statistic: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of `tokens` [n, tokens, head_dim] by page, [n, pages, head_dim]."""
    length = tokens.shape[1]
    num_pages = -(-length // page_size)
    tokens = pad(tokens.to(compute_dtype(tokens.dtype)), (0, 0, 0, num_pages * page_size - length))
    counts = torch.full((num_pages,), page_size, device=tokens.device)
    counts[-1] -= num_pages * page_size - length
    return summarize(tokens.view(tokens.shape[0], num_pages, page_size, -1), counts, statistic)


def _extremes(tokens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return minimum and maximum of `tokens` [n, tokens, head_dim] by page, [n, pages, head_dim]."""
    length = tokens.shape[1]
    if length <= page_size:
        return tokens.amin(dim=1, keepdim=True), tokens.amax(dim=1, keepdim=True)
    full = length // page_size * page_size
    pages = tokens[:, :full].view(tokens.shape[0], -1, page_size, tokens.shape[2])
    lower, upper = pages.amin(dim=2), pages.amax(dim=2)
    if full < length:
        rest = tokens[:, full:]
        lower = torch.cat((lower, rest.amin(dim=1, keepdim=True)), dim=1)
        upper = torch.cat((upper, rest.amax(dim=1, keepdim=True)), dim=1)
    return lower, upper


def _least_exponent(value: torch.Tensor, largest_mantissa: float) -> torch.Tensor:
    """Return the least e with value <= largest_mantissa * 2 ** (e + 7), the mantissa between 0.5 and 1."""
    mantissa, exponent = value.frexp()
    return exponent - 6 - (mantissa <= largest_mantissa).int()


def _channel_exponents(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Return channel exponents, int8 [.., head_dim], from the bounds [.., pages, head_dim] of all tokens of a row."""
    largest = torch.maximum(-lower, upper).amax(dim=-2).to(compute_dtype(lower.dtype))
    largest = torch.maximum(largest, largest.roll(-(largest.shape[-1] // 2), dims=-1))
    exponent = _least_exponent(largest, 90 / 128).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return exponent.masked_fill(largest == 0, -MAX_EXPONENT).to(torch.int8)


def _quantize(
    lower: torch.Tensor, upper: torch.Tensor, channel_exponent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round bounds [.., pages, head_dim] outwards to levels; also return the exponents [.., pages]."""
    dtype = compute_dtype(lower.dtype)
    # Both bounds as outward magnitudes, so that one sequence of operations serves both.
    outward = torch.stack((-lower, upper)).to(dtype) * power_of_two(-channel_exponent, dtype).unsqueeze(-2)
    largest = outward.amax(dim=(0, -1))  # [.., pages], 0 or more: a minimum is at most the maximum
    if largest.device.type == "cpu" and largest.max() <= MAX_LEVEL:  # as in most decode steps
        exponent = torch.zeros_like(largest, dtype=torch.int8)
    else:
        exponent = _least_exponent(largest, MAX_LEVEL / 128).clamp_(0, MAX_EXPONENT)
        outward *= power_of_two(-exponent, dtype).unsqueeze(-1)
    levels = outward.ceil_().clamp_(-MAX_LEVEL, MAX_LEVEL).to(torch.int8)
    return -levels[0], levels[1], exponent.to(torch.int8)
