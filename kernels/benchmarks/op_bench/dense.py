"""Dense decode attention of other libraries, the baseline of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from op_bench import oracle
from op_bench.shapes import Shape


@dataclass(frozen=True)
class Backend:
    """Dense attention of a layer's queries to all tokens of their rows; returns the shape of the queries."""

    name: str
    run: Callable[[Any], torch.Tensor]
    check: Callable[[torch.Tensor, Any], None] = oracle.check_dense_output
    """Raises ``oracle.Mismatch`` if the output is wrong."""


_SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def backends(shape: Shape) -> list[Backend]:
    """Return all backends that may run; running them shows which ones do."""
    found = []
    for name, kind in _SDPA.items():
        if shape.group == 1:
            found.append(Backend(f"SDPA {name}", partial(_sdpa, kind)))
            continue
        # The query heads of a group become query tokens of their KV head: without a mask the sums are the same, and
        # keys and values are read once for the group.
        found.append(Backend(f"SDPA {name}, folded group", partial(_sdpa_folded, kind)))
        found.append(Backend(f"SDPA {name}, enable_gqa", partial(_sdpa, kind)))
    if find_spec("flashinfer") is not None and shape.batch == 1:
        found.append(Backend("FlashInfer", _flashinfer))
    return found


def fast_backends(shape: Shape) -> list[Backend]:
    """Return the backends that were best at some measured shape; the others take most of a run's time."""
    return [each for each in backends(shape) if "efficient" not in each.name and "folded" not in each.name]


def _sdpa(kind: SDPBackend, layer: Any) -> torch.Tensor:
    with sdpa_kernel(kind):
        output = scaled_dot_product_attention(
            layer.query[:, :, None], layer.keys, layer.values, enable_gqa=layer.shape.group > 1
        )
    return output[:, :, 0]


def _sdpa_folded(kind: SDPBackend, layer: Any) -> torch.Tensor:
    shape = layer.shape
    query = layer.query.view(shape.batch, shape.kv_heads, shape.group, shape.head_dim)
    with sdpa_kernel(kind):
        output = scaled_dot_product_attention(query, layer.keys, layer.values)
    return output.reshape(shape.batch, shape.q_heads, shape.head_dim)


def _flashinfer(layer: Any) -> torch.Tensor:
    import flashinfer

    output: torch.Tensor = flashinfer.single_decode_with_kv_cache(
        layer.query[0], layer.keys[0], layer.values[0], kv_layout="HND", use_tensor_cores=layer.shape.group >= 4
    )
    return output[None]
