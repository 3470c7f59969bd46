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
from eval.speed_runs import Side, Work, generate
from hf_sparse_attn import SparseCache, SparseMethod
from hf_sparse_attn.cli.greedy import forward
from hf_sparse_attn.rope import max_positions

CHECKED_TOKENS = 4
"""Number of first tokens that a method must share with dense attention if its budget covers everything."""

READS_EVERYTHING = {"threshold": 1.0, "target_sparsity": 0.0}
"""Values of hyperparameters that leave tokens out whatever the budget, with which they leave out none."""

TIE_ROUNDINGS = 4
"""Logits at most this many roundings of the largest one apart tie."""


def check_covering(
    model: PreTrainedModel, work: Work, method: SparseMethod, dense_ids: Sequence[int]
) -> dict[str, Any]:
    """Raise unless the method, with a budget for everything, starts with the same tokens as dense attention.

    Dense attention on CUDA is not deterministic, so tokens whose logits tie count as equal. If the method caches keys
    before RoPE, dense attention gets the filled buffers rotated.

    Returns
    -------
    dict
        The comparison: ``method``, ``token_budget``, ``tokens``, and ``against``, a text.
    """
    everything = covering(method, work, len(dense_ids))
    side = Side(f"{method.name}, {everything.token_budget}", everything, partial(work.new_cache, everything))
    expected, against = list(dense_ids[:CHECKED_TOKENS]), "dense attention"
    new_dense_cache: Callable[[], SparseCache] = partial(work.new_cache, DENSE)
    if work.filled is not None and method.rotates_keys:
        new_dense_cache, against = work.new_rotated_cache, "dense attention, the cached keys rotated to their positions"
        expected = generate(model, Side(against, None, new_dense_cache), work, len(expected)).token_ids
    compared = {
        "method": method.name,
        "token_budget": everything.token_budget,
        "tokens": len(expected),
        "against": against,
    }
    found = generate(model, side, work, len(expected)).token_ids
    differing = [step for step in range(len(expected)) if found[step] != expected[step]]
    if not differing:
        return compared
    step = differing[0]  # later tokens follow different texts
    cache = new_dense_cache()
    logits = forward(model, cache, work.input_ids[0, cache.get_seq_length() :].tolist() + expected[:step])
    gap = float(logits[expected[step]] - logits[found[step]])
    if abs(gap) > TIE_ROUNDINGS * torch.finfo(logits.dtype).eps * float(logits.abs().max()):
        raise EvalError(
            f"{side.name}, context={work.context}: with a budget for everything the patched model begins with tokens "
            f"{found}, {against} with {expected}"
        )
    return compared


def covering(method: SparseMethod, work: Work, new_tokens: int) -> SparseMethod:
    """Return the method with a budget for everything, and without thresholds; slots are limited to the positions."""
    budget = 2 * (work.context + new_tokens)
    if method.rotates_keys:
        budget = min(work.capacity, max_positions(work.model.config))
    # A method that has both takes the budget instead of k.
    given = {field.name: getattr(method, field.name) for field in fields(method) if field.name != "k"}
    without_threshold = {name: value for name, value in READS_EVERYTHING.items() if name in given}
    return type(method)(**{**given, **without_threshold, "token_budget": budget})
