"""Check of every tool: dense attention's output at full budget, and sparse decode steps below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_sparse_attn import METHODS, sparse_attention, sparse_attention_stats
from tests.models import COVERING, POSITIONS, SPARSE, make_model, random_ids

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
SPARSE_METHODS = [name for name, method in METHODS.items() if "decode" in method.sparse_phases]
sparse_methods = pytest.mark.parametrize("method_name", SPARSE_METHODS)
FORGETFUL = [name for name, method in METHODS.items() if method.evicts and not method.keeps_generated]
"""Methods that evict in decode steps, which a rejected draft cannot take back."""
quest_first = pytest.mark.parametrize(
    "method_name", [name if name == "quest" else pytest.param(name, marks=pytest.mark.grid) for name in SPARSE_METHODS]
)
"""For tools that every method meets in the same place: ``make test`` runs Quest, CI all."""


def covers_all(method_name: str) -> dict[str, Any]:
    """Return hyperparameters with which a method reads everything."""
    return {"token_budget": POSITIONS, **COVERING.get(method_name, {})}


def small(method_name: str) -> dict[str, Any]:
    """Return hyperparameters with which a method leaves most of some hundred tokens out."""
    return {"token_budget": 48, **SPARSE.get(method_name, {})}


def exact_model(**overrides: Any) -> PreTrainedModel:
    """Tiny Llama in float64, so that its tokens do not depend on the processor's rounding."""
    return make_model("llama", dtype=torch.float64, **overrides)


def padded_batch() -> dict[str, torch.Tensor]:
    """Return two left-padded prompts of different lengths."""
    ids = random_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(actual: Any, expected: Any) -> None:
    """Compare tokens or other outputs of a tool."""
    assert torch.equal(actual, expected) if isinstance(expected, torch.Tensor) else actual == expected


def check_tool(run: Callable[[], Any], model: PreTrainedModel, method_name: str) -> None:
    """Compare a tool's output for a patched and a dense model, and check that decoding was sparse.

    Parameters
    ----------
    run
        Function that uses the tool once.
    model
        The unpatched model that ``run`` uses.
    method_name
        The method to patch it with.
    """
    expected = run()
    with sparse_attention(model, method_name, **covers_all(method_name)):
        assert_same(run(), expected)
        stats = sparse_attention_stats(model)
        assert stats.decode_steps > 0
        assert stats.kv_bytes == stats.dense_bytes > 0
    with sparse_attention(model, method_name, **small(method_name)):
        run()
        stats = sparse_attention_stats(model)
        assert stats.decode_steps > 0
        assert stats.kv_fraction < 1
    assert_same(run(), expected)
