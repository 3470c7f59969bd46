"""Torch references of the ops on key codes."""

import math
from typing import Any

import torch
from torch.nn.functional import pad

from .._reference import append, compute_dtype, host_lengths, row_lengths, score_order
from ..attention.reference import sparse_decode
from . import MOST_HALF, ROTATED_UNITS, UNITS
from .reference_encode import encode_keys
from .reference_mass import select_tokens_by_mass
from .rotation import rotation, rotation_levels

__all__ = [
    "append_and_attend_tokens",
    "append_and_select_tokens",
    "code_scores",
    "encode_keys",
    "select_tokens_by_mass",
    "select_tokens_by_score",
]

# Above and below every `score_order`.
_FORCED, _ABSENT = 1 << 33, -(1 << 33)


def code_scores(
    query: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    bits: int,
    query_centre: torch.Tensor | None,
    shared_centre: bool,
    first_page: int,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
    counter: torch.Tensor | None,
) -> torch.Tensor:
    """Reference of `hf_sparse_attn_kernels.code_scores`."""
    batch, kv_heads, capacity = codes.shape[:3]
    head_dim = query.shape[2]
    num_tokens = capacity if num_tokens is None else num_tokens
    is_exact = query.dtype == torch.float64
    dtype = torch.float64 if is_exact else torch.float16
    lengths = row_lengths(seq_start, seq_end).clamp_(max=num_tokens)
    scored_pages = ((lengths - 1) // page_size).clamp_(min=0)
    if counter is not None:
        page_bytes, centre_bytes = page_size * (bits * head_dim // 8 + 2 * factors.shape[3]), head_dim + 2
        candidate_pages = (scored_pages - first_page).clamp_(min=0)
        centre_count = candidate_pages.clamp(max=1) if shared_centre else candidate_pages
        counter[2] += kv_heads * (candidate_pages.sum() * page_bytes + centre_count.sum() * centre_bytes)
    pages = (num_tokens - 1) // page_size
    if host_lengths(seq_start, seq_end) is not None:
        pages = int(scored_pages.max())
    tokens = pages * page_size
    if tokens == 0:
        return query.new_full((batch, kv_heads, num_tokens), float("-inf"), dtype=dtype)

    grouped = query.to(compute_dtype(query.dtype)).view(batch, kv_heads, -1, head_dim)
    centred = grouped if query_centre is None else grouped - query_centre.to(grouped.dtype)[:, :, None]
    # Products of whole numbers: those with symbols are below 2**24, so any order of additions is exact in float32.
    whole, unit = _in_units(grouped, UNITS)
    of_centres = (
        whole @ centres[:, :, :pages].double().transpose(2, 3) * unit * centre_scale[:, :, None, :pages].double()
    ).expand(-1, -1, -1, pages)
    whole, unit = _rotated(centred)
    symbols = _symbols(codes[:, :, :tokens], compute_dtype(query.dtype))
    of_symbols = (whole.to(symbols.dtype) @ symbols.transpose(2, 3)).double() * unit
    factor, *offset = factors[:, :, None, :tokens].double().unbind(dim=4)
    estimates = of_symbols * factor + of_centres.repeat_interleave(page_size, dim=3)
    if offset:
        estimates += offset[0] * head_dim**0.5
    estimates *= head_dim**-0.5 if scale is None else scale  # [batch, kv_heads, group, tokens]

    token = torch.arange(tokens, device=query.device)
    is_absent = (token < first_page * page_size) | (token >= (scored_pages * page_size)[:, None])  # [batch, tokens]
    if group_reduce == "max" or estimates.shape[2] == 1:
        reduced = estimates.amax(dim=2)
    else:
        if not is_exact:
            # Kept in base 2, at most the greatest number of float16, and -inf below the least.
            estimates = (estimates / math.log(2)).clamp_(max=MOST_HALF).half().double() * math.log(2)
        estimates = estimates.masked_fill_(is_absent[:, None, None], float("-inf"))
        lse = estimates.logsumexp(dim=3, keepdim=True).clamp_(min=-1e30)
        reduced = (estimates - lse).logsumexp(dim=2)
    if not is_exact:
        reduced = reduced.clamp_(-MOST_HALF, MOST_HALF).to(dtype)
    reduced.masked_fill_(is_absent[:, None], float("-inf"))
    return pad(reduced, (0, num_tokens - tokens), value=float("-inf"))


def _in_units(vectors: torch.Tensor, units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 vectors to whole numbers of units, so many in the greatest, and return both in float64.

    Vectors of float64 are returned as they are, with a unit of 1.
    """
    if vectors.dtype == torch.float64:
        return vectors, vectors.new_ones(())
    # Each operation rounds once, in float32, as in the kernels.
    unit = vectors.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30) * (1 / units)
    return (vectors / unit + 0.5).floor_().double(), unit.double()


def _rotated(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate vectors and round them to whole numbers of units; return both as `_in_units` does."""
    if vectors.dtype == torch.float64:
        return _in_units(vectors @ rotation(vectors.shape[-1], vectors.device).double().T, ROTATED_UNITS)
    levels, level_unit = rotation_levels(vectors.shape[-1], vectors.device)
    whole, unit = _in_units(vectors, UNITS)
    rotated, rotated_unit = _in_units((whole @ levels.double().T).float(), ROTATED_UNITS)
    return rotated, rotated_unit * unit * level_unit


def _symbols(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack codes [..., bits, head_dim // 8] into odd whole numbers [..., head_dim]."""
    bits = codes.shape[-2]
    shifts = torch.arange(8, device=codes.device, dtype=torch.uint8)[:, None]
    planes = ((codes[..., None, :] >> shifts) & 1).flatten(-2).unbind(dim=-2)  # each [..., head_dim]
    value = planes[0] if bits == 1 else planes[0] + 2 * planes[1]
    symbols: torch.Tensor = 2 * value.to(dtype) - (2**bits - 1)
    return symbols


def select_tokens_by_score(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.select_tokens_by_score`."""
    batch, kv_heads, width = scores.shape
    length = row_lengths(seq_start, seq_end).clamp_(max=width)[:, None]
    tokens = torch.arange(width, device=scores.device)
    is_forced = (tokens < sink_tokens) | (tokens >= (length - 1) // page_size * page_size)  # [batch, width]
    wide = scores if scores.dtype == torch.float64 else scores.float()
    order = score_order(wide).masked_fill_(is_forced[:, None], _FORCED)
    order.masked_fill_((tokens >= length)[:, None], _ABSENT)
    # One integer to rank by: the order in the high bits, then the index, lower ones first.
    index_bits = width.bit_length()
    last = (1 << index_bits) - 1  # above every index
    rank = (order << index_bits) + (last - tokens)
    best = rank.topk(min(max_tokens, width), dim=-1, sorted=False)[0]
    indices = (last - (best & last)).masked_fill_(best < (_ABSENT // 2) << index_bits, last)
    indices = indices.sort(dim=-1)[0].int()  # [batch, kv_heads, min(max_tokens, width)]
    indices.masked_fill_(indices == last, -1)
    indices = pad(indices, (0, max_tokens - indices.shape[2]), value=-1)
    return indices, length.clamp(max=max_tokens).expand(batch, kv_heads).contiguous()


def append_and_select_tokens(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    sink_tokens: int,
    bits: int,
    correction: str,
    query_centre: torch.Tensor | None,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
    counter: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.append_and_select_tokens`."""
    append((keys, values), (new_key, new_value), seq_start, seq_end)
    metadata = (codes, factors, centres, centre_scale)
    coding: dict[str, Any] = {
        "page_size": page_size,
        "bits": bits,
        "query_centre": query_centre,
        "shared_centre": False,
    }
    encode_keys(keys, *metadata, coded, seq_start, seq_end, correction=correction, max_pages=1, **coding)
    scores = code_scores(
        query,
        *metadata,
        seq_start,
        seq_end,
        first_page=0,
        scale=scale,
        group_reduce=group_reduce,
        num_tokens=num_tokens,
        counter=counter,
        **coding,
    )
    return select_tokens_by_score(
        scores, seq_start, seq_end, max_tokens=max_tokens, sink_tokens=sink_tokens, page_size=page_size
    )


def append_and_attend_tokens(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    sink_tokens: int,
    bits: int,
    correction: str,
    query_centre: torch.Tensor | None,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.append_and_attend_tokens`."""
    block_indices, block_counts = append_and_select_tokens(
        query,
        new_key,
        new_value,
        keys,
        values,
        codes,
        factors,
        centres,
        centre_scale,
        coded,
        seq_start,
        seq_end,
        page_size=page_size,
        max_tokens=max_tokens,
        sink_tokens=sink_tokens,
        bits=bits,
        correction=correction,
        query_centre=query_centre,
        scale=scale,
        group_reduce=group_reduce,
        num_tokens=num_tokens,
        counter=counter,
    )
    out, lse = sparse_decode(
        query,
        keys,
        values,
        block_indices,
        block_counts,
        seq_start,
        seq_end,
        block_size=1,
        rope_cos=None,
        rope_sin=None,
        scale=scale,
        counter=counter,
        finished=finished,
    )
    return out, lse, block_indices, block_counts
