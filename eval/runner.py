"""A run from beginning to end: items, processes, rows, summary."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eval import metrics
from eval.benchmarks import BENCHMARKS, Benchmark, Item, Sample, Setup
from eval.config import RunConfig, with_dense
from eval.engine import Engine, Variant, make_variants
from eval.errors import EvalError
from eval.protocols import load_protocol
from eval.row_check import check_row
from eval.store import RowKey, Store, encode_row, read_json, row_key, write_json
from eval.summary import summarise
from hf_sparse_attn import sparse_attention
from hf_sparse_attn.rope import max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MEASURED = (
    "prediction",
    "perplexity",
    "nll_by_position",
    "prompt_tokens",
    "question_tokens",
    "new_tokens",
    "kv_bytes",
    "metadata_bytes",
    "dense_bytes",
    "kv_fraction",
    "realised_budget",
    "selection_hit_rate",
    "prefill_seconds",
    "ttft_seconds",
    "tpot_ms",
    "peak_memory_bytes",
    "peak_memory_measures",
)
"""Fields that are null in a row whose sample failed."""


class ModelSource(Protocol):
    """The source of a run's model."""

    def describe(self, config: RunConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
        """Return the model's tokenizer and configuration, which samples are made with."""

    def load(self, config: RunConfig) -> PreTrainedModel:
        """Return the model itself, which takes longer."""


@dataclass(frozen=True)
class Processes:
    """This process among those of an ``accelerate launch``; one alone without it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def current(cls) -> Processes:
        """Join the other processes, where there are any."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        from accelerate import PartialState

        state = PartialState()
        return cls(state.process_index, state.num_processes, state.local_process_index)

    @property
    def is_main(self) -> bool:
        """Whether this process merges the rows and talks to the user."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    def agree(self, error: EvalError | None) -> None:
        """Raise in every process where one has an error: none must wait for the others in vain."""
        errors: list[EvalError | None] = [error]
        if self.world_size > 1:
            from accelerate.utils import gather_object

            errors = gather_object([error])
        for found in errors:
            if found is not None:
                raise found


def run(
    config: RunConfig,
    out: Path,
    source: ModelSource,
    processes: Processes,
    on_row: Callable[[int, int, dict[str, Any] | None], None] = lambda done, total, row: None,
) -> dict[str, Any]:
    """Run a benchmark, append each row to ``out`` as it is done, and return the summary that stands there too.

    Rows that are there already are not run again; those with an error are.

    Parameters
    ----------
    config : RunConfig
        The run; dense attention is added to its methods.
    out : Path
        The results folder.
    source : ModelSource
        Asked for the model once everything that needs no weights was checked.
    processes : Processes
        Each takes its share of the items.
    on_row : callable
        Called with the number of rows done, of all rows of this process, and the newest row.

    Raises
    ------
    EvalError
        The run cannot be; no row was written.
    """
    config = with_dense(config)
    benchmark = find_benchmark(config)
    variants = make_variants(config)
    protocol = benchmark.protocol
    protocol_dir = Path(config.protocol_dir) if config.protocol_dir else None
    sha256 = load_protocol(protocol, protocol_dir).sha256 if protocol else None
    provenance = {"seed": config.seed, "protocol": protocol, "protocol_sha256": sha256}

    store = Store(out, processes.rank, processes.world_size)
    settings = {**config.as_json(), "protocol_sha256": sha256}
    store.check(settings)  # looks only: the folder is taken for a run that can be
    former = _former_times(out / "summary.json")
    store.rows()  # read now, since a damaged file is better said before the work than after
    tokenizer, model_config = source.describe(config)
    setup = _setup(config, benchmark, model_config, tokenizer, variants)
    benchmark.check_methods([variant.method for variant in variants], setup)
    items = benchmark.items(setup)
    if not items:
        raise EvalError(f"{config.benchmark} has no samples for these settings")
    check_unique(items)
    model = source.load(config)
    check_patchable(model, variants)
    with _claimed(store, settings, processes):
        engine = Engine(model, tokenizer, config)
        started = time.perf_counter()
        share = items[processes.rank :: processes.world_size]
        for row in _missing_rows(engine, config, store, share, variants, on_row):
            store.append(row | engine.machine | provenance)
        seconds = time.perf_counter() - started
        processes.wait()
        summary: dict[str, Any] = {}
        if processes.is_main:
            rows = store.merge([_key(item, variant) for item in items for variant in variants])
            times = {"model_seconds": engine.model_seconds, "harness_seconds": seconds - engine.model_seconds}
            summary = {
                "config": config.as_json(),
                **engine.machine,
                **provenance,
                **_summed_times(former, times),
                "rows": len(rows),
                "errors": sum(row["error"] is not None for row in rows),
                "finished": len(rows) == len(items) * len(variants),
                "table": summarise(rows),
            }
            _write_summary(out / "summary.json", summary)
        processes.wait()
    return summary


def _write_summary(path: Path, summary: dict[str, Any]) -> None:
    try:
        write_json(path, summary)
    except OSError as error:
        raise EvalError(f"{path} cannot be written: {error}; the rows are kept") from error


def _missing_rows(
    engine: Engine,
    config: RunConfig,
    store: Store,
    items: Sequence[Item],
    variants: Sequence[Variant],
    on_row: Callable[[int, int, dict[str, Any] | None], None],
) -> Iterator[dict[str, Any]]:
    """Make the rows that are not there yet, or have an error, one after another."""
    done = {row_key(row) for row in store.rows() if row["error"] is None}
    todo = [(item, [variant for variant in variants if _key(item, variant) not in done]) for item in items]
    total = len(items) * len(variants)
    count = total - sum(len(missing) for _, missing in todo)
    on_row(count, total, None)
    for item, missing in todo:
        for variant, measured in _measure(engine, item, missing):
            row = _row(config, item, variant, measured)
            yield row
            count += 1
            on_row(count, total, row)


def _former_times(path: Path) -> dict[str, Any] | None:
    """Date and times of the run's earlier parts that came to an end; None where there are none."""
    if not path.exists():
        return None
    summary = read_json(path, "the summary of a run")
    date, times = summary.get("date"), {name: summary.get(name) for name in ("model_seconds", "harness_seconds")}
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EvalError(f"{path} is not the summary of a run: {name}={value!r} (without the file, the run goes on)")
    return {"date": date, **times}


def _summed_times(former: dict[str, Any] | None, times: dict[str, float]) -> dict[str, Any]:
    """Date and times of all parts of the run."""
    now: dict[str, Any] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **times}
    if former is None:
        return now
    if times["model_seconds"] == 0:  # nothing was left to do
        return former
    return now | {name: former[name] + value for name, value in times.items()}


