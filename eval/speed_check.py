"""The check that a patched ``generate()`` equals dense attention if the budget covers everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.config import DENSE
from eval.errors import EvalError
from eval.knobs import knob_of
from eval.speed_runs import Side, Work, generate
from hf_sparse_attn import SparseCache, SparseMethod
from hf_sparse_attn.rope import max_positions

CHECKED_TOKENS = 4
"""Number of first tokens that a method must share with dense attention if its budget covers everything."""

TIE_ROUNDINGS = 4
"""Logits at most this many roundings of the largest one apart tie."""


def check_covering(
    model: PreTrainedModel, work: Work, method: SparseMethod, dense_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Raise unless the method, with a budget for everything, starts with the same tokens as dense attention.

    ``dense_ids`` has the tokens of each row. Dense attention on CUDA is not deterministic, so tokens whose logits tie
    count as equal. If the method caches keys before RoPE, dense attention gets the filled buffers rotated.

    Returns
    -------
    dict
        The comparison: ``method``, ``token_budget``, ``tokens``, and ``against``, a text.
    """
    everything = covering(method, work, len(dense_ids[0]))
    side = Side(f"{method.name}, {everything.token_budget}", everything, partial(work.new_cache, everything))
    expected, against = [list(row[:CHECKED_TOKENS]) for row in dense_ids], "dense attention"
    tokens = len(expected[0])
    new_dense_cache: Callable[[], SparseCache] = partial(work.new_cache, DENSE)
    if work.filled is not None and method.rotates_keys:
        new_dense_cache, against = work.new_rotated_cache, "dense attention, the cached keys rotated to their positions"
        expected = generate(model, Side(against, None, new_dense_cache), work, tokens).token_ids
    compared = {
        "method": method.name,
        "token_budget": everything.token_budget,
        "tokens": tokens,
        "against": against,
    }
    found = generate(model, side, work, tokens).token_ids
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        differing = [step for step in range(tokens) if ours[step] != theirs[step]]
        if differing and not _ties(model, work, new_dense_cache(), expected, row, ours, differing[0]):
            raise EvalError(
                f"{side.name}, context={work.context}: with a budget for everything the patched model begins with "
                f"tokens {ours}, {against} with {theirs}"
            )
    return compared


def _ties(
    model: PreTrainedModel,
    work: Work,
    cache: SparseCache,
    expected: Sequence[Sequence[int]],
    row: int,
    found: Sequence[int],
    step: int,
) -> bool:
    """Whether dense attention's logits of both tokens tie where a row first differs; later tokens follow others."""
    fed = torch.tensor([each[:step] for each in expected], dtype=torch.long, device=work.input_ids.device)
    input_ids = torch.cat([work.input_ids[:, cache.get_seq_length() :], fed], dim=1)
    with torch.inference_mode():
        logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[row, -1]
    gap = float(logits[expected[row][step]] - logits[found[step]])
    return abs(gap) <= TIE_ROUNDINGS * torch.finfo(logits.dtype).eps * float(logits.abs().max())


def covering(method: SparseMethod, work: Work, new_tokens: int) -> SparseMethod:
    """Return the method with a setting that reads everything; slots are limited to the model's positions."""
    budget = 2 * (work.context + new_tokens)
    if method.rotates_keys:
        budget = min(work.capacity, max_positions(work.model.config))
    # A method that has both takes the budget instead of k.
    given = {field.name: getattr(method, field.name) for field in fields(method) if field.name != "k"}
    if method.offloading is not None:
        given["gpu_cache_tokens"] = budget  # a step holds all that it selects
    knob = knob_of(method.name)
    return type(method)(**{**given, knob.parameter: knob.steps(budget)[-1], "token_budget": budget})
