"""RaBitQCache's whole decode step: calls, bytes to move, and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hf_sparse_attn_kernels as ops
import torch

from op_bench import floors, oracle
from op_bench.code_entries import attend, check_same, check_scores, tokens_read
from op_bench.code_step_entries import take_newest_token_away
from op_bench.code_workload import CodedLayer, code_bytes, code_layer_bytes, in_tokens, make_code_layer
from op_bench.dense import fast_backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import CODE_SHAPES, QUICK_CODE_SHAPES, Settings, Shape


class SharedCentreLayer(CodedLayer):
    """A layer whose keys are coded around one centre."""

    @property
    def code_options(self) -> dict[str, Any]:
        """Options that coding and scoring share."""
        return {**super().code_options, "shared_centre": True}


def _paged(settings: Settings) -> Settings:
    return replace(settings, code_page=settings.top_p_page, code_sinks=settings.top_p_page)


def _make_layer(
    shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
) -> SharedCentreLayer:
    """Create a layer of normally distributed queries, keys and values, all pages coded around the mean, which is 0."""
    made = make_code_layer(shape, _paged(settings), device, seed, impl)
    layer = SharedCentreLayer(**vars(made))
    layer.codes |= {name: torch.zeros_like(made.codes[name][:, :, :1]) for name in ("centres", "centre_scale")}
    layer.encode(0, None, impl)
    return layer


def _scores(layer: CodedLayer, impl: str | None, counter: torch.Tensor | None = None) -> torch.Tensor:
    scores: torch.Tensor = ops.code_scores(
        layer.query,
        **layer.codes,
        **layer.row_bounds,
        **layer.code_options,
        group_reduce="softmax",
        first_page=1,
        counter=counter,
        impl=impl,
    )
    return scores


def _select(layer: CodedLayer, scores: torch.Tensor, impl: str | None) -> Outputs:
    page, settings = layer.settings.code_page, layer.settings
    options = {"sink_tokens": page, "page_size": page, "max_tokens": settings.code_budget, "top_p": settings.top_p}
    selected: Outputs = ops.select_tokens_by_mass(scores, **layer.row_bounds, **options, impl=impl)
    return selected


def _run(layer: CodedLayer, impl: str | None) -> Outputs:
    """Run a step whose token fills no page that is still to be coded, as 127 of 128 do, op by op as the method does."""
    layer.keys[:, :, -1] = layer.new_key
    layer.values[:, :, -1] = layer.new_value
    ops.encode_keys(
        layer.keys,
        **layer.codes,
        **layer.row_bounds,
        **layer.code_options,
        coded=layer.coded,
        max_pages=1,
        impl=impl,
    )
    indices, counts = _select(layer, _scores(layer, impl, layer.counter), impl)
    return attend(layer, indices, counts, impl), indices, counts


def _check(layer: CodedLayer, outputs: Outputs) -> None:
    out, indices, counts = outputs
    oracle.check_appended(layer)
    oracle.check_counter(layer, (*tokens_read(layer), _scanned_bytes(layer.shape, layer.settings), 1))
    options = {**layer.code_options, "group_reduce": "softmax"}
    every = ops.code_scores(layer.query, **layer.codes, **layer.row_bounds, **options)
    check_scores("softmax", layer, (every,))
    scores = _scores(layer, None)
    check_same("select_tokens_by_mass", (indices, counts), _select(layer, scores, "reference"))
    oracle.check_sparse_output(out, layer, indices, counts)


def _scanned_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the metadata that a step reads: all pages but the first, which is always read, and the newest."""
    return _coded_bytes(shape, settings, shape.length // settings.top_p_page - 2)


def _coded_bytes(shape: Shape, settings: Settings, pages: int) -> int:
    """Bytes of the codes, factors and the one centre of so many pages, over rows and KV heads."""
    pairs, centre = shape.batch * shape.kv_heads, shape.head_dim + 2
    return code_bytes(shape, _paged(settings), pages) - pairs * (pages - 1) * centre


def _step_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the metadata and of the attention."""
    return _scanned_bytes(shape, settings) + floors.sparse_decode_bytes(shape, in_tokens(settings))


RABITQCACHE = Family(
    "RaBitQCache's decode steps",
    CODE_SHAPES,
    QUICK_CODE_SHAPES,
    (Entry("rabitqcache_step", "", _run, _check, _step_bytes, take_newest_token_away, against_dense=True),),
    _make_layer,
    lambda shape, settings: code_layer_bytes(shape, _paged(settings)),
    step_bytes=_step_bytes,
    backends=fast_backends,
)
