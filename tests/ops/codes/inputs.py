"""Rows with coded keys, and the definition of the codes one token at a time in float64."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hf_sparse_attn_kernels import encode_keys
from hf_sparse_attn_kernels.codes.centre import centre_levels
from hf_sparse_attn_kernels.codes.rotation import rotation

from tests.ops.helpers import POISON, Rows, device, make_rows

INF = float("inf")
HALF = 2.0**-11
"""Relative rounding of float16."""


@dataclass
class Coded:
    """Rows, their metadata by the names of the ops' arguments, and the ops' options."""

    rows: Rows
    metadata: dict[str, torch.Tensor]
    coded: torch.Tensor
    options: dict[str, Any]
    correction: str = "unbiased"

    @property
    def page_size(self) -> int:
        return self.options["page_size"]

    @property
    def has_shared_centre(self) -> bool:
        return "shared_centre" in self.options

    def ends(self, lengths: list[int] | None = None) -> dict[str, torch.Tensor]:
        """Bounds of the rows, cut to `lengths`."""
        if lengths is None:
            return {"seq_start": self.rows.start, "seq_end": self.rows.end}
        return {"seq_start": self.rows.start, "seq_end": self.rows.start + torch.tensor(lengths).int().to(device)}

    def encode(self, lengths: list[int] | None = None, **options: Any) -> None:
        """Code the rows, cut to `lengths`."""
        options = {**self.options, "correction": self.correction, **options}
        encode_keys(self.rows.keys, coded=self.coded, **self.metadata, **self.ends(lengths), **options)

    def tensors(self) -> list[torch.Tensor]:
        """All that `encode` writes."""
        return [*self.metadata.values(), self.coded]


def make_coded(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    page_size: int = 16,
    bits: int = 1,
    correction: str = "unbiased",
    centred: bool = True,
    shared: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Coded:
    """Rows whose keys and queries lie off the origin, with room for codes that holds poison.

    With `shared` each KV head has one given centre.
    """
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    shift = torch.randn(len(lengths), kv_heads, head_dim, generator=generator).to(device)
    rows.keys += shift[:, :, None].to(dtype)
    rows.query += shift.repeat_interleave(group, dim=1).to(dtype)
    pages = -(-rows.capacity // page_size)
    pair = (len(lengths), kv_heads)
    metadata = {
        "codes": torch.full((*pair, pages * page_size, bits, head_dim // 8), POISON, dtype=torch.uint8, device=device),
        "factors": torch.full((*pair, pages * page_size, 1 + centred), float("nan"), device=device).half(),
        "centres": torch.full((*pair, pages, head_dim), POISON, dtype=torch.int8, device=device),
        "centre_scale": torch.full((*pair, pages), float("nan"), device=device).half(),
    }
    options = {"page_size": page_size, "bits": bits, "query_centre": 0.9 * shift if centred else None}
    if shared:
        metadata["centres"], metadata["centre_scale"] = centre_levels(1.1 * shift[:, :, None])
        options["shared_centre"] = True
    return Coded(rows, metadata, torch.zeros(pair, dtype=torch.int32, device=device), options, correction)


def values_of(coded: Coded) -> torch.Tensor:
    """The values of all channels [batch, kv_heads, tokens, head_dim], channel by channel."""
    codes = coded.metadata["codes"]
    bits, bytes_per_plane = codes.shape[3:]
    values = torch.zeros((*codes.shape[:3], 8 * bytes_per_plane), dtype=torch.long, device=device)
    for channel in range(8 * bytes_per_plane):
        bit, byte = channel // bytes_per_plane, channel % bytes_per_plane
        for plane in range(bits):
            values[..., channel] += ((codes[..., plane, byte].long() >> bit) & 1) << plane
    return values


def centres_of(coded: Coded) -> torch.Tensor:
    """The stored centres, float64 [batch, kv_heads, pages, head_dim]."""
    centres = coded.metadata["centres"].double() * coded.metadata["centre_scale"].double()[..., None]
    return centres.expand(-1, -1, coded.metadata["codes"].shape[2] // coded.page_size, -1)


def estimates_of(coded: Coded, row: int, head: int, tokens: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimates of the first `tokens` tokens for each query head, from the codes in float64, and their rounding.

    The rounding bounds what vectors of whole numbers may change: queries of 16,256 units, rotated ones of 31, and a
    rotation of 127 if it is not a Hadamard matrix.
    """
    group = coded.rows.query.shape[1] // coded.coded.shape[1]
    queries = coded.rows.query[row, head * group : (head + 1) * group].double()
    bits, centre = coded.options["bits"], coded.options["query_centre"]
    centred = queries if centre is None else queries - centre[row, head].double()
    rotated = centred @ _rotation(queries.shape[1]).T
    symbols = 2 * values_of(coded)[row, head, :tokens].double() - (2**bits - 1)
    factors = coded.metadata["factors"][row, head, :tokens].double()
    centres = centres_of(coded)[row, head].repeat_interleave(coded.page_size, dim=0)[:tokens]
    estimates = queries @ centres.T + factors[:, 0] * (rotated @ symbols.T)
    if centre is not None:
        estimates += queries.shape[1] ** 0.5 * factors[:, 1]
    of_centres = _half_unit(queries, 16256) * centres.abs().sum(dim=1)
    of_symbols = _rotation_rounding(centred, rotated) * factors[:, 0] * symbols.abs().sum(dim=1)
    return scale * estimates, abs(scale) * (of_centres + of_symbols)


def _half_unit(vectors: torch.Tensor, units: int) -> torch.Tensor:
    return 0.5 * vectors.abs().amax(dim=-1, keepdim=True) / units


def _rotation_rounding(vectors: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """Bound what rounding changes in a channel of the rotated vectors, [vectors, 1]."""
    head_dim = vectors.shape[1]
    matrix = _rotation(head_dim)
    of_vector = _half_unit(vectors, 16256) * matrix.abs().sum(dim=1).amax()
    of_matrix = 0.0
    if head_dim & (head_dim - 1):
        of_matrix = matrix.abs().amax() / 254 * (vectors.abs() + _half_unit(vectors, 16256)).sum(dim=1, keepdim=True)
    before = of_vector + of_matrix
    # The unit is that of the rounded rotation.
    return before + _half_unit(rotated, 31) + before / 62


def _rotation(head_dim: int) -> torch.Tensor:
    return rotation(head_dim, device).double()


def divide(monkeypatch: pytest.MonkeyPatch, *, span: int, at_once: int, sampled: int, deviations: float = 3.0) -> None:
    """Give a program of a selection few tokens, so that short rows have several. A tile has 256."""
    module = pytest.importorskip("hf_sparse_attn_kernels.codes.select")
    sizes = {"TILE": 256, "REDUCED": 1024, "MOST_SPAN": span, "LEAST_AT_ONCE": 256, "MOST_AT_ONCE": at_once}
    sizes |= {"LEAST_SAMPLED": sampled, "MOST_SAMPLED": sampled, "DEVIATIONS": deviations}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
