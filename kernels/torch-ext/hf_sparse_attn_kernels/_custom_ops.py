"""The ops as torch.compile sees them: opaque calls that name what they write and what they return.

Dynamo keeps each as one node of its graph; arguments are checked when that node is traced, on fake tensors.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import _checks as checks
from ._reference_common import compute_dtype
from ._runtime import NAMESPACE, run_op

_BOUNDS = "Tensor page_min, Tensor page_max"
_BOUNDS_WRITTEN = "Tensor(a!) page_min, Tensor(b!) page_max"
_ROWS = "Tensor seq_start, Tensor seq_end"
_SCORING = "float? scale, str group_reduce, SymInt? num_pages"
_EXPONENTS = "Tensor? page_exponent, Tensor? channel_exponent"
_EXPONENTS_WRITTEN = "Tensor(c!)? page_exponent, Tensor(d!)? channel_exponent"
_BUDGET = "SymInt max_blocks, SymInt sink_blocks, SymInt recent_blocks"
_ROPE = "Tensor? rope_cos, Tensor? rope_sin"
_ATTENTION = "float? scale, bool return_lse, Tensor(a!)? counter, Tensor(b!)? finished, str? impl) -> (Tensor, Tensor)"

# No defaults: those are the public functions'. The dispatcher leaves out arguments at the end that equal a default, and
# torch 2.11 then fails where one of them is a tensor that would have been written.
SCHEMAS = {
    "page_bounds": (
        f"(Tensor keys, {_BOUNDS_WRITTEN}, {_ROWS}, SymInt page_size, SymInt num_new, {_EXPONENTS_WRITTEN}, "
        "str? impl) -> ()"
    ),
    "page_scores": (
        f"(Tensor query, {_BOUNDS}, {_ROWS}, SymInt page_size, {_SCORING}, {_EXPONENTS}, str? impl) -> Tensor"
    ),
    "select_blocks": f"(Tensor scores, {_ROWS}, SymInt block_size, {_BUDGET}, str? impl) -> (Tensor, Tensor)",
    "append_and_select": (
        "(Tensor query, Tensor new_key, Tensor new_value, Tensor(e!) keys, Tensor(f!) values, "
        f"{_BOUNDS_WRITTEN}, {_ROWS}, SymInt page_size, {_BUDGET}, {_SCORING}, {_EXPONENTS_WRITTEN}, "
        "Tensor(g!)? counter, Tensor(h!)? finished, str? impl) -> (Tensor, Tensor)"
    ),
    "token_votes": (
        f"(Tensor query, Tensor keys, {_ROWS}, SymInt sink_tokens, SymInt recent_tokens, "
        "str vote, SymInt? max_tokens, SymInt? num_tokens, str? impl) -> Tensor"
    ),
    "mean_query": "(Tensor query, Tensor rope_cos, Tensor rope_sin, SymInt first_slot, str? impl) -> Tensor",
    "select_tokens": (
        f"(Tensor query, Tensor keys, {_ROWS}, SymInt max_tokens, SymInt sink_tokens, SymInt recent_tokens, "
        "str vote, SymInt pool_size, SymInt? num_tokens, "
        "Tensor(a!)? cached_query, Tensor(b!)? cached_tokens, Tensor(c!)? cached_valid, "
        "float threshold, Tensor(d!)? counter, Tensor(e!)? reuse_counter, Tensor(f!)? finished, "
        "str? impl) -> (Tensor, Tensor)"
    ),
    "sparse_decode": (
        "(Tensor query, Tensor keys, Tensor values, Tensor block_indices, Tensor block_counts, "
        f"{_ROWS}, SymInt block_size, {_ROPE}, {_ATTENTION}"
    ),
    "dense_decode": f"(Tensor query, Tensor keys, Tensor values, {_ROWS}, {_ATTENTION}",
    "sparse_prefill": (
        "(Tensor query, Tensor keys, Tensor values, Tensor block_indices, Tensor block_counts, "
        f"{_ROWS}, {_ROPE}, float? scale, str? impl) -> Tensor"
    ),
}


def _empty_lse(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return query.new_empty(shape, dtype=compute_dtype(query.dtype))


def _empty_selection(tensor: torch.Tensor, kv_heads: int, max_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = tensor.shape[0]
    indices = tensor.new_empty((batch, kv_heads, max_blocks), dtype=torch.int32)
    return indices, tensor.new_empty((batch, kv_heads), dtype=torch.int32)


def _fake_page_bounds(*tensors: torch.Tensor, **options: Any) -> None:
    return None


def _fake_page_scores(
    query: torch.Tensor, page_min: torch.Tensor, *_: torch.Tensor, num_pages: int | None = None, **options: Any
) -> torch.Tensor:
    batch, kv_heads, max_pages = page_min.shape[:3]
    shape = (batch, kv_heads, max_pages if num_pages is None else num_pages)
    return query.new_empty(shape, dtype=compute_dtype(query.dtype))


def _fake_select_blocks(
    scores: torch.Tensor, *_: torch.Tensor, max_blocks: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_selection(scores, scores.shape[1], max_blocks)


def _fake_append_and_select(
    query: torch.Tensor,
    new_key: torch.Tensor,
    *_: torch.Tensor,
    max_blocks: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_selection(query, new_key.shape[1], max_blocks)


def _fake_token_votes(
    query: torch.Tensor, keys: torch.Tensor, *_: torch.Tensor, num_tokens: int | None = None, **options: Any
) -> torch.Tensor:
    shape = (keys.shape[0], keys.shape[2] if num_tokens is None else num_tokens)
    return query.new_empty(shape, dtype=compute_dtype(query.dtype))


def _fake_mean_query(query: torch.Tensor, *_: torch.Tensor, **options: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:2], query.shape[3]))


def _fake_select_tokens(
    query: torch.Tensor, *_: torch.Tensor, max_tokens: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_selection(query, 1, max_tokens)


def _fake_attention(
    query: torch.Tensor, *_: torch.Tensor, return_lse: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), _empty_lse(query, query.shape[:2] if return_lse else (0,))


def _fake_sparse_prefill(query: torch.Tensor, *_: torch.Tensor, **options: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "page_bounds": _fake_page_bounds,
    "page_scores": _fake_page_scores,
    "select_blocks": _fake_select_blocks,
    "append_and_select": _fake_append_and_select,
    "token_votes": _fake_token_votes,
    "mean_query": _fake_mean_query,
    "select_tokens": _fake_select_tokens,
    "sparse_decode": _fake_attention,
    "dense_decode": _fake_attention,
    "sparse_prefill": _fake_sparse_prefill,
}


class _Op:
    """One op for torch.library, which hands every argument over by position, in the order of the schema."""

    def __init__(self, op: str) -> None:
        self.op = op
        arguments = torch._C.parse_schema(op + SCHEMAS[op]).arguments
        self.mutates = {argument.name for argument in arguments if argument.alias_info is not None}
        is_tensor = [str(argument.type) == "Tensor" for argument in arguments]
        self.num_tensors = is_tensor.index(False)
        self.option_names = [argument.name for argument in arguments[self.num_tensors :]]

    def _split(self, arguments: tuple[Any, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], str | None]:
        options = dict(zip(self.option_names, arguments[self.num_tensors :], strict=True))
        impl = options.pop("impl")
        return arguments[: self.num_tensors], options, impl

    def run(self, *arguments: Any) -> Any:
        tensors, options, impl = self._split(arguments)
        result = run_op(self.op, impl, *tensors, **options)
        if self.op in ("sparse_decode", "dense_decode") and not options.get("return_lse"):
            # A schema has one return type: without a log-sum-exp, an empty tensor stands in for it.
            return result, _empty_lse(tensors[0], (0,))
        return result

    def fake(self, *arguments: Any) -> Any:
        tensors, options, _ = self._split(arguments)
        getattr(checks, self.op)(*tensors, **options)
        return _FAKES[self.op](*tensors, **options)


def register() -> None:
    """Register every op; a second copy of the package takes the names over, as both do the same."""
    for name, schema in SCHEMAS.items():
        op = _Op(name)
        custom_op = torch.library.custom_op(f"{NAMESPACE}::{name}", op.run, mutates_args=op.mutates, schema=schema)
        custom_op.register_fake(op.fake)