def find_benchmark(config: RunConfig) -> Benchmark:
    """Return the benchmark, once its name, the tasks and its own settings are known to be right.

    Raises
    ------
    EvalError
        One of them is unknown.
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


def check_patchable(model: PreTrainedModel, variants: Sequence[Variant]) -> None:
    """Raise where the model cannot be patched with a method; the model is left as it was.

    Raises
    ------
    EvalError
        One of the methods does not go with the model.
    """
    for variant in variants:
        try:
            with sparse_attention(model, variant.method):
                pass
        except (TypeError, ValueError) as error:
            raise EvalError(f"method {variant.method.name!r} cannot be used: {error}") from error


def check_unique(items: Sequence[Item]) -> None:
    """Raise where two items would be one row.

    Raises
    ------
    EvalError
        Two items have the same task, length and sample id: the data has a row twice.
    """
    seen = set()
    for item in items:
        key = (item.task, item.length, item.sample_id)
        if key in seen:
            raise EvalError(f"sample {item.sample_id!r} of {item.task} is in the data twice")
        seen.add(key)


@contextmanager
def _claimed(store: Store, config: dict[str, Any], processes: Processes) -> Iterator[None]:
    error = None
    if processes.is_main:
        try:
            store.claim(config)
        except EvalError as raised:
            error = raised
    processes.agree(error)
    try:
        yield
    finally:
        if processes.is_main:
            store.release()


def _setup(
    config: RunConfig,
    benchmark: Benchmark,
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variants: Sequence[Variant],
) -> Setup:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if config.chat == "on" and not has_template:
        raise EvalError(f"chat='on', but the tokenizer of {config.model!r} has no chat template")
    positions = max_positions(model_config)
    if any(variant.method.extends_positions for variant in variants):
        positions = max(positions, 2 * max(config.lengths, default=0))
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


def _key(item: Item, variant: Variant) -> RowKey:
    return item.task, item.length, item.sample_id, variant.method.name, variant.token_budget


def _measure(engine: Engine, item: Item, variants: Sequence[Variant]) -> Iterator[tuple[Variant, dict[str, Any]]]:
    if not variants:
        return
    try:
        sample = item.build()
    except Exception as error:  # recorded in every row of the sample: one bad one does not end a run of many
        for variant in variants:
            yield variant, {"error": f"{type(error).__name__}: {error}"}
        return
    for variant, measured in engine.run(sample, variants):
        yield variant, {"sample": sample, **measured}


def _row(config: RunConfig, item: Item, variant: Variant, measured: dict[str, Any]) -> dict[str, Any]:
    measured = dict(measured)
    sample: Sample | None = measured.pop("sample", None)
    error = measured["error"]
    score = None
    if error is None and sample is not None and not sample.forced_ids:
        try:
            score = metrics.score(
                config.benchmark, item.task, measured["prediction"], sample.references, sample.all_classes
            )
        except Exception as raised:  # an answer that cannot be scored is that sample's error
            error = f"{type(raised).__name__}: {raised}"
    parameters = asdict(variant.method)
    return _recordable(
        {
            "benchmark": config.benchmark,
            "task": item.task,
            "sample_id": item.sample_id,
            "length": item.length,
            "depth": item.depth,
            "method": variant.method.name,
            "token_budget": variant.token_budget,
            "parameters": {name: value if _fits("", value) else repr(value) for name, value in parameters.items()},
            "question": config.question,
            "score": score,
            "references": None if sample is None else sample.references,
            **dict.fromkeys(MEASURED),
            **measured,
            "error": error,
        }
    )


def _recordable(row: dict[str, Any]) -> dict[str, Any]:
    """The row, or that of a failed sample where it holds what cannot be kept or read back: a perplexity of NaN, say."""
    unfit = {name: value for name, value in row.items() if not _fits(name, value)}
    if not unfit:
        return row
    named = ", ".join(f"{name}={value!r:.60}" for name, value in unfit.items())
    return {
        **row,
        **dict.fromkeys(unfit),
        "score": None,
        "error": row["error"] or f"ValueError: {named} cannot be kept",
    }


def _fits(name: str, value: Any) -> bool:
    try:
        encode_row({name: value})
        check_row({name: value}, required=())
    except (TypeError, ValueError):
        return False
    return True
