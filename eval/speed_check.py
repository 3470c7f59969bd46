"""The check that a patched ``generate()`` equals dense attention if the budget covers everything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.config import DENSE
from eval.errors import EvalError
from eval.knobs import knob_of
from eval.speed_runs import Side, Work, generate
from hf_sparse_attn import SparseMethod, sparse_attention
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.rope import max_positions

CHECKED_TOKENS = 4
"""Number of first tokens that a method must share with dense attention if its budget covers everything."""

TIE_ROUNDINGS = 4
"""Logits at most this many roundings of the largest one apart tie."""


def check_covering(
    model: PreTrainedModel,
    work: Work,
    method: SparseMethod,
    dense_ids: Sequence[Sequence[int]],
    on_host: Side | None,
) -> dict[str, Any]:
    """Raise unless the method, with a budget for everything, starts with the same tokens as dense attention.

    ``dense_ids`` has the tokens of each row. Dense attention on CUDA is not deterministic, so tokens whose logits tie
    count as equal. If the method caches keys before RoPE, dense attention gets the filled buffers rotated. An offloaded
    method, which would load everything at every step, is compared with itself on the device instead; so is ``on_host``,
    the method's side in host memory, over the cache that the side measures: the host may have no room for another one.

    Returns
    -------
    dict
        The comparison: ``method``, ``token_budget``, ``tokens``, and ``against``, a text.
    """
    if method.offloading is not None:
        return _check_offloaded(model, work, method)
    everything = covering(method, work, len(dense_ids[0]))
    side = Side(f"{method.name}, {everything.token_budget}", everything, partial(work.new_cache, everything))
    expected = [list(row[:CHECKED_TOKENS]) for row in dense_ids]
    dense = Side("dense attention", None, partial(work.new_cache, DENSE))
    if work.is_cached and method.rotates_keys:
        dense = Side("dense attention, the cached keys rotated to their positions", None, work.new_rotated_cache)
        expected = generate(model, dense, work, len(expected[0])).token_ids
    _compare(model, work, side, dense, expected, "with a budget for everything the patched model")
    against = dense.name
    if on_host is not None:
        uncompiled = replace(on_host, compiled=False)
        _, resident = _check_resident(model, work, uncompiled, method, "the method in host memory")
        against += f"; in host memory: {resident}"
    return _compared(method, everything.token_budget, expected, against)


def check_if_it_fits(
    model: PreTrainedModel,
    work: Work,
    method: SparseMethod,
    dense_ids: Sequence[Sequence[int]] | None,
    sides: Sequence[Side],
) -> dict[str, Any]:
    """Check a method as :func:`check_covering`, unless the context in host memory does not fit on the device.

    Then there is nothing to compare with: ``tokens`` is 0, and ``against`` says so. ``dense_ids`` is None if no dense
    side fits; ``sides`` are those that are measured.

    Raises
    ------
    torch.OutOfMemoryError
        Something does not fit, and no side has its keys and values in host memory.
    """
    try:
        if dense_ids is not None:
            on_host = next((side for side in sides if side.method == method and side.kv_storage == "host"), None)
            return check_covering(model, work, method, dense_ids, on_host)
    except torch.OutOfMemoryError:
        if work.kv_storage != "host":
            raise
    return _compared(method, method.token_budget, ((),), "nothing: it does not fit on the device")


def _check_offloaded(model: PreTrainedModel, work: Work, method: SparseMethod) -> dict[str, Any]:
    """Raise unless an offloaded method starts with the same tokens as the same method on the device."""
    name = f"{method.name}, {method.token_budget}, offloaded"
    side = Side(name, method, partial(work.new_cache, method))
    expected, against = _check_resident(model, work, side, method.resident, "the offloaded method")
    return _compared(method, method.token_budget, expected, against)


def _check_resident(
    model: PreTrainedModel, work: Work, side: Side, method: SparseMethod, what: str
) -> tuple[list[list[int]], str]:
    """Raise unless a side starts with the tokens of a method on the device; return these and what made them."""
    resident = Side("the same method on the device", method, partial(work.new_cache, method))
    expected = generate(model, resident, work, CHECKED_TOKENS).token_ids
    _compare(model, work, side, resident, expected, what)
    return expected, resident.name


def _compared(
    method: SparseMethod, token_budget: int | None, expected: Sequence[Sequence[int]], against: str
) -> dict[str, Any]:
    return {"method": method.name, "token_budget": token_budget, "tokens": len(expected[0]), "against": against}


def _compare(
    model: PreTrainedModel, work: Work, side: Side, reference: Side, expected: Sequence[Sequence[int]], what: str
) -> None:
    """Raise ``EvalError`` if a side's tokens differ from the expected ones where the reference's logits do not tie."""
    tokens = len(expected[0])
    found = generate(model, side, work, tokens).token_ids
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        differing = [step for step in range(tokens) if ours[step] != theirs[step]]
        if differing and not _ties(model, work, reference, expected, row, ours, differing[0]):
            raise EvalError(
                f"{side.name}, context={work.context}: {what} begins with tokens {ours}, {reference.name} with {theirs}"
            )


def _ties(
    model: PreTrainedModel,
    work: Work,
    reference: Side,
    expected: Sequence[Sequence[int]],
    row: int,
    found: Sequence[int],
    step: int,
) -> bool:
    """Whether the reference's logits of both tokens tie where a row first differs."""
    return logit_gap(model, work, reference, expected, row, found[step], step)[1] <= TIE_ROUNDINGS


def logit_gap(
    model: PreTrainedModel,
    work: Work,
    reference: Side,
    expected: Sequence[Sequence[int]],
    row: int,
    token: int,
    step: int,
) -> tuple[float, float]:
    """Compare the reference's logits of its own token and another one, where a row first differs.

    Later tokens of the row follow other texts, and compare to nothing.

    Returns
    -------
    tuple of float
        How much greater the logit of the expected token is than that of ``token``, and the absolute value of this in
        roundings of the largest logit.
    """
    cache = reference.make_cache()
    answers = torch.tensor(expected, device=work.input_ids.device)
    # As generate() passes them: what is not cached of the prompt, then one token at a time.
    parts = [work.input_ids[:, int(cache.get_seq_length()) :], *(answers[:, at : at + 1] for at in range(step))]
    patched = nullcontext() if reference.method is None else sparse_attention(model, reference.method)
    with torch.inference_mode(), patched:
        for part in parts:
            logits = model(input_ids=part, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits[row, -1]
    gap = float(logits[expected[row][step]] - logits[token])
    return gap, abs(gap) / (torch.finfo(logits.dtype).eps * float(logits.abs().max()))


def covering(method: SparseMethod, work: Work, new_tokens: int) -> SparseMethod:
    """Return the method with a setting that reads everything; slots are limited to the model's positions."""
    budget = 2 * (work.context + new_tokens)
    if method.rotates_keys:
        budget = min(work.capacity, max_positions(work.model.config))
    # A method that has both takes the budget instead of k.
    given = {field.name: getattr(method, field.name) for field in fields(method) if field.name != "k"}
    knob = knob_of(method.name)
    return type(method)(**{**given, knob.parameter: knob.steps(budget)[-1], "token_budget": budget})
