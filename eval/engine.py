"""Run of the samples of a material: one dense prefill, a context for each method, a fork for each sample, and costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from eval.config import DENSE, RunConfig
from eval.continuations import (
    Continuation,
    DensePath,
    answer_from,
    answer_sample,
    dense_path,
    ends_of_texts,
    follow_dense,
    force_sample,
    prediction_of,
    same_answer,
)
from eval.costs import dense_reads, device_name, sparse_reads, versions
from eval.errors import EvalError
from eval.studies import known_methods
from hf_sparse_attn import SparseCache, SparseMethod, sparse_attention
from hf_sparse_attn.cli.greedy import end_of_sequence_ids, prefill
from hf_sparse_attn.cli.memory import PeakMemory
from hf_sparse_attn.cli.variants import make_methods, varied_parameters
from hf_sparse_attn.methods import make_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from eval.benchmarks.base import Sample


@dataclass(frozen=True)
class Variant:
    """A method with its hyperparameters; ``token_budget`` is None for methods that read everything."""

    method: SparseMethod
    token_budget: int | None
    name: str = ""
    """The hyperparameters besides the budget in which the run's variants of the method differ, such as ``levels=2``."""

    @property
    def is_dense(self) -> bool:
        """Whether this is dense attention, which runs on the unpatched model."""
        return self.method.name == DENSE

    @property
    def prefills_densely(self) -> bool:
        """Whether the material's prefill is dense, so that one prefill serves all such variants.

        A method with a fixed context is sparse in the prefill of the question alone. One that needs attention weights
        must see the prefill itself. One that assigns positions, or has a RoPE of its own, rotates keys in its own way;
        and one that offloads keeps them elsewhere.
        """
        method = self.method
        is_dense = "prefill" not in method.sparse_phases or method.reads_prefix
        has_own_cache = method.rotates_keys or method.changes_rope or method.offloading is not None
        return is_dense and not (method.needs_weights or has_own_cache)


def make_variants(config: RunConfig) -> list[Variant]:
    """Return dense attention, each method with each budget and combination of swept parameters, and the variants.

    Of ``config.variants`` the names have the parameters that are not the method's defaults.

    Raises
    ------
    EvalError
        A method, a hyperparameter or a budget is not allowed.
    """
    known = known_methods()
    try:
        methods = make_methods(config.method, config.token_budget, config.parameters, known)
        variants = [Variant(make_method(DENSE), None)]
        for method, varied in zip(methods, varied_parameters(methods), strict=True):
            name = ", ".join(f"{key}={value}" for key, value in varied.items() if key != "token_budget")
            variants.append(Variant(method, _budget(method), name))
        for given in config.variants:
            parameters = {key: value for key, value in given.items() if key != "method"}
            for method in make_methods([given["method"]], (), parameters, known):
                variants.append(Variant(method, _budget(method), _named(method, parameters)))
    except (ValueError, TypeError) as error:
        raise EvalError(str(error)) from error
    keys = [(variant.method.name, variant.token_budget, variant.name) for variant in variants]
    for key in keys:
        if keys.count(key) > 1:
            raise EvalError(f"variants: {' '.join(str(part) for part in key if part)} is given twice")
    return variants


def _budget(method: SparseMethod) -> int | None:
    return method.token_budget if method.sparse_phases else None


def _named(method: SparseMethod, given: Iterable[str]) -> str:
    """Name the given hyperparameters besides the budget that are not the method's defaults."""
    defaults = {field.name: field.default for field in fields(method)}
    values = {name: getattr(method, name) for name in given if name != "token_budget"}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value != defaults[name])


Job = tuple["Sample", Sequence[Variant]]
"""A sample, and the variants that it runs with."""


