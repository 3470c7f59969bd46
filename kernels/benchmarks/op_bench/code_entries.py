"""The ops on key codes and the whole step: calls, bytes to move, and checks."""

from __future__ import annotations

from functools import partial

import hf_sparse_attn_kernels as ops
import torch

from op_bench import code_oracle, floors, oracle
from op_bench.code_workload import CodedLayer, code_bytes, code_layer_bytes, in_tokens, make_code_layer
from op_bench.dense import backends
from op_bench.entry import Entry, Family, Outputs
from op_bench.shapes import CODE_SHAPES, QUICK_CODE_SHAPES, Settings, Shape

HALF_ROUNDING = 2.0**-10
"""Twice the relative rounding of float16."""


def _run_prompt(layer: CodedLayer, impl: str | None) -> Outputs:
    layer.encode(0, None, impl)
    return ()


def _run_page(layer: CodedLayer, impl: str | None) -> Outputs:
    layer.encode(layer.shape.length // layer.settings.code_page - 1, 1, impl)
    return ()


def _scores(group_reduce: str, layer: CodedLayer, impl: str | None) -> torch.Tensor:
    scores: torch.Tensor = ops.code_scores(
        layer.query,
        **layer.codes,
        **layer.row_bounds,
        group_reduce=group_reduce,
        counter=layer.counter,
        **layer.code_options,
        impl=impl,
    )
    return scores


def _run_scores(group_reduce: str, layer: CodedLayer, impl: str | None) -> Outputs:
    return (_scores(group_reduce, layer, impl),)


def _select(layer: CodedLayer, scores: torch.Tensor, impl: str | None) -> Outputs:
    selected: Outputs = ops.select_tokens_by_score(scores, **layer.row_bounds, **layer.choice, impl=impl)
    return selected


def _run_select(layer: CodedLayer, impl: str | None) -> Outputs:
    return _select(layer, layer.scores, impl)


def _by_mass(layer: CodedLayer, impl: str | None) -> Outputs:
    page, top_p = layer.settings.code_page, layer.settings.top_p
    options = {"sink_tokens": page, "page_size": page, "top_p": top_p, "impl": impl}
    selected: Outputs = ops.select_tokens_by_mass(layer.scores, **layer.row_bounds, **options)
    return selected


def attend(layer: CodedLayer, indices: torch.Tensor, counts: torch.Tensor, impl: str | None) -> torch.Tensor:
    """Attend to single tokens."""
    tensors = (layer.query, layer.keys, layer.values, indices, counts)
    options = {"block_size": 1, "counter": layer.counter, "finished": layer.finished, "impl": impl}
    out: torch.Tensor = ops.sparse_decode(*tensors, **options, **layer.row_bounds)[0]
    return out


def _run_attention(layer: CodedLayer, impl: str | None) -> Outputs:
    return (attend(layer, layer.block_indices, layer.block_counts, impl),)


def run_step(group_reduce: str, layer: CodedLayer, impl: str | None) -> Outputs:
    """Run a step whose token fills no page that is still to be coded, as 63 of 64 do."""
    out, _, indices, counts = ops.append_and_attend_tokens(
        layer.query,
        layer.new_key,
        layer.new_value,
        layer.keys,
        layer.values,
        **layer.codes,
        coded=layer.coded,
        **layer.row_bounds,
        group_reduce=group_reduce,
        counter=layer.counter,
        **layer.choice,
        bits=layer.settings.code_bits,
        query_centre=layer.query_centre,
        finished=layer.finished,
        impl=impl,
    )
    return out, indices, counts


def _reset_counter(layer: CodedLayer) -> None:
    layer.counter.zero_()


def _spoil(layer: CodedLayer) -> None:
    layer.spoil()


def _spoil_last_page(layer: CodedLayer) -> None:
    """Leave the codes of a prompt, but for the last page."""
    layer.encode(0, None, None)
    layer.spoil(layer.shape.length // layer.settings.code_page - 1)


def _check_codes(layer: CodedLayer, outputs: Outputs) -> None:
    if not bool((layer.coded == layer.shape.length // layer.settings.code_page).all()):
        raise oracle.Mismatch("encode_keys: not all pages are counted")
    code_oracle.check_codes(layer)


def check_scores(group_reduce: str, layer: CodedLayer, outputs: Outputs) -> None:
    """Raise unless all scores are the reference's, up to their rounding."""
    scores = outputs[0]
    group = layer.shape.group
    for head in range(layer.shape.kv_heads):
        one = slice(head, head + 1)
        codes = {name: tensor[:, one].contiguous() for name, tensor in layer.codes.items()}
        options = layer.code_options | {"query_centre": layer.query_centre[:, one].contiguous()}
        query = layer.query[:, head * group : (head + 1) * group]
        expected = ops.code_scores(
            query, **codes, **layer.row_bounds, **options, group_reduce=group_reduce, impl="reference"
        )
        tokens = layer.shape.length - layer.settings.code_page
        ours, theirs = scores[:, one, :tokens].double(), expected[..., :tokens].double()
        if not bool(((ours - theirs).abs() <= HALF_ROUNDING * theirs.abs() + 1e-3).all()):  # NaN is an error too
            worst = float((ours - theirs).abs().max())
            raise oracle.Mismatch(f"code_scores: KV head {head} is off by {worst:.2e}")
        if not bool((scores[:, one, tokens:] == float("-inf")).all()):
            raise oracle.Mismatch("code_scores: the newest page has scores")


def check_same(op: str, selected: Outputs, expected: Outputs) -> None:
    """Raise unless two selections are the same."""
    for name, ours, theirs in zip(("indices", "counts"), selected, expected, strict=True):
        if not torch.equal(ours, theirs):
            raise oracle.Mismatch(f"{op}: {int((ours != theirs).sum())} of the {name} differ")


def _check_select(layer: CodedLayer, scores: torch.Tensor, selected: Outputs) -> None:
    check_same("select_tokens_by_score", selected, _select(layer, scores, "reference"))


def _check_mass(layer: CodedLayer, selected: Outputs) -> None:
    check_same("select_tokens_by_mass", selected, _by_mass(layer, "reference"))


def tokens_read(layer: CodedLayer) -> tuple[int, int]:
    """Return the tokens that a step reads and those that dense attention would read, over rows and KV heads."""
    pairs = layer.shape.batch * layer.shape.kv_heads
    return pairs * layer.settings.code_budget, pairs * layer.shape.length


def _check_attention(layer: CodedLayer, outputs: Outputs) -> None:
    oracle.check_sparse_output(outputs[0], layer, layer.block_indices, layer.block_counts)
    oracle.check_counter(layer, (*tokens_read(layer), 0, 1))


def _check_chosen(group_reduce: str, layer: CodedLayer, indices: torch.Tensor, counts: torch.Tensor) -> None:
    """Check that no token left out has a higher score than one that is chosen, up to the rounding of scores."""
    scores = ops.code_scores(
        layer.query, **layer.codes, **layer.row_bounds, **layer.code_options, group_reduce=group_reduce
    )
    check_scores(group_reduce, layer, (scores,))
    first, length = layer.settings.code_sinks, layer.shape.length
    last = length - layer.settings.code_page
    if not (bool((counts == layer.settings.code_budget).all()) and bool((indices.diff() > 0).all())):
        raise oracle.Mismatch("append_and_select_tokens: not as many tokens as the budget has, in ascending order")
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, indices.long(), True)
    if not (bool(is_chosen[..., :first].all()) and bool(is_chosen[..., last:length].all())):
        raise oracle.Mismatch("append_and_select_tokens: tokens that are always read are missing")
    if bool(is_chosen[..., length:].any()):
        raise oracle.Mismatch("append_and_select_tokens: tokens that no row has are chosen")
    is_chosen, scores = is_chosen[..., first:last], scores[..., first:last].float()
    least = scores.masked_fill(~is_chosen, float("inf")).amin(dim=2)
    left_out = scores.masked_fill(is_chosen, float("-inf")).amax(dim=2)
    if not bool((left_out <= least + HALF_ROUNDING * least.abs() + 1e-3).all()):
        raise oracle.Mismatch("append_and_select_tokens: a token that scores higher is left out")


def check_step(group_reduce: str, layer: CodedLayer, outputs: Outputs) -> None:
    """Raise unless a whole step chose, attended and counted what it should."""
    out, indices, counts = outputs
    oracle.check_counter(layer, (*tokens_read(layer), _scanned_bytes(layer.shape, layer.settings), 1))
    _check_chosen(group_reduce, layer, indices, counts)
    oracle.check_sparse_output(out, layer, indices, counts)


def _scanned_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the metadata that a step reads: all pages but the newest."""
    return code_bytes(shape, settings, shape.length // settings.code_page - 1)


def _prompt_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of all keys, read once, and of the written metadata."""
    keys = floors.dense_bytes(shape, settings) // 2
    return keys + code_bytes(shape, settings, shape.length // settings.code_page)


def _page_bytes(shape: Shape, settings: Settings) -> int:
    return _prompt_bytes(shape, settings) * settings.code_page // shape.length


def _scores_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the metadata, and of a score of 16 bits a token."""
    return _scanned_bytes(shape, settings) + 2 * shape.batch * shape.kv_heads * shape.length


def _select_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the scores and the selection."""
    return shape.batch * shape.kv_heads * (2 * shape.length + 4 * settings.code_budget)


def _mass_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the scores, and of a place for every token in the selection."""
    return shape.batch * shape.kv_heads * shape.length * (2 + 4)


def step_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the metadata and of the attention; scores and selection stay on the chip."""
    return _scanned_bytes(shape, settings) + floors.sparse_decode_bytes(shape, in_tokens(settings))


def _of_reduction(group_reduce: str) -> tuple[Entry, Entry]:
    return (
        Entry(
            "code_scores",
            group_reduce,
            partial(_run_scores, group_reduce),
            partial(check_scores, group_reduce),
            _scores_bytes,
        ),
        Entry(
            "keycodes_step",
            group_reduce,
            partial(run_step, group_reduce),
            partial(check_step, group_reduce),
            step_bytes,
            _reset_counter,
            against_dense=True,
        ),
    )


CODES = Family(
    "key codes, decode steps",
    CODE_SHAPES,
    QUICK_CODE_SHAPES,
    (
        Entry("encode_keys", "prompt", _run_prompt, _check_codes, _prompt_bytes, _spoil),
        Entry("encode_keys", "one page", _run_page, _check_codes, _page_bytes, _spoil_last_page),
        *_of_reduction("max"),
        *_of_reduction("softmax"),
        Entry(
            "select_tokens_by_score",
            "",
            _run_select,
            lambda layer, outputs: _check_select(layer, layer.scores, outputs),
            _select_bytes,
        ),
        Entry("select_tokens_by_mass", "", _by_mass, _check_mass, _mass_bytes),
        Entry(
            "sparse_decode",
            "single tokens",
            _run_attention,
            _check_attention,
            lambda shape, settings: floors.sparse_decode_bytes(shape, in_tokens(settings)),
            _reset_counter,
        ),
    ),
    make_code_layer,
    code_layer_bytes,
    step_bytes=step_bytes,
    backends=backends,
)
