"""Checks of a run before any work: its benchmark and settings, its model, its methods, and its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from eval.benchmarks import BENCHMARKS, Benchmark, Item, Setup
from eval.chat_templates import read_chat_template, with_chat_template
from eval.config import RunConfig
from eval.data_files import TaskFiles, collected
from eval.engine import Variant
from eval.errors import EvalError
from hf_sparse_attn import sparse_attention
from hf_sparse_attn.cli.models import resolve_device
from hf_sparse_attn.patch import pass_graph
from hf_sparse_attn.rope import max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OnRefusal = Callable[[Variant, str], None]
"""Takes a variant that a run leaves out, and the reason."""


class ModelSource(Protocol):
    """The source of a run's model."""

    def describe(self, config: RunConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
        """Return the model's tokenizer and configuration, from which samples are built."""

    def load(self, config: RunConfig) -> PreTrainedModel:
        """Return the model, which takes longer."""


@dataclass(frozen=True)
class Prepared:
    """A run whose samples are known, before its model's weights are loaded."""

    tokenizer: PreTrainedTokenizerBase
    variants: Sequence[Variant]
    """Those that the benchmark's settings suit."""
    items: Sequence[Item]
    files: TaskFiles
    """The data files that each task's samples are built from."""


def prepare(
    config: RunConfig,
    benchmark: Benchmark,
    template: str | None,
    variants: Sequence[Variant],
    source: ModelSource,
    on_refusal: OnRefusal | None = None,
) -> Prepared:
    """List a run's samples after checking its settings against tokenizer and model configuration.

    ``template`` is the chat template that the run names, if any; see :func:`usable` for ``on_refusal``.

    Raises
    ------
    EvalError
        The model lacks a chat template or positions, data is missing or malformed, there are no samples, or the device
        cannot record what is to be recorded.
    """
    if config.cuda_graph and not pass_graph.can_record(device := resolve_device(config.device)):
        raise EvalError(f"cuda_graph=True needs a CUDA device, got {str(device)!r}")
    tokenizer, model_config = source.describe(config)
    if template is not None:
        tokenizer = with_chat_template(tokenizer, template, str(config.chat_template))
    setup = _setup(config, benchmark, model_config, tokenizer, variants)
    variants = usable(variants, lambda variant: benchmark.check_methods([variant.method], setup), on_refusal)
    items: list[Item] = []
    files = {}
    for task in setup.tasks:
        with collected() as found:
            items += benchmark.items(replace(setup, tasks=(task,)))
        if found:
            files[task] = list(found)
    if not items:
        raise EvalError(f"{config.benchmark} has no samples for these settings")
    check_unique(items)
    return Prepared(tokenizer, variants, items, files)


def check_run(config: RunConfig, variants: Sequence[Variant], source: ModelSource) -> None:
    """Check a run without its weights and without a folder, by its first samples.

    Raises
    ------
    EvalError
        As :func:`prepare`, or the benchmark or its settings are unknown.
    """
    protocol_dir = Path(config.protocol_dir) if config.protocol_dir else None
    template = None if config.chat_template is None else read_chat_template(config.chat_template, protocol_dir)
    first = replace(config, limit=1)
    prepare(first, find_benchmark(first), template, variants, source, lambda variant, reason: None)


def find_benchmark(config: RunConfig) -> Benchmark:
    """Return the benchmark after checking its name, tasks and settings.

    Raises
    ------
    EvalError
        Unknown benchmark, task or setting.
    """
    if config.benchmark not in BENCHMARKS:
        raise EvalError(f"benchmark {config.benchmark!r} is unknown; known: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[config.benchmark]
    for task in config.tasks:
        if task not in benchmark.tasks:
            raise EvalError(f"{benchmark.name} has no task {task!r}; it has {', '.join(benchmark.tasks)}")
    for option in config.options:
        if option not in benchmark.options:
            known = ", ".join(benchmark.options) or "none"
            raise EvalError(f"{benchmark.name} has no setting {option!r}; it has {known}")
    return benchmark


def usable(
    variants: Sequence[Variant], check: Callable[[Variant], None], on_refusal: OnRefusal | None
) -> list[Variant]:
    """Return the variants that pass a check, and pass the others to ``on_refusal``.

    Raises
    ------
    EvalError
        A variant fails, and ``on_refusal`` is None; or dense attention fails, without which nothing is measured.
    """
    kept = []
    for variant in variants:
        try:
            check(variant)
        except EvalError as error:
            if on_refusal is None or variant.is_dense:
                raise
            on_refusal(variant, str(error))
        else:
            kept.append(variant)
    return kept


def check_patchable(model: PreTrainedModel, variant: Variant) -> None:
    """Check that the model can be patched with a method, without changing it.

    Raises
    ------
    EvalError
        The method does not support the model.
    """
    try:
        with sparse_attention(model, variant.method):
            pass
    except (TypeError, ValueError, OSError) as error:
        raise EvalError(f"method {variant.method.name!r} cannot be used: {error}") from error


def check_unique(items: Sequence[Item]) -> None:
    """Check that all items have different keys.

    Raises
    ------
    EvalError
        Two items have the same task, length and sample id: the data has an example twice.
    """
    seen = set()
    for item in items:
        key = (item.task, item.length, item.sample_id)
        if key in seen:
            raise EvalError(f"sample {item.sample_id!r} of {item.task} is in the data twice")
        seen.add(key)


def _setup(
    config: RunConfig,
    benchmark: Benchmark,
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variants: Sequence[Variant],
) -> Setup:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if config.chat == "on" and not has_template:
        raise EvalError(f"chat='on', but the tokenizer of {config.model!r} has no chat template; give --chat-template")
    try:
        limits = [max_positions(model_config), *(variant.method.prompt_limit(model_config) for variant in variants)]
    except ValueError as error:
        raise EvalError(f"{config.model}: {error}") from error
    positions = max(2 * max(config.lengths, default=0) if limit is None else limit for limit in limits)
    return Setup(
        tokenizer=tokenizer,
        max_positions=positions,
        tasks=config.tasks or benchmark.default_tasks or benchmark.tasks,
        lengths=config.lengths or benchmark.default_lengths,
        limit=config.limit,
        seed=config.seed,
        data_dir=Path(config.data_dir) if config.data_dir else None,
        protocol_dir=Path(config.protocol_dir) if config.protocol_dir else None,
        chat=has_template and config.chat != "off",
        options=config.options,
    )
