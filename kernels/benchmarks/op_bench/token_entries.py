"""TokenSelect's ops and its two whole steps: calls, bytes to move, and checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import hf_sparse_attn_kernels as ops
import torch

from op_bench import dense_chunk, oracle, token_floors, token_oracle
from op_bench.dense import fast_backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import (
    CHUNK_SHAPES,
    QUICK_CHUNK_SHAPES,
    QUICK_TOKEN_DECODE_SHAPES,
    TOKEN_DECODE_SHAPES,
)
from op_bench.token_workload import TokenLayer, make_token_layer, rotated, token_layer_bytes

KEEP = -1.0
"""A threshold that every query's cosine reaches."""


def _select(layer: TokenLayer, voting: torch.Tensor, end: torch.Tensor, impl: str | None, **cache: Any) -> Outputs:
    counters = {"counter": layer.counter, "reuse_counter": layer.reuse_counter, "finished": layer.finished}
    selection: Outputs = ops.select_tokens(
        voting, layer.keys, layer.seq_start, end, **layer.settings.token_choice, **counters, **cache, impl=impl
    )
    return selection


def _decode(layer: TokenLayer, block_indices: torch.Tensor, block_counts: torch.Tensor, impl: str | None) -> Outputs:
    tensors = (layer.query, layer.keys, layer.values, block_indices, block_counts, layer.seq_start, layer.seq_end)
    options = {"block_size": 1, "rope_cos": layer.cos, "rope_sin": layer.sin}
    counters = {"counter": layer.counter, "finished": layer.finished}
    return ops.sparse_decode(*tensors, **options, **counters, impl=impl)[:1]


def _prefill(layer: TokenLayer, block_indices: torch.Tensor, block_counts: torch.Tensor, impl: str | None) -> Outputs:
    tensors = (layer.query, layer.keys, layer.values, block_indices, block_counts, layer.seq_start, layer.seq_end)
    return ops.sparse_prefill(*tensors, rope_cos=layer.cos, rope_sin=layer.sin, impl=impl)[:1]


def _run_select(layer: TokenLayer, impl: str | None) -> Outputs:
    return _select(layer, layer.voting, layer.choice_end, impl)


def _run_decode(layer: TokenLayer, impl: str | None) -> Outputs:
    return _decode(layer, layer.block_indices, layer.block_counts, impl)


def _run_prefill(layer: TokenLayer, impl: str | None) -> Outputs:
    return _prefill(layer, layer.block_indices, layer.block_counts, impl)


