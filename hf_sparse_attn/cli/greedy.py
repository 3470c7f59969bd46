"""Timed prefill and greedy decoding, for the passkey demo and the evaluation harness."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class GreedyAnswer:
    """A model's answer to a question, with its times.

    Parameters
    ----------
    token_ids : tuple of int
        The answer, without the token that ended it.
    first_token_seconds : float
        Time from the question's first token to the answer's first.
    decode_seconds : float
        Time of the forward passes after that.
    question_steps : int
        Forward passes over the question: one per token, or a single one.
    decode_steps : int
        Forward passes that ``decode_seconds`` covers.
    """

    token_ids: tuple[int, ...]
    first_token_seconds: float
    decode_seconds: float
    question_steps: int
    decode_steps: int


def forward(model: PreTrainedModel, cache: Cache, token_ids: Sequence[int]) -> torch.Tensor:
    """Feed tokens to a model at batch size 1 and return the last token's logits, [vocabulary]."""
    return _forward(model, cache, token_ids, logits_to_keep=1)[-1]


def forward_all(model: PreTrainedModel, cache: Cache, token_ids: Sequence[int]) -> torch.Tensor:
    """Feed tokens to a model at batch size 1 and return the logits of all, [tokens, vocabulary]."""
    return _forward(model, cache, token_ids, logits_to_keep=0)


def _forward(model: PreTrainedModel, cache: Cache, token_ids: Sequence[int], logits_to_keep: int) -> torch.Tensor:
    import torch

    from hf_sparse_attn.cache_argument import CACHE

    input_ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode():
        output = model(input_ids=input_ids, use_cache=True, logits_to_keep=logits_to_keep, **{CACHE: cache})
    logits: torch.Tensor = output.logits[0]
    return logits


def prefill(model: PreTrainedModel, cache: Cache, token_ids: Sequence[int]) -> float:
    """Feed tokens in one forward pass and return its seconds, 0 if there are no tokens."""
    if not token_ids:
        return 0.0
    started = time.perf_counter()
    forward(model, cache, token_ids).argmax().item()  # waits for the device
    return time.perf_counter() - started


def answer(
    model: PreTrainedModel,
    cache: Cache,
    question_ids: Sequence[int],
    max_new_tokens: int,
    *,
    token_by_token: bool = True,
    stop_ids: Collection[int] = (),
    min_new_tokens: int = 0,
    is_ended: Callable[[Sequence[int]], bool] | None = None,
    on_step: Callable[[], None] | None = None,
    on_logits: Callable[[torch.Tensor], None] | None = None,
    feed: Callable[[Sequence[int]], torch.Tensor] | None = None,
) -> GreedyAnswer:
    """Answer a question greedily, continuing from the cache.

    Parameters
    ----------
    model : PreTrainedModel
        Patched or not.
    cache : Cache
        Holds the material of one sequence.
    question_ids : sequence of int
        At least one token.
    max_new_tokens : int
        Upper bound for the answer, at least 1.
    token_by_token : bool
        Feed the question one token per forward pass, so that methods with sparse decoding apply to it too. Otherwise
        the question is one forward pass.
    stop_ids : collection of int
        Ids of the tokens that end the answer.
    min_new_tokens : int
        Suppress ``stop_ids`` for the first ``min_new_tokens`` tokens.
    is_ended : callable, optional
        Called with the answer after each of its tokens; the answer ends with the token after which it returns True.
    on_step : callable, optional
        Called after each forward pass.
    on_logits : callable, optional
        Called with the logits [vocabulary] of each forward pass, before ``min_new_tokens`` hides any.
    feed : callable, optional
        Feeds tokens to the model over the cache and returns the last one's logits, as :func:`forward` does.

    Raises
    ------
    ValueError
        The question is empty, or ``max_new_tokens`` is below 1.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is not allowed: at least 1")
    import torch

    if not question_ids:
        raise ValueError("question_ids is empty; at least one token is needed")

    def step(token_ids: Sequence[int], may_stop: bool) -> int:
        logits = forward(model, cache, token_ids) if feed is None else feed(token_ids)
        if on_logits is not None:
            on_logits(logits)
        if not may_stop:
            ended = torch.tensor(sorted(stop_ids), dtype=torch.long, device=logits.device)
            logits = logits.index_fill(0, ended, -torch.inf)
        best = int(logits.argmax())  # waits for the device, so that timings are right on CUDA
        if on_step is not None:
            on_step()
        return best

    started = time.perf_counter()
    parts = [[token_id] for token_id in question_ids] if token_by_token else [list(question_ids)]
    for number, part in enumerate(parts, start=1):
        best = step(part, may_stop=number < len(parts) or min_new_tokens == 0)
    first = time.perf_counter()
    token_ids: list[int] = []
    steps = 0
    while best not in stop_ids:
        token_ids.append(best)
        if len(token_ids) == max_new_tokens or (is_ended is not None and is_ended(token_ids)):
            break
        best = step([best], may_stop=len(token_ids) >= min_new_tokens)
        steps += 1
    ended = time.perf_counter()
    return GreedyAnswer(tuple(token_ids), first - started, ended - first, len(parts), steps)


def log_likelihoods(
    model: PreTrainedModel,
    cache: Cache,
    token_ids: Sequence[int],
    chunk: int = 1,
    feed: Callable[[Sequence[int]], torch.Tensor] | None = None,
) -> Iterator[float]:
    """Yield the log-likelihood in nats of each token but the first, feeding ``chunk`` tokens at a time.

    Parameters
    ----------
    model : PreTrainedModel
        Patched or not.
    cache : Cache
        Holds the tokens before ``token_ids``.
    token_ids : sequence of int
        The text.
    chunk : int
        Tokens per forward pass. With 1, methods with sparse decoding apply to every token.
    feed : callable, optional
        Feeds tokens to the model over the cache and returns the logits of all, as :func:`forward_all` does.
    """
    import torch

    for begin in range(0, len(token_ids) - 1, chunk):
        fed = list(token_ids[begin : min(begin + chunk, len(token_ids) - 1)])
        targets = torch.tensor(token_ids[begin + 1 : begin + 1 + len(fed)], device=model.device)
        logits = forward_all(model, cache, fed) if feed is None else feed(fed)
        log_probabilities = logits.float().log_softmax(-1).gather(1, targets[:, None])
        yield from log_probabilities[:, 0].tolist()


def end_of_sequence_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end an answer, from the generation config, or from the tokenizer if there is none."""
    stop = model.generation_config.eos_token_id if model.generation_config is not None else tokenizer.eos_token_id
    if stop is None:
        return set()
    return set(stop) if isinstance(stop, (list, tuple)) else {stop}
