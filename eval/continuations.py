"""The part of a sample after its material: an answer, the likelihood of a given text, or dense attention's answer."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from eval.feed import Feed
from hf_sparse_attn.cli.greedy import answer, log_likelihoods

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eval.benchmarks.base import Sample
    from hf_sparse_attn import SparseCache

NLL_BUCKET = 64
"""Number of positions averaged by one entry of ``nll_by_position``."""
DIVERGENCE_BUCKET = 250
"""Number of predicted tokens averaged by one entry of ``divergence_by_position``."""


@dataclass(frozen=True)
class Departure:
    """Where a method that is fed dense attention's answer would for the first time have answered otherwise."""

    cache: SparseCache
    """A fork with the tokens fed until then. The cache that was fed further shares its buffers and must not go on."""
    token_ids: tuple[int, ...]
    """The method's own answer: dense attention's tokens, and as the last one the method's own, which is not cached."""


@dataclass(frozen=True)
class Continuation:
    """The tokens of a cache's continuation, and its times."""

    result: dict[str, Any]
    first_token_seconds: float
    decode_seconds: float
    decode_steps: int
    single_token_steps: int
    new_tokens: int
    is_recorded: bool
    """Whether the passes over single tokens were replays of a CUDA graph."""
    departure: Departure | None = None


@dataclass(frozen=True)
class DensePath:
    """Dense attention's own greedy answer, or the sample's given text, and what dense attention predicts along it."""

    fed_ids: tuple[int, ...]
    """The tokens fed after the question."""
    logits: Sequence[torch.Tensor]
    """Logits [vocabulary] after the question and after each fed token."""
    answer_ids: tuple[int, ...] | None
    """The whole answer; None if the sample has a given text."""


def answer_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    cache: SparseCache,
    token_by_token: bool,
    stop_ids: Collection[int],
    cuda_graph: bool = False,
) -> Continuation:
    """Answer a sample greedily."""
    feed = Feed(model, cache, cuda_graph)
    given = answer(
        model,
        cache,
        sample.question_ids,
        sample.max_new_tokens,
        token_by_token=token_by_token,
        stop_ids=stop_ids,
        min_new_tokens=sample.min_new_tokens,
        is_ended=ends_of_texts(tokenizer, sample),
        feed=feed,
    )
    return Continuation(
        result={"prediction": prediction_of(tokenizer, sample, given.token_ids)},
        first_token_seconds=given.first_token_seconds,
        decode_seconds=given.decode_seconds,
        decode_steps=given.decode_steps,
        single_token_steps=given.decode_steps + (given.question_steps if token_by_token else 0),
        new_tokens=len(given.token_ids),
        is_recorded=feed.is_recorded,
    )


def force_sample(model: PreTrainedModel, sample: Sample, cache: SparseCache, cuda_graph: bool = False) -> Continuation:
    """Measure the likelihood of the sample's own continuation."""
    feed = Feed(model, cache, cuda_graph)
    chunk = sample.forced_chunk
    tokens = [*sample.question_ids, *sample.forced_ids]
    started = time.perf_counter()
    scored = log_likelihoods(model, cache, tokens, chunk, feed.all)
    losses = [-next(scored)]
    first_token_seconds = time.perf_counter() - started
    losses += [-value for value in scored]
    decode_seconds = time.perf_counter() - started - first_token_seconds
    losses = losses[len(sample.question_ids) - 1 :]  # of the forced tokens only
    steps = len(tokens) - 1
    by_position = _means(losses, NLL_BUCKET, len(sample.material_ids) + len(sample.question_ids))
    return Continuation(
        result={"perplexity": math.exp(math.fsum(losses) / len(losses)), "nll_by_position": by_position},
        first_token_seconds=first_token_seconds,
        decode_seconds=decode_seconds,
        decode_steps=steps - 1 if chunk == 1 else 0,
        single_token_steps=steps if chunk == 1 else 0,
        new_tokens=0,
        is_recorded=feed.is_recorded and chunk == 1,
    )


def prediction_of(tokenizer: PreTrainedTokenizerBase, sample: Sample, token_ids: Sequence[int]) -> str:
    """Decode an answer, up to the first of the texts that end it."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text[: min((place for stop in sample.stop_texts if (place := text.find(stop)) >= 0), default=len(text))]


def ends_of_texts(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Callable[[Sequence[int]], bool] | None:
    """Return whether an answer's newest tokens complete a text that ends it, as a function; None without texts."""
    if not sample.stop_texts:
        return None
    newest = 2 + max(len(text.encode()) for text in sample.stop_texts)  # a token has at least one byte

    def is_ended(token_ids: Sequence[int]) -> bool:
        text = tokenizer.decode(token_ids[-newest:], skip_special_tokens=True)
        return len(token_ids) >= sample.min_new_tokens and any(stop in text for stop in sample.stop_texts)

    return is_ended


def dense_path(
    model: PreTrainedModel,
    sample: Sample,
    cache: SparseCache,
    token_by_token: bool,
    stop_ids: Any,
    is_ended: Callable[[Sequence[int]], bool] | None = None,
) -> DensePath:
    """Return what an unpatched model answers and predicts, continuing a fork of the material.

    A sample with a given text (``forced_ids``) has that text instead of an answer.
    """
    if sample.forced_ids:
        fed_ids = tuple(sample.forced_ids[:-1])
        feed = Feed(model, cache)
        return DensePath(fed_ids, list(_predictions(feed, sample, fed_ids, token_by_token)), None)
    logits: list[torch.Tensor] = []
    given = answer(
        model,
        cache,
        sample.question_ids,
        sample.max_new_tokens,
        token_by_token=token_by_token,
        stop_ids=stop_ids,
        min_new_tokens=sample.min_new_tokens,
        is_ended=is_ended,
        on_logits=logits.append,
    )
    # The last token is not fed if the limit ended the answer.
    return DensePath(given.token_ids[: given.decode_steps], logits[given.question_steps - 1 :], given.token_ids)


