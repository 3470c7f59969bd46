"""Codes of keys, and the estimates of q.k from them, for any combination of the choices that a study compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hf_sparse_attn_kernels.codes.rotation import rotation, rotation_levels

STEP = 0.9957
"""Step of the uniform quantizer of 2 bits with the least error for a Gaussian of unit variance."""
QUERY_UNITS = 128 * 127
"""Units in a query's greatest channel before it is rotated, of which two parts of 8 bits hold any number."""
LEAST_SQUARES = "least_squares"
"""The ``correction`` with which a residual's decoded symbols are nearest to it."""
_LEAST_HALF, _MOST_HALF = 2.0**-14, 65504.0


class Page(NamedTuple):
    """The codes of a layer's first pages."""

    metadata: Mapping[str, torch.Tensor]
    pages: int
    page_size: int

    def tokens(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the tokens' metadata, [batch, kv_heads, tokens, ...], as ``dtype``."""
        return self.metadata[name][:, :, : self.pages * self.page_size].to(dtype)


@dataclass(frozen=True)
class Coder:
    """Codes pages of keys, and estimates q.k; the fields are those of ``KeyCodesStudy``."""

    bits: int
    key_centre: str
    rotation: bool
    correction: bool | str
    query_bits: int | None

    def encode(self, keys: torch.Tensor, first: int, full: torch.Tensor, metadata: dict[str, torch.Tensor]) -> None:
        """Write the codes of pages of keys.

        Parameters
        ----------
        keys
            float64 [batch, kv_heads, pages, page_size, head_dim].
        first
            Number of the first of these pages.
        full
            int [batch]: full pages of each row; keys beyond them may be anything.
        metadata
            As of ``KeyCodesStudy``. Rows without codes get their centre and their scales here.
        """
        pages, page_size, head_dim = keys.shape[2:]
        is_new = (metadata["coded"] == 0) & (full > 0)[:, None]  # [batch, kv_heads]
        is_full = (torch.arange(first, first + pages, device=keys.device) < full[:, None])[:, None, :, None, None]
        count = is_full.sum((2, 3, 4)).clamp_min(1) * page_size  # [batch, 1]

        def mean_of(values: torch.Tensor) -> torch.Tensor:
            return values.masked_fill(~is_full, 0).sum((2, 3)) / count[..., None]

        if self.key_centre == "prompt":
            _set_rows(metadata["prompt_centre"], is_new, mean_of(keys))
        centre = self._centre(keys, first, metadata)
        residual = keys - centre
        rotated = residual @ rotation(head_dim, keys.device).double().T if self.rotation else residual
        if not self.rotation:
            scale = mean_of(residual.abs()) if self.bits == 1 else mean_of(residual.square()).sqrt()
            _set_rows(metadata["channel_scale"], is_new, scale)
        symbols, decoded = self._symbols(rotated, metadata["channel_scale"])
        squares = residual.square().sum(4)
        along, norms = (rotated * decoded).sum(4), decoded.norm(dim=4)
        if self.correction == LEAST_SQUARES:
            factors = torch.where(norms > 0, along / norms.square(), 0.0)
        elif self.correction:
            factors = torch.where(along > 0, squares / along, 0.0)
        else:
            factors = torch.where(norms > 0, squares.sqrt() / norms, 0.0)
        offsets = residual @ metadata["query_centre"].double().transpose(2, 3)[:, :, None] * head_dim**-0.5
        begin, end = first * page_size, (first + pages) * page_size
        for name, values in (("symbols", symbols), ("factors", factors[..., None]), ("offsets", offsets)):
            target = metadata[name][:, :, begin:end]
            limited = values if target.dtype == torch.int8 else values.clamp(-_MOST_HALF, _MOST_HALF)
            target.copy_(limited.flatten(2, 3).to(target.dtype))

    def _centre(self, keys: torch.Tensor, first: int, metadata: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return what the pages' residuals are taken from, and store the centres of pages."""
        if self.key_centre == "none":
            return torch.zeros_like(keys[..., :1, :])
        if self.key_centre == "prompt":
            return metadata["prompt_centre"][:, :, None, None]
        mean = keys.mean(3)
        scale = (mean.abs().amax(3) / 127).clamp(_LEAST_HALF, _MOST_HALF).half()
        levels = (mean / scale[..., None].double() + 0.5).floor().clamp(-127, 127)
        last = first + keys.shape[2]
        metadata["levels"][:, :, first:last] = levels.to(torch.int8)
        metadata["level_scale"][:, :, first:last] = scale
        return (levels * scale[..., None].double())[..., None, :]

    def _symbols(self, rotated: torch.Tensor, channel_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the odd symbols of residuals, and what they stand for up to each key's factor."""
        scale = channel_scale[:, :, None, None]
        if self.bits == 1:
            symbols = torch.where(rotated >= 0, 1.0, -1.0).double()
        else:
            unit = scale if not self.rotation else rotated.square().mean(4, keepdim=True).sqrt()
            steps = torch.where(unit > 0, rotated / (unit * STEP), 0.0)
            symbols = 2 * (steps.floor() + 2).clamp(0, 3) - 3
        return symbols, symbols if self.rotation else symbols * scale

    def estimate(self, query: torch.Tensor, coded: Page) -> torch.Tensor:
        """Return estimates of q.k of all tokens of pages, for queries [batch, kv_heads, group, head_dim].

        With ``query_bits`` they are rounded as in the op, and there as here not in float64.
        """
        metadata, dtype, head_dim = coded.metadata, query.dtype, query.shape[3]
        centres = metadata["query_centre"].to(dtype)
        left = query - centres if centres.shape[2] else query
        whole, unit = self._with_symbols(left, metadata["channel_scale"])
        estimates = whole @ coded.tokens("symbols", dtype).transpose(2, 3) * unit
        estimates = estimates * coded.tokens("factors", dtype).transpose(2, 3)
        if centres.shape[2]:
            estimates = estimates + coded.tokens("offsets", dtype).transpose(2, 3) * head_dim**0.5
        if self.key_centre == "page":
            levels = metadata["levels"][:, :, : coded.pages].to(dtype)
            whole, unit = self._rounded(query, QUERY_UNITS)
            of_pages = whole @ levels.transpose(2, 3) * unit
            of_pages = of_pages * metadata["level_scale"][:, :, None, : coded.pages].to(dtype)
            return estimates + of_pages.repeat_interleave(coded.page_size, 3)
        if self.key_centre == "prompt":
            return estimates + (query * metadata["prompt_centre"].to(dtype)[:, :, None]).sum(3, keepdim=True)
        return estimates

    def _with_symbols(self, query: torch.Tensor, channel_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the symbols are multiplied with, and its unit, for queries less their centre."""
        head_dim, dtype = query.shape[3], query.dtype
        if not self.rotation:
            return self._rounded(query * channel_scale.to(dtype)[:, :, None], self._most_units)
        if self.query_bits is None or dtype == torch.float64:
            rotated = query @ rotation(head_dim, query.device).to(dtype).T
            return rotated, rotated.new_ones(())
        levels, level_unit = rotation_levels(head_dim, query.device)
        whole, unit = self._rounded(query, QUERY_UNITS)
        products = (whole.double() @ levels.double().T).to(dtype)  # of whole numbers, the same in any order
        rotated, rotated_unit = self._rounded(products, self._most_units)
        return rotated, rotated_unit * unit * level_unit

    @property
    def _most_units(self) -> int:
        return 0 if self.query_bits is None else 2 ** (self.query_bits - 1) - 1

    def _rounded(self, vectors: torch.Tensor, units: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return vectors as whole numbers of a unit, so many in the greatest, or as they are with a unit of 1."""
        if self.query_bits is None or vectors.dtype == torch.float64:
            return vectors, vectors.new_ones(())
        unit = vectors.abs().amax(-1, keepdim=True).clamp_min(1e-30) * (1 / units)
        return (vectors / unit + 0.5).floor(), unit


def _set_rows(target: torch.Tensor, is_new: torch.Tensor, values: torch.Tensor) -> None:
    """Write [batch, kv_heads, n] where [batch, kv_heads] says so."""
    target.copy_(torch.where(is_new[..., None], values, target))
