"""Check of key codes against their definition, in float64.

Each part is compared with what follows from the stored parts before it. A mean, a scale or a rotated channel that lies
on the border between two steps may fall to either side, and everything after it follows the side that was taken.
"""

from __future__ import annotations

import torch
from hf_sparse_attn_kernels.codes import reference_encode

from op_bench.code_workload import CodedLayer
from op_bench.oracle import Mismatch

HALF = 2.0**-11
"""Relative rounding of float16."""
FLOAT = 1e-5
"""Rounding of sums in float32, relative to the length of the vector, or to its greatest element in a mean."""
LEAST = 1e-7
"""Rounding of float16 near 0."""


def check_codes(layer: CodedLayer) -> None:
    """Check all pages, one row and KV head after another."""
    page = layer.settings.code_page
    coded = layer.codes_of(0, layer.shape.length // page)
    for row in range(layer.shape.batch):
        for head in range(layer.shape.kv_heads):
            one, where = (slice(row, row + 1), slice(head, head + 1)), f"KV head {head} of row {row}"
            keys = layer.keys[one].double().unflatten(2, (-1, page))
            codes = {name: tensor[one] for name, tensor in coded.items()}
            _check_centres(keys, codes, where)
            _check_tokens(keys, codes, layer.query_centre[one], layer.settings.code_bits, where)


def _check_centres(keys: torch.Tensor, codes: dict[str, torch.Tensor], where: str) -> None:
    scale = codes["centre_scale"].double()
    wanted = reference_encode.centre_of(keys)[1].double()
    _require((scale - wanted).abs() <= 2 * HALF * wanted, f"centre_scale of {where}")
    levels = (keys.mean(dim=3) / scale[..., None]).clamp(-127, 127)
    _require((codes["centres"] - levels).abs() <= 0.5 + 127 * FLOAT, f"centres of {where}")


def _check_tokens(
    keys: torch.Tensor, codes: dict[str, torch.Tensor], query_centre: torch.Tensor, bits: int, where: str
) -> None:
    """Check the codes with the stored centres, and the factors with the stored codes."""
    residual, rotated, squares = reference_encode.residuals_of(keys, codes["centres"], codes["centre_scale"])
    lengths = squares.sqrt()
    value = _unpack(codes["codes"], bits).view(rotated.shape)
    least, most = (reference_encode.values_of(rotated + side * FLOAT * lengths, squares, bits) for side in (-1, 1))
    _require((least <= value) & (value <= most), f"codes of {where}")
    wanted = reference_encode.factors_of(residual, rotated, squares, value, query_centre, bits, "unbiased")
    factors = codes["factors"].double().view(wanted.shape)
    rounding = 1.05 * HALF * wanted.abs() + LEAST  # of float16, and a little of float32
    most_offset = lengths * query_centre.double().norm() * query_centre.shape[-1] ** -0.5
    rounding[..., 1:] += FLOAT * most_offset
    _require((factors - wanted).abs() <= rounding, f"factors of {where}")


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of codes [..., bits, head_dim // 8] by channel, uint8 [..., head_dim]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None]
    planes = ((codes[..., plane, None, :] >> shifts) & 1 for plane in range(bits))
    return torch.stack([plane << place for place, plane in enumerate(planes)]).sum(dim=0).to(torch.uint8).flatten(-2)


def _require(is_right: torch.Tensor, name: str) -> None:
    """Raise unless everything is right; NaN never is."""
    wrong = int((~is_right).sum())
    if wrong:
        raise Mismatch(f"encode_keys: {wrong} of the {is_right.numel()} {name} are wrong")
