"""One timed call of ``generate()``, and the check that it computed what it should."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eval.config import DENSE
from eval.costs import sparse_reads
from eval.errors import EvalError
from eval.speed_shapes import seeded
from hf_sparse_attn import SparseCache, SparseMethod, sparse_attention
from hf_sparse_attn.greedy import forward

if TYPE_CHECKING:
    from eval.speed import SpeedConfig

CHECKED_TOKENS = 4
"""Tokens that a method with a budget for everything must have in common with dense attention."""


TIE_ROUNDINGS = 4
"""Logits that are no further apart than this many roundings of the largest one are a tie."""


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token reached the host; that alone waits for the device, as for anyone who streams."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time; the first call brings the prompt."""
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class Work:
    """What every side of one context starts from."""

    context: int
    input_ids: torch.Tensor
    """[1, context], with one token more where the context is cached."""
    new_cache: Callable[[SparseMethod | str], SparseCache]
    new_dynamic_cache: Callable[[], DynamicCache]

    @classmethod
    def start(cls, model: PreTrainedModel, config: SpeedConfig, context: int, special_ids: Collection[int]) -> Work:
        """Make the prompt, and with ``config.shape`` the filled cache."""
        capacity = context + config.new_tokens + 1
        if config.shape is None:
            input_ids = _random_ids(model, context, special_ids, config.seed)
            new_cache = partial(SparseCache, model.config, initial_capacity=capacity)
            return cls(context, input_ids, new_cache, partial(DynamicCache, config=model.config))
        input_ids = _random_ids(model, context + 1, special_ids, config.seed)
        filled = SparseCache(model.config, DENSE, initial_capacity=capacity)
        shape = (1, model.config.num_key_value_heads, context, model.config.head_dim)
        with seeded(model.device, config.seed):
            for layer in filled.layers:
                layer.update(*(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)))
        return cls(context, input_ids, filled.fork, partial(_dynamic_copy, model, filled))


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    name: str
    method: SparseMethod | None
    """None for dense attention, on the unpatched model."""
    make_cache: Callable[[], Cache]


@dataclass(frozen=True)
class Run:
    """What one call of ``generate()`` made, and how long it took."""

    token_ids: list[int]
    ttft_ms: float
    token_ms: list[float]
    """Of every token but the first."""
    costs: dict[str, float | None]


def generate(model: PreTrainedModel, side: Side, work: Work, new_tokens: int) -> Run:
    """One call of ``generate()``, timed, and checked to have decoded from where the cache ended."""
    gc.collect()  # not while the clock runs, and the former run's cache goes before the next one is made
    cache, clock = side.make_cache(), TokenClock()
    with nullcontext() if side.method is None else sparse_attention(model, side.method):
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        started = time.perf_counter()
        output = model.generate(
            work.input_ids,
            attention_mask=torch.ones_like(work.input_ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
        )
        reads = None if side.method is None else sparse_reads(model, cache)
    prompt_tokens = work.input_ids.shape[1]
    token_ids = output[0, prompt_tokens:].tolist()
    times = clock.marks[1:]  # without the prompt's
    steps = cache.get_seq_length() - work.context  # decode steps: each cached the token that it was fed
    made = (len(token_ids), len(times), work.context + steps)
    expected = (new_tokens, new_tokens, prompt_tokens + new_tokens - 1)
    if made != expected:
        raise EvalError(
            f"{side.name}, context={work.context}: generate() made {made[0]} tokens in {made[1]} parts and left "
            f"{made[2]} in the cache, expected {expected}"
        )
    if reads is None or side.method is None:
        costs = {"kv_fraction": 1.0, "realised_budget": work.context + (steps + 1) / 2}
    else:
        if not side.method.covers(work.context) and not (reads.kv_bytes or 0) < (reads.dense_bytes or 0):
            raise EvalError(f"{side.name}, context={work.context}: the patched run read as much as dense attention")
        costs = {"kv_fraction": reads.kv_fraction, "realised_budget": reads.realised_budget}
    return Run(token_ids, (times[0] - started) * 1e3, (np.diff(times) * 1e3).tolist(), costs)


def check_covering(model: PreTrainedModel, work: Work, method: SparseMethod, dense_ids: Sequence[int]) -> None:
    """Raise unless the method, with a budget for everything, begins as dense attention over the same buffers does.

    Dense attention on CUDA does not always agree with itself: two tokens that it rates alike count as the same.
    """
    everything = replace(method, token_budget=2 * (work.context + len(dense_ids)))
    side = Side(f"{method.name}, {everything.token_budget}", everything, partial(work.new_cache, everything))
    expected = list(dense_ids[:CHECKED_TOKENS])
    found = generate(model, side, work, len(expected)).token_ids
    differing = [step for step in range(len(expected)) if found[step] != expected[step]]
    if not differing:
        return
    step = differing[0]  # what comes after it has another beginning
    cache = work.new_cache(DENSE)
    logits = forward(model, cache, work.input_ids[0, cache.get_seq_length() :].tolist() + expected[:step])
    gap = float(logits[expected[step]] - logits[found[step]])
    if abs(gap) > TIE_ROUNDINGS * torch.finfo(logits.dtype).eps * float(logits.abs().max()):
        raise EvalError(
            f"{side.name}, context={work.context}: with a budget for everything the patched model begins with tokens "
            f"{found}, dense attention with {expected}"
        )


def _dynamic_copy(model: PreTrainedModel, filled: SparseCache) -> DynamicCache:
    """Transformers' own cache with the same tokens, in tensors of its own as after a prefill."""
    cache = DynamicCache(config=model.config)
    for layer_idx, layer in enumerate(filled.sparse_layers):
        cache.update(layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length], layer_idx)
    return cache


def _random_ids(model: PreTrainedModel, length: int, special_ids: Collection[int], seed: int) -> torch.Tensor:
    """[1, length] ordinary tokens."""
    allowed = torch.tensor(sorted(set(range(model.config.vocab_size)) - set(special_ids)))
    chosen = torch.randint(len(allowed), (1, length), generator=torch.Generator().manual_seed(seed))
    return allowed[chosen].to(model.device)
