"""Run of one sample with dense attention and every method: one prefill, a fork of its cache for each, and the costs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from eval.config import DENSE, RunConfig
from eval.costs import dense_reads, device_name, sparse_reads, versions
from eval.errors import EvalError
from hf_sparse_attn import SparseCache, SparseMethod, sparse_attention
from hf_sparse_attn.cli.greedy import answer, end_of_sequence_ids, log_likelihoods, prefill
from hf_sparse_attn.cli.memory import PeakMemory
from hf_sparse_attn.cli.variants import make_methods
from hf_sparse_attn.methods import make_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eval.benchmarks.base import Sample

NLL_BUCKET = 64
"""Number of positions averaged by one entry of ``nll_by_position``."""


@dataclass(frozen=True)
class Variant:
    """A method with a budget; ``token_budget`` is None for dense attention."""

    method: SparseMethod
    token_budget: int | None

    @property
    def is_dense(self) -> bool:
        """Whether this is dense attention, which runs on the unpatched model."""
        return self.method.name == DENSE

    @property
    def prefills_densely(self) -> bool:
        """Whether the prefill is dense, so that one prefill serves all such variants."""
        return "prefill" not in self.method.sparse_phases


def make_variants(config: RunConfig) -> list[Variant]:
    """Return dense attention, then each method with each budget.

    Raises
    ------
    EvalError
        A method, a hyperparameter or a budget is not allowed.
    """
    try:
        methods = make_methods(config.method, config.token_budget, config.parameters)
    except (ValueError, TypeError) as error:
        raise EvalError(str(error)) from error
    return [Variant(make_method(DENSE), None), *(Variant(method, method.token_budget) for method in methods)]


@dataclass(frozen=True)
class _Prefix:
    """The material, prefilled densely."""

    cache: SparseCache
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class _Continuation:
    """The part of a run after the material."""

    result: dict[str, Any]
    first_token_seconds: float
    decode_seconds: float
    decode_steps: int
    single_token_steps: int
    new_tokens: int


@contextmanager
def _same_dense_kernels() -> Iterator[None]:
    """Disable cuDNN's attention.

    It takes tens of milliseconds to build a plan for every new cache length. Dense attention runs first, so it alone
    would pay for them.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