def _append_and_rotate(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_end: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    position = seq_end[:1].long() - 1
    keys.index_copy_(2, position, new_key[:, :, None])
    values.index_copy_(2, position, new_value[:, :, None])
    return rotated(query, cos, sin).to(query.dtype)


# generate() compiles its decode step, including the work before the ops; each shape is compiled separately.
_compiled_append_and_rotate = torch.compile(_append_and_rotate, dynamic=False)


def _run_step(cache: Callable[[TokenLayer], dict[str, Any]], layer: TokenLayer, impl: str | None) -> Outputs:
    begin = _compiled_append_and_rotate if layer.keys.is_cuda else _append_and_rotate
    recent = layer.settings.recent_tokens
    voting = begin(
        layer.query,
        layer.new_key,
        layer.new_value,
        layer.keys,
        layer.values,
        layer.seq_end,
        layer.cos[recent],
        layer.sin[recent],
    )
    selection = _select(layer, voting, layer.seq_end, impl, **cache(layer))
    return (*_decode(layer, *selection, impl), *selection, voting)


def _run_chunk(layer: TokenLayer, impl: str | None) -> Outputs:
    """Run a chunk as a prefill does, which generate() does not compile."""
    voting = ops.mean_query(layer.query, layer.cos, layer.sin, first_slot=layer.settings.recent_tokens, impl=impl)
    selection = _select(layer, voting, layer.seq_end - layer.shape.queries, impl)
    return (*_prefill(layer, *selection, impl), *selection, voting)


def _without_cache(layer: TokenLayer) -> dict[str, Any]:
    return {}


def _with_hits(layer: TokenLayer) -> dict[str, Any]:
    return {**layer.selection_cache, "threshold": KEEP}


def _reset_counters(layer: TokenLayer) -> None:
    layer.counter.zero_()
    layer.reuse_counter.zero_()


def _take_newest_token_away(layer: TokenLayer) -> None:
    layer.keys[:, :, -1] = float("nan")
    layer.values[:, :, -1] = float("nan")
    _reset_counters(layer)


def _check_counters(layer: TokenLayer, *, votes: bool, attends: bool) -> None:
    shape, settings = layer.shape, layer.settings
    pairs = shape.batch * shape.kv_heads if attends else 0
    read = token_floors.vote_bytes(shape, settings) if votes else 0
    oracle.check_counter(layer, (pairs * settings.max_tokens, pairs * shape.length, read, int(attends)))


def _check_reuse(layer: TokenLayer, reused: int) -> None:
    found = layer.reuse_counter.tolist()
    if found != [reused, layer.shape.batch]:
        raise oracle.Mismatch(f"reuse_counter {found}, expected {[reused, layer.shape.batch]}")


def _check_select(layer: TokenLayer, outputs: Outputs) -> None:
    token_oracle.check_votes(outputs[0], outputs[1], layer.voting, layer)
    _check_counters(layer, votes=True, attends=False)
    _check_reuse(layer, 0)


def _check_decode(layer: TokenLayer, outputs: Outputs) -> None:
    token_oracle.check_sparse_output(outputs[0], layer, layer.block_indices, layer.block_counts)
    _check_counters(layer, votes=False, attends=True)


def _check_prefill(layer: TokenLayer, outputs: Outputs) -> None:
    token_oracle.check_sparse_output(outputs[0], layer, layer.block_indices, layer.block_counts)


def _check_step(is_kept: bool, layer: TokenLayer, outputs: Outputs) -> None:
    output, indices, counts, voting = outputs
    oracle.check_appended(layer)
    token_oracle.check_voting(voting, layer)
    if is_kept:
        token_oracle.check_kept_choice(indices, counts, layer)
    else:
        token_oracle.check_votes(indices, counts, voting, layer)
    token_oracle.check_sparse_output(output, layer, indices, counts)
    _check_counters(layer, votes=not is_kept, attends=True)
    _check_reuse(layer, layer.shape.batch if is_kept else 0)


def _check_chunk(layer: TokenLayer, outputs: Outputs) -> None:
    output, indices, counts, voting = outputs
    token_oracle.check_voting(voting, layer)
    token_oracle.check_votes(indices, counts, voting, layer)
    token_oracle.check_sparse_output(output, layer, indices, counts)
    _check_counters(layer, votes=True, attends=False)
    _check_reuse(layer, 0)


TOKEN_DECODE = Family(
    "TokenSelect, decode steps",
    TOKEN_DECODE_SHAPES,
    QUICK_TOKEN_DECODE_SHAPES,
    (
        Entry("select_tokens", "one query", _run_select, _check_select, token_floors.select_bytes, _reset_counters),
        Entry(
            "rope_sparse_decode",
            "",
            _run_decode,
            _check_decode,
            token_floors.decode_bytes,
            _reset_counters,
            against_dense=True,
        ),
        Entry(
            "tokenselect_step",
            "chosen anew",
            partial(_run_step, _without_cache),
            partial(_check_step, False),
            token_floors.step_bytes,
            _take_newest_token_away,
            against_dense=True,
        ),
        Entry(
            "tokenselect_step",
            "choice kept",
            partial(_run_step, _with_hits),
            partial(_check_step, True),
            token_floors.kept_step_bytes,
            _take_newest_token_away,
            against_dense=True,
        ),
    ),
    make_token_layer,
    token_layer_bytes,
    step_bytes=token_floors.kept_step_bytes,
    backends=fast_backends,
)

TOKEN_CHUNK = Family(
    "TokenSelect, chunks of the prefill",
    CHUNK_SHAPES,
    QUICK_CHUNK_SHAPES,
    (
        Entry(
            "select_tokens", "a chunk's mean", _run_select, _check_select, token_floors.select_bytes, _reset_counters
        ),
        Entry(
            "sparse_prefill",
            "",
            _run_prefill,
            _check_prefill,
            token_floors.prefill_bytes,
            _reset_counters,
            against_dense=True,
        ),
        Entry(
            "tokenselect_chunk",
            "",
            _run_chunk,
            _check_chunk,
            token_floors.chunk_bytes,
            _reset_counters,
            against_dense=True,
        ),
    ),
    make_token_layer,
    token_layer_bytes,
    step_bytes=token_floors.chunk_bytes,
    backends=dense_chunk.backends,
    least_layers=2,
)
