"""lm_eval's Transformers model with sparse attention, for likelihoods as well as generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.cli.models import locate
from hf_sparse_attn.lm_eval import lm_eval_needed
from hf_sparse_attn.lm_eval.arguments import Scheme, argument_errors, load_errors, split_arguments
from hf_sparse_attn.lm_eval.scoring import Continuation, Scorer, feed
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.patch.patch import patch_model
from hf_sparse_attn.patched import base_model, sparse_attention_stats
from hf_sparse_attn.stats import LayerStats

with lm_eval_needed():
    from lm_eval.models.huggingface import HFLM

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts (None for a window of a longer text), tokens of the context, and tokens of the continuation."""

logger = logging.getLogger("lm_eval.models.hf_sparse")  # a child of lm_eval's logger, to inherit its settings


class HFSparseLM(HFLM):  # type: ignore[misc]
    """lm_eval's ``hf`` model with sparse attention, registered as ``hf-sparse``.

    Methods with sparse decoding affect only tokens that are fed one per forward pass. Scored continuations are
    therefore fed token by token after a prefilled context. The context's last token is decoded too, because it
    predicts the first scored token. Generation is the patched model's ``generate()``; its first new token comes from
    the prefill.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        A hub id, a directory, a ``.gguf`` file, an alias of ``hf_sparse_attn.cli.models``, or a model to patch in
        place.
    method : str or SparseMethod
        A name in ``METHODS``, or a method.
    decode_last : int
        Tokens at the end of each prompt that are decoded one per forward pass, like new tokens; at most the length of
        the shortest prompt in the batch.
    rolling_prefill : int
        Tokens at the start of each window of ``loglikelihood_rolling`` that are fed and scored in one forward pass. By
        default none: every token is scored in a decode step.
    arguments
        The method's hyperparameters, and arguments of ``hf``.

    Raises
    ------
    ArgumentError
        An argument is not allowed, or the model is not supported or cannot be loaded. It is a ValueError; if uncaught,
        it ends the process with only its message.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel | None = None,
        method: str | SparseMethod = "quest",
        decode_last: int = 0,
        rolling_prefill: int = 0,
        **arguments: Any,
    ) -> None:
        with argument_errors():
            self.scheme = Scheme(decode_last, rolling_prefill)
            self.method, arguments = split_arguments(HFLM, method, arguments)
            if pretrained is None:
                raise ValueError("pretrained is missing: a hub id, a directory, a .gguf file or an alias")
            source, options = locate(pretrained) if isinstance(pretrained, str) else (pretrained, {})
        with load_errors(str(pretrained), self.method):
            super().__init__(source, **{**options, **arguments})
        with argument_errors():
            if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
                raise ValueError(f"peft={self.peft!r} puts a learned prompt before every token; use LoRA")
            patch_model(self.model, self.method)
        self.reads_by_task: dict[str, LayerStats] = {}
        """Reads of the decode steps by task; under the single name "" if several processes share the tasks."""
        self._reads = LayerStats()
        self._scorer = Scorer(self.model, self.tokenizer.pad_token_id, self.softmax_dtype)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each request's continuation after its context."""
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score each request's text, in windows of at most ``max_length`` tokens."""
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each request's prompt up to a stop sequence."""
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def _by_task(self, run: Callable[..., list[Any]], requests: Sequence[Instance], disable_tqdm: bool) -> list[Any]:
        """Run each task's requests separately, to count reads by task."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            # Several processes must make the same calls, but one may have no request of some task.
            name = (request.task_name or "") if self.world_size == 1 else ""
            places.setdefault(name, []).append(place)
        answers: dict[int, Any] = {}
        for name, chosen in places.items():
            self._reads = LayerStats()
            found = run([requests[place] for place in chosen], disable_tqdm=disable_tqdm)
            answers.update(zip(chosen, found, strict=True))
            for reads in self.gather_object(self._reads) or ():  # None except in the first process
                self.reads_by_task[name] = _sum(self.reads_by_task.get(name, LayerStats()), reads)
        return [answers[place] for place in range(len(requests))]

    def _count_reads(self) -> None:
        """Add the reads of the last cache's decode steps."""
        self._reads = _sum(self._reads, sparse_attention_stats(self.model))

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score the continuations, longest contexts first; those of one context share its prefill within a batch."""
        found: dict[int, tuple[float, bool]] = {}
        places: dict[Continuation, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(self._continuation(*request), []).append(place)
        order = sorted(places, key=lambda row: (-row.prefill, row.inputs[: row.prefill], -row.steps))
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for batch in self._batches(order, override_bs):
            last_tokens = [[requests[place][2][-1] for place in places[row]] for row in batch]
            with self._autocast():
                scores = self._scorer.score(batch, last_tokens)
            self._count_reads()
            for row, answers in zip(batch, scores, strict=True):
                for place, answer in zip(places[row], answers, strict=True):
                    found[place] = answer
                    if (texts := requests[place][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    bar.update()
        bar.close()
        return [found[place] for place in range(len(requests))]

    def _continuation(self, texts: tuple[str, str] | None, context: list[int], scored: list[int]) -> Continuation:
        """Truncate the context from the left to ``max_length`` and plan the forward passes."""
        if not 1 <= len(scored) <= self.max_length:
            raise ValueError(f"a continuation has {len(scored)} tokens; allowed: 1 to {self.max_length}")
        tokens = (context + scored)[-(self.max_length + 1) :]
        if len(tokens) < len(context) + len(scored):
            logger.warning(
                "%d tokens of context and %d of continuation exceed max_length=%d: the first %d are cut off",
                *(len(context), len(scored), self.max_length, len(context) + len(scored) - len(tokens)),
            )
        inputs = tuple(tokens[:-1])
        kept = len(tokens) - len(scored)
        return Continuation(inputs, self.scheme.prefill(kept, len(inputs), is_rolling=texts is None), kept - 1)

    def _batches(self, order: list[Continuation], override_bs: int | None) -> Iterator[list[Continuation]]:
        is_automatic = self.batch_size == "auto" and not override_bs
        if is_automatic:
            self.batch_sizes: dict[float, int] = {}  # searched again for these lengths
        requests = [(None, list(row.inputs), [self.eot_token_id]) for row in order]  # in the search's format
        begin = 0
        while begin < len(order):
            size = self._batch_scheduler(begin, requests) if is_automatic else override_bs or self.batch_size
            yield order[begin : begin + size]
            begin += size

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Generate after left-padded prompts, [rows, tokens]."""
        if self.scheme.decode_last:
            mask = generation_kwargs["attention_mask"]
            with self._autocast():
                generation_kwargs[CACHE] = self._feed_all_but_last(context, mask, max_length)
        tokens: torch.Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self._count_reads()
        return tokens

    @torch.no_grad()
    def _feed_all_but_last(self, context: torch.Tensor, mask: torch.Tensor, max_length: int) -> SparseCache:
        """Prefill prompts and decode their last tokens, except the final one, which ``generate()`` feeds."""
        width = context.shape[1]
        decoded = min(self.scheme.decode_last, int(mask.sum(dim=1).min()))
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        cache = SparseCache(base_model(self.model).config, self.method, initial_capacity=max_length)
        ends = [*([width - decoded] if decoded < width else []), *range(width - decoded + 1, width)]
        for begin, end in zip([0, *ends], ends, strict=False):
            feed(self.model, cache, context[:, begin:end], mask[:, :end], positions[:, begin:end])
        return cache

    def get_model_info(self) -> dict[str, Any]:
        """Return the entries that lm_eval writes to its results: the method and the reads of its decode steps."""
        total = LayerStats()
        for reads in self.reads_by_task.values():
            total = _sum(total, reads)
        by_task = {name: _kv_fraction(reads) for name, reads in self.reads_by_task.items() if name}
        shown = [f"{name}: {_shown(fraction)}" for name, fraction in by_task.items()]
        logger.info("kv_fraction=%s (%s) by %s", _shown(_kv_fraction(total)), ", ".join(shown), self.method)
        return {
            **super().get_model_info(),
            "sparse_attention": {"method": self.method.name, **asdict(self.method), **asdict(self.scheme)},
            "kv_fraction": _kv_fraction(total),
            "kv_fraction_by_task": by_task,
            **{name: getattr(total, name) for name in COUNTS},
        }


COUNTS = ("decode_steps", "kv_bytes", "metadata_bytes", "dense_bytes")


def _sum(first: LayerStats, second: LayerStats) -> LayerStats:
    return LayerStats(**{name: getattr(first, name) + getattr(second, name) for name in COUNTS})


def _kv_fraction(reads: LayerStats) -> float | None:
    """Return the fraction of dense attention's bytes that were read, None if nothing was decoded."""
    return reads.kv_fraction if reads.dense_bytes else None


def _shown(fraction: float | None) -> str:
    return "none (nothing was decoded)" if fraction is None else f"{fraction:.4f}"
