"""Estimate how long a comparison takes, from short forward passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_sparse_attn.cli.greedy import forward
from hf_sparse_attn.heads import head_dim_of, kv_heads_of, query_heads_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLE_TOKENS = 128


def expected_seconds(model: PreTrainedModel, prompt_ids: Sequence[int], decode_steps: int) -> float:
    """Predict the seconds that a prompt's prefill and decode steps take with dense attention.

    Times a short prefill and a decode step, each after a warm-up. The prefill is scaled by its multiplications, the
    decode step by the numbers it reads from weights and cache.

    Parameters
    ----------
    model : PreTrainedModel
        Not patched.
    prompt_ids : sequence of int
        At least one token.
    decode_steps : int
        Number of steps after the prefill.
    """
    from transformers import DynamicCache

    sample = prompt_ids[:SAMPLE_TOKENS]
    for _ in range(2):  # the first pass warms up
        cache = DynamicCache(config=model.config)
        prefill_seconds = _timed(model, cache, sample)
    for _ in range(2):
        step_seconds = _timed(model, cache, sample[:1])
    weights: int = model.num_parameters(exclude_embeddings=True)
    config = model.config.get_text_config()
    query_numbers: int = sum(query_heads_of(config)) * head_dim_of(config)
    key_numbers: int = config.num_hidden_layers * kv_heads_of(config) * head_dim_of(config)

    def multiplications(tokens: int) -> int:
        return weights * tokens + query_numbers * tokens**2  # QK and PV, each halved by the causal mask

    def numbers_read(tokens: int) -> int:
        return weights + 2 * key_numbers * tokens

    length = len(prompt_ids)
    prefill = prefill_seconds * multiplications(length) / multiplications(len(sample))
    return prefill + decode_steps * step_seconds * numbers_read(length) / numbers_read(len(sample))


def _timed(model: PreTrainedModel, cache: object, token_ids: Sequence[int]) -> float:
    started = time.perf_counter()
    forward(model, cache, token_ids).argmax().item()  # type: ignore[arg-type]  # waits for the device
    return time.perf_counter() - started