@dataclass(frozen=True)
class _Context:
    """A material in the cache of a method, ready for questions, which run in forks of it."""

    cache: SparseCache
    prefill_seconds: float
    seconds: float
    """Prefill, and the method's work on the material."""
    peak_bytes: int


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

    Notes
    -----
    To measure a method's divergence it is fed dense attention's own answer. Dense attention's predictions along the
    answers of a material's samples are in memory together: ``new tokens x vocabulary`` numbers for each sample. If the
    score is measured too, the cache is forked where the method would first have answered otherwise, and the method's
    own answer goes on from there. Reads and times are those along dense attention's answer.
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

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Variant, dict[str, Any]]]:
        """Run samples, and yield a job's number, a variant and the measured part of its record as they finish.

        Consecutive samples with the same material share its prefill, and each variant's context over it. A variant
        answers all of their questions before the next variant begins, so that only one context is in memory beside the
        dense prefill. An error is yielded as ``{"error": ...}``; the rest runs anyway.
        """
        for _, group in itertools.groupby(enumerate(jobs), key=lambda entry: tuple(entry[1][0].material_ids)):
            yield from self._run_material(list(group))

    def _run_material(self, jobs: Sequence[tuple[int, Job]]) -> Iterator[tuple[int, Variant, dict[str, Any]]]:
        samples = [sample for _, (sample, _) in jobs]
        used = list(dict.fromkeys(variant for _, (_, variants) in jobs for variant in variants))
        prefix: _Context | None = None
        paths: dict[int, DensePath] = {}
        for variant in used:
            context: _Context | None = None
            for number, (sample, variants) in jobs:
                if variant not in variants:
                    continue
                try:
                    with _same_dense_kernels():
                        follows = "divergence" in self.config.measure and not variant.is_dense
                        if prefix is None and (variant.prefills_densely or follows):
                            prefix = self._prefill_densely(samples, used)
                        if follows and number not in paths:
                            assert prefix is not None
                            paths[number] = self._walk_densely(sample, prefix)
                        if context is None:
                            context = self._prepare(samples, variant, prefix)
                        measured = self._ask(sample, variant, context, paths.get(number) if follows else None)
                except Exception as error:  # stored in the record: one bad sample must not end a long run
                    measured = {"error": f"{type(error).__name__}: {error}"}
                yield number, variant, measured

    def _prefill_densely(self, samples: Sequence[Sample], variants: Sequence[Variant]) -> _Context:
        """Prefill the material once for all variants with a dense prefill, and keep the queries that they need."""
        keep_queries = max((each.method.keeps_queries for each in variants if each.prefills_densely), default=0)
        # Only a patched model hands its queries to the cache.
        with sparse_attention(self.model, DENSE) if keep_queries else nullcontext():
            return self._prefill(samples, DENSE, keep_queries)

    def _prefill(self, samples: Sequence[Sample], method: SparseMethod | str, keep_queries: int = 0) -> _Context:
        """Prefill the samples' material, in a cache with room for every question and its answer."""
        material_ids = samples[0].material_ids
        room = max(len(each.question_ids) + len(each.forced_ids) + each.max_new_tokens for each in samples)
        capacity = len(material_ids) + room
        fixed = capacity if self.config.cuda_graph else None
        cache = SparseCache(self.model.config, method, fixed, capacity, keep_queries=keep_queries)
        with PeakMemory(self.model.device) as memory:
            seconds = prefill(self.model, cache, material_ids)
        self.model_seconds += seconds
        return _Context(cache, seconds, seconds, memory.peak_bytes)

    def _prepare(self, samples: Sequence[Sample], variant: Variant, prefix: _Context | None) -> _Context:
        """Make a variant's context from the dense prefill, or from one of its own if it makes the prefill sparse."""
        with self._patched(variant):
            prefilled = prefix if variant.prefills_densely else self._prefill(samples, variant.method)
            assert prefilled is not None
            with PeakMemory(self.model.device) as memory:
                started = time.perf_counter()
                cache = prefilled.cache.fork(variant.method)
                if not variant.method.evicts:  # the question belongs to the prompt of a method that cannot go back
                    cache.complete_prompt()
                self._wait()
                seconds = time.perf_counter() - started
        self.model_seconds += seconds
        peak_bytes = max(memory.peak_bytes, prefilled.peak_bytes)
        return _Context(cache, prefilled.prefill_seconds, prefilled.seconds + seconds, peak_bytes)

    def _walk_densely(self, sample: Sample, prefix: _Context) -> DensePath:
        started = time.perf_counter()
        feeds, ends = self._feeds_tokens(sample), self._ends_of(sample)
        is_ended = ends_of_texts(self.tokenizer, sample)
        path = dense_path(self.model, sample, prefix.cache.fork(DENSE), feeds, ends, is_ended)
        self.model_seconds += time.perf_counter() - started
        return path

    def _ask(self, sample: Sample, variant: Variant, context: _Context, path: DensePath | None) -> dict[str, Any]:
        """Continue the context with one sample, in a fork, so that no sample depends on the ones before it."""
        with self._patched(variant), PeakMemory(self.model.device) as memory:
            cache = context.cache.fork(variant.method)
            self._wait()
            started = time.perf_counter()
            continued = self._continue(sample, cache, path)
            self.model_seconds += time.perf_counter() - started
            if variant.is_dense:
                reads = dense_reads(cache, continued.single_token_steps)
            else:
                reads = sparse_reads(self.model, cache)
            answered: dict[str, Any] = {}
            if path is not None and "score" in self.config.measure:
                started = time.perf_counter()
                answered = self._answer_beside(sample, variant, context, path, continued)
                self.model_seconds += time.perf_counter() - started
        return {
            **continued.result,
            "error": None,
            "prompt_tokens": len(sample.material_ids) + len(sample.question_ids),
            "question_tokens": len(sample.question_ids),
            "new_tokens": continued.new_tokens,
            **asdict(reads),
            "prefill_seconds": context.prefill_seconds,
            "context_seconds": context.seconds,
            "first_token_seconds": continued.first_token_seconds,
            "ttft_seconds": context.seconds + continued.first_token_seconds,
            "tpot_ms": 1000 * continued.decode_seconds / continued.decode_steps if continued.decode_steps else None,
            "peak_memory_bytes": max(memory.peak_bytes, context.peak_bytes),
            "peak_memory_measures": memory.measures,
            "cuda_graph": continued.is_recorded,
            **answered,
        }

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _patched(self, variant: Variant) -> AbstractContextManager[Any]:
        return nullcontext() if variant.is_dense else sparse_attention(self.model, variant.method)

    def _answer_beside(
        self, sample: Sample, variant: Variant, context: _Context, path: DensePath, followed: Continuation
    ) -> dict[str, Any]:
        """Return the result of a variant that has followed dense attention and now answers by itself."""
        known = same_answer(sample, path, followed)
        if followed.departure is not None:
            is_ended = ends_of_texts(self.tokenizer, sample)
            known = answer_from(
                self.model, sample, followed.departure, self._ends_of(sample), is_ended, self.config.cuda_graph
            )
        if known is not None:
            return {"prediction": prediction_of(self.tokenizer, sample, known), "new_tokens": len(known)}
        answered = self._continue(sample, context.cache.fork(variant.method), None)
        return {**answered.result, "new_tokens": answered.new_tokens}

    def _continue(self, sample: Sample, cache: SparseCache, path: DensePath | None) -> Continuation:
        token_by_token, cuda_graph = self._feeds_tokens(sample), self.config.cuda_graph
        if path is not None:
            departs = "score" in self.config.measure and path.answer_ids is not None and sample.min_new_tokens == 0
            return follow_dense(self.model, sample, cache, path, token_by_token, departs, cuda_graph)
        if sample.forced_ids:
            return force_sample(self.model, sample, cache, cuda_graph)
        ends = self._ends_of(sample)
        return answer_sample(self.model, self.tokenizer, sample, cache, token_by_token, ends, cuda_graph)

    def _feeds_tokens(self, sample: Sample) -> bool:
        """Whether the question is fed token by token."""
        return self.config.question == "decode" or len(sample.question_ids) == 1

    def _ends_of(self, sample: Sample) -> set[int]:
        return self._stop_ids | (self._newline_ids if sample.stop_at_newline else set())