class Engine:
    """Runs samples through a model.

    Parameters
    ----------
    model : PreTrainedModel
        An unpatched model; it is unpatched again after each run.
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    config : RunConfig
        The run.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.model_seconds = 0.0
        """Time in the model and the methods; the rest is the harness's own."""
        self._stop_ids = end_of_sequence_ids(model, tokenizer)
        self._newline_ids = set(tokenizer("\n", add_special_tokens=False)["input_ids"][-1:])
        self.machine = {
            "model": config.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": device_name(model.device),
            "versions": versions(),
        }

    def run(self, sample: Sample, variants: Sequence[Variant]) -> Iterator[tuple[Variant, dict[str, Any]]]:
        """Yield the measured part of each variant's record as it finishes.

        An error in a variant is yielded as ``{"error": ...}``; the next variant runs anyway.
        """
        prefix: _Prefix | None = None
        for variant in variants:
            try:
                with _same_dense_kernels():
                    if prefix is None and variant.prefills_densely:
                        prefix = self._prefill(sample)
                    measured = self._run_variant(sample, variant, prefix if variant.prefills_densely else None)
            except Exception as error:  # stored in the record: one bad sample must not end a long run
                measured = {"error": f"{type(error).__name__}: {error}"}
            yield variant, measured

    def _prefill(self, sample: Sample) -> _Prefix:
        """Prefill the material, in a cache with room for question and answer."""
        following = len(sample.question_ids) + len(sample.forced_ids) + sample.max_new_tokens
        cache = SparseCache(self.model.config, DENSE, initial_capacity=len(sample.material_ids) + following)
        with PeakMemory(self.model.device) as memory:
            seconds = prefill(self.model, cache, sample.material_ids)
        self.model_seconds += seconds
        return _Prefix(cache, seconds, memory.peak_bytes)

    def _run_variant(self, sample: Sample, variant: Variant, prefix: _Prefix | None) -> dict[str, Any]:
        patched = nullcontext() if variant.is_dense else sparse_attention(self.model, variant.method)
        with patched, PeakMemory(self.model.device) as memory:
            started = time.perf_counter()
            if prefix is None:
                cache = SparseCache.for_model(self.model)
                prefill_seconds = prefill(self.model, cache, sample.material_ids)
                metadata_seconds = 0.0  # within the prefill
            else:
                cache = prefix.cache.fork(variant.method)
                prefill_seconds, metadata_seconds = prefix.seconds, time.perf_counter() - started
            continued = self._force(sample, cache) if sample.forced_ids else self._answer(sample, cache)
            self.model_seconds += time.perf_counter() - started
            if variant.is_dense:
                reads = dense_reads(cache, continued.single_token_steps)
            else:
                reads = sparse_reads(self.model, cache)
        return {
            **continued.result,
            "error": None,
            "prompt_tokens": len(sample.material_ids) + len(sample.question_ids),
            "question_tokens": len(sample.question_ids),
            "new_tokens": continued.new_tokens,
            **asdict(reads),
            "prefill_seconds": prefill_seconds,
            "ttft_seconds": prefill_seconds + metadata_seconds + continued.first_token_seconds,
            "tpot_ms": 1000 * continued.decode_seconds / continued.decode_steps if continued.decode_steps else None,
            "peak_memory_bytes": max(memory.peak_bytes, prefix.peak_bytes if prefix else 0),
            "peak_memory_measures": memory.measures,
        }

    def _answer(self, sample: Sample, cache: SparseCache) -> _Continuation:
        token_by_token = self.config.question == "decode" or len(sample.question_ids) == 1
        given = answer(
            self.model,
            cache,
            sample.question_ids,
            sample.max_new_tokens,
            token_by_token=token_by_token,
            stop_ids=self._stop_ids | (self._newline_ids if sample.stop_at_newline else set()),
            min_new_tokens=sample.min_new_tokens,
        )
        return _Continuation(
            result={"prediction": self.tokenizer.decode(given.token_ids, skip_special_tokens=True)},
            first_token_seconds=given.first_token_seconds,
            decode_seconds=given.decode_seconds,
            decode_steps=given.decode_steps,
            single_token_steps=given.decode_steps + (given.question_steps if token_by_token else 0),
            new_tokens=len(given.token_ids),
        )

    def _force(self, sample: Sample, cache: SparseCache) -> _Continuation:
        """Measure the likelihood of the sample's own continuation."""
        chunk = sample.forced_chunk
        tokens = [*sample.question_ids, *sample.forced_ids]
        started = time.perf_counter()
        scored = log_likelihoods(self.model, cache, tokens, chunk)
        losses = [-next(scored)]
        first_token_seconds = time.perf_counter() - started
        losses += [-value for value in scored]
        decode_seconds = time.perf_counter() - started - first_token_seconds
        losses = losses[len(sample.question_ids) - 1 :]  # of the forced tokens only
        steps = len(tokens) - 1
        first_position = len(sample.material_ids) + len(sample.question_ids)
        by_position = [
            [first_position + begin, math.fsum(bucket) / len(bucket)]
            for begin in range(0, len(losses), NLL_BUCKET)
            if (bucket := losses[begin : begin + NLL_BUCKET])
        ]
        return _Continuation(
            result={"perplexity": math.exp(math.fsum(losses) / len(losses)), "nll_by_position": by_position},
            first_token_seconds=first_token_seconds,
            decode_seconds=decode_seconds,
            decode_steps=steps - 1 if chunk == 1 else 0,
            single_token_steps=steps if chunk == 1 else 0,
            new_tokens=0,
        )
