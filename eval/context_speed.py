"""Timing of questions about a fixed context: preparing it, and answering with and without clusters, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from eval.costs import device_name, versions
from eval.errors import EvalError
from eval.speed_runs import forget_compiled, is_cuda
from eval.speed_shapes import SHAPES, build_model, seeded
from hf_sparse_attn import FixedContext, Squeezed, prepare_context, sparse_attention, sparse_attention_stats
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.cli.memory import PeakMemory

CHECKED_TOKENS = 8
Say = Callable[[str], None]


@dataclass(frozen=True)
class ContextSpeedConfig:
    """Settings of a measurement.

    Parameters
    ----------
    shape : str
        Architecture, with random weights.
    context, question, new_tokens : int
        Tokens of the context, of a question, and of its answer.
    method : Squeezed
        The method.
    repeats : int
        Timed questions of each side, after one that is not timed.
    chunk_size : int
        Tokens of the context in a forward pass of its preparation.
    seed : int
        Seed of weights and tokens.
    """

    shape: str
    context: int
    question: int = 256
    new_tokens: int = 64
    method: Squeezed = field(default_factory=Squeezed)
    repeats: int = 3
    chunk_size: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers; raise ``EvalError`` if one is out of range."""
        if self.shape not in SHAPES:
            raise EvalError(f"--shape {self.shape!r} is unknown; known: {', '.join(SHAPES)}")
        for name in ("context", "question", "new_tokens", "repeats", "chunk_size"):
            if getattr(self, name) < 1:
                raise EvalError(f"{name} must be at least 1, got {getattr(self, name)}")
        least = self.method.sink_tokens + self.method.window + 1
        if self.context < least:
            raise EvalError(f"context={self.context} is not allowed: at least {least}, or nothing is left to cluster")


def measure_context_speed(
    config: ContextSpeedConfig, device: torch.device, dtype: torch.dtype, say: Say
) -> dict[str, Any]:
    """Prepare a context of random tokens, and time questions about it.

    The stock model answers with its own cache of the same tokens, cut back after each question. The patched model
    answers from the prepared context: over buffers that grow, and on CUDA over static ones, whose decode steps
    ``generate()`` compiles. The extra time of the first compiled question is reported on its own.

    Returns
    -------
    dict
        The report as JSON values: ``machine``, ``settings``, ``stock_prefill_seconds``, ``preparation_seconds``,
        ``budget`` (target and realised shares), ``checked`` and ``sides``.

    Raises
    ------
    EvalError
        With a target sparsity of 0 the patched model's first tokens differ from the stock model's.
    """
    model = build_model(SHAPES[config.shape], dtype, device, config.seed)
    with seeded(device, config.seed):
        tokens = torch.randint(1, model.config.vocab_size, (1, config.context + config.question), device=device)
    context_ids, question = tokens[:, : config.context], tokens[:, config.context :]
    with torch.inference_mode():
        say("prefill of the stock model")
        stock_cache = DynamicCache(config=model.config)
        stock_prefill = _timed(device, partial(_prefill, model, stock_cache, context_ids, config.chunk_size))
        say("preparation of the context")
        context = prepare_context(model, context_ids, config.method, chunk_size=config.chunk_size, progress=False)
        say("questions to the stock model")
        sides = [_stock_side(model, stock_cache, tokens, config)]
        checked = _check(model, context, question, sides[0].pop("first_tokens"), config)
        del stock_cache
        say("questions to the patched model")
        sides.append(_patched_side(model, context, question, config, compiled=False))
        if is_cuda(model):
            say("questions to the patched model, compiled")
            sides.append(_patched_side(model, context, question, config, compiled=True))
    for side in sides[1:]:
        side["ratio"] = sides[0]["answer_seconds"]["median"] / side["answer_seconds"]["median"]
    budget = context.budget
    return {
        "machine": {
            "device": device_name(device),
            "versions": versions(),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "settings": {**asdict(config), "dtype": str(dtype).removeprefix("torch."), "method": repr(config.method)},
        "stock_prefill_seconds": stock_prefill,
        "preparation_seconds": context.seconds._asdict(),
        "budget": {
            "target": 1 - budget.target_sparsity,
            "prefill": float(budget.prefill.mean()),
            "decode": float(budget.decode.mean()),
        },
        "checked": checked,
        "sides": sides,
    }


def _prefill(model: PreTrainedModel, cache: DynamicCache, ids: torch.Tensor, chunk_size: int) -> None:
    for part in torch.split(ids, chunk_size, dim=1):
        model.get_decoder()(input_ids=part, use_cache=True, **{CACHE: cache})


def _stock_side(
    model: PreTrainedModel, cache: DynamicCache, tokens: torch.Tensor, config: ContextSpeedConfig
) -> dict[str, Any]:
    def ask(new_tokens: int) -> torch.Tensor:
        answer = _generate(model, tokens, cache, new_tokens)
        cache.crop(config.context - cache.get_seq_length())
        return answer

    first = ask(CHECKED_TOKENS).tolist()
    return {"name": "stock", "compiled": False, "first_tokens": first, **_measured(model, ask, config)}


def _patched_side(
    model: PreTrainedModel, context: FixedContext, question: torch.Tensor, config: ContextSpeedConfig, compiled: bool
) -> dict[str, Any]:
    room = config.question + config.new_tokens
    forget_compiled(model)
    with sparse_attention(model, context.method):
        cache = context.cache(1, max_cache_len=room if compiled else None)

        def ask(new_tokens: int) -> torch.Tensor:
            cache.reset()
            return _generate(model, question, cache, new_tokens)

        side = {"name": context.method.name, "compiled": compiled, **_measured(model, ask, config)}
        return {**side, "kv_fraction": sparse_attention_stats(model).kv_fraction}


def _generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any, new_tokens: int) -> torch.Tensor:
    answer: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    return answer[0, ids.shape[1] :]