def follow_dense(
    model: PreTrainedModel,
    sample: Sample,
    cache: SparseCache,
    path: DensePath,
    token_by_token: bool,
    departs: bool = False,
    cuda_graph: bool = False,
) -> Continuation:
    """Feed dense attention's tokens, and compare the predictions with dense attention's (teacher forcing).

    The result has ``divergence``, the mean over the predicted tokens of KL(dense || method) in nats,
    ``divergence_max``, its maximum, and ``top_agreement``, the share of tokens whose most likely token is the same.
    ``divergence_by_position`` has the means over each ``DIVERGENCE_BUCKET`` tokens, from the first predicted one on.
    With ``departs`` the cache is forked where the most likely token is not the same for the first time.
    """
    departure: Departure | None = None
    forked_seconds = 0.0
    feed = Feed(model, cache, cuda_graph)
    started = time.perf_counter()
    logits: list[torch.Tensor] = []
    for predicted in _predictions(feed, sample, path.fed_ids, token_by_token):
        logits.append(predicted)
        best = int(predicted.argmax()) if departs or len(logits) == 1 else None  # waits for the device
        if len(logits) == 1:
            first_token_seconds = time.perf_counter() - started
        if best is not None and departs and departure is None and best != int(path.logits[len(logits) - 1].argmax()):
            forking = time.perf_counter()
            departure = Departure(cache.fork(cache.method), (*path.fed_ids[: len(logits) - 1], best))
            forked_seconds = time.perf_counter() - forking
    logits[-1].argmax().item()
    decode_seconds = time.perf_counter() - started - first_token_seconds - forked_seconds
    losses = [_divergence(dense, own) for dense, own in zip(path.logits, logits, strict=True)]
    agreeing = [bool(dense.argmax() == own.argmax()) for dense, own in zip(path.logits, logits, strict=True)]
    return Continuation(
        result={
            "divergence": fmean(losses),
            "divergence_max": max(losses),
            "top_agreement": fmean(agreeing),
            "divergence_by_position": _means(losses, DIVERGENCE_BUCKET),
        },
        first_token_seconds=first_token_seconds,
        decode_seconds=decode_seconds,
        decode_steps=len(path.fed_ids) if sample.forced_chunk == 1 else 0,
        single_token_steps=_single_token_steps(sample, path, token_by_token),
        new_tokens=0,
        is_recorded=feed.is_recorded and sample.forced_chunk == 1,
        departure=departure,
    )


def _single_token_steps(sample: Sample, path: DensePath, token_by_token: bool) -> int:
    if sample.forced_chunk > 1:
        return 0
    return len(path.fed_ids) + (len(sample.question_ids) if token_by_token else 0)


def same_answer(sample: Sample, path: DensePath, followed: Continuation) -> tuple[int, ...] | None:
    """Return dense attention's answer if a method that followed it would give it by itself; None if that is not known.

    It would where the most likely token was the same everywhere. A minimum length hides the tokens that end an answer,
    so what is chosen instead is not known from these.
    """
    agrees = followed.result["top_agreement"] == 1.0 and sample.min_new_tokens == 0
    return path.answer_ids if agrees else None


def answer_from(
    model: PreTrainedModel,
    sample: Sample,
    departure: Departure,
    stop_ids: Collection[int],
    is_ended: Callable[[Sequence[int]], bool] | None = None,
    cuda_graph: bool = False,
) -> tuple[int, ...]:
    """Return the answer of a method that has departed from dense attention's, without the token that ended it."""
    *before, own = departure.token_ids
    if own in stop_ids:
        return tuple(before)
    begun = departure.token_ids
    left = sample.max_new_tokens - len(begun)
    if left == 0 or (is_ended is not None and is_ended(begun)):
        return begun

    def is_over(token_ids: Sequence[int]) -> bool:
        return is_ended is not None and is_ended([*begun, *token_ids])

    feed = Feed(model, departure.cache, cuda_graph)
    rest = answer(model, departure.cache, [own], left, stop_ids=stop_ids, is_ended=is_over, feed=feed)
    return begun + rest.token_ids


def _predictions(feed: Feed, sample: Sample, fed_ids: Sequence[int], token_by_token: bool) -> Iterator[torch.Tensor]:
    """Yield the logits [vocabulary] after the question and after each fed token."""
    question_ids = sample.question_ids
    if sample.forced_chunk > 1:
        tokens = [*question_ids, *fed_ids]
        logits = itertools.chain.from_iterable(
            feed.all(tokens[start : start + sample.forced_chunk])
            for start in range(0, len(tokens), sample.forced_chunk)
        )
        yield from itertools.islice(logits, len(question_ids) - 1, None)
        return
    *before, last = [[token_id] for token_id in question_ids] if token_by_token else [list(question_ids)]
    for part in before:
        feed(part)
    for part in itertools.chain([last], ([token_id] for token_id in fed_ids)):
        yield feed(part)


def _means(values: Sequence[float], size: int, first_position: int = 0) -> list[list[float]]:
    """Return the position of the first of each ``size`` values, and their mean."""
    starts = range(0, len(values), size)
    return [[first_position + start, fmean(values[start : start + size])] for start in starts]


def _divergence(dense: torch.Tensor, own: torch.Tensor) -> float:
    """Return KL(dense || own) of the logits of one token, in nats."""
    expected, found = (logits.double().log_softmax(-1) for logits in (dense, own))
    divergence = torch.nn.functional.kl_div(found, expected, reduction="sum", log_target=True)
    return max(0.0, float(divergence))  # rounding can leave it below zero