def _measured(model: PreTrainedModel, ask: Callable[[int], torch.Tensor], config: ContextSpeedConfig) -> dict[str, Any]:
    """Time whole answers and first tokens, after one answer that is not counted."""
    device = model.device
    with PeakMemory(device) as memory:
        warm = _timed(device, lambda: ask(config.new_tokens))
        answers = [_timed(device, lambda: ask(config.new_tokens)) for _ in range(config.repeats)]
        firsts = [_timed(device, lambda: ask(1)) for _ in range(config.repeats)]
    answer, first = median(answers), median(firsts)
    return {
        "answer_seconds": {"median": answer, "all": answers},
        "first_token_seconds": {"median": first, "all": firsts},
        # Of two medians: where answers are short, noise may leave nothing between them.
        "tpot_ms": 1000 * (answer - first) / (config.new_tokens - 1)
        if config.new_tokens > 1 and answer > first
        else None,
        "first_answer_seconds": warm,
        "peak_memory_bytes": memory.peak_bytes,
    }


def _check(
    model: PreTrainedModel,
    context: FixedContext,
    question: torch.Tensor,
    expected: list[int],
    config: ContextSpeedConfig,
) -> dict[str, Any]:
    """Compare the first tokens at a target sparsity of 0 with the stock model's."""
    exact = context.retarget(0.0)
    with sparse_attention(model, exact.method):
        found = _generate(model, question, exact.cache(), CHECKED_TOKENS).tolist()
        fraction = sparse_attention_stats(model).kv_fraction
    in_common = next((at for at, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), CHECKED_TOKENS)
    if in_common == 0 or fraction < 1:
        raise EvalError(
            f"with a target sparsity of 0 the patched model began with {found}, the stock model with {expected}, at "
            f"{fraction:.3f} of the KV bytes"
        )
    return {"tokens": CHECKED_TOKENS, "tokens_in_common": in_common, "against": "the stock model, target sparsity 0"}


def _timed(device: torch.device, call: Callable[[], Any]) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started
