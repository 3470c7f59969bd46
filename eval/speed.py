"""How fast ``generate()`` is, dense and patched: time to first token and ms per token, in one run, round by round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from eval.config import DENSE, DTYPES, RunConfig
from eval.costs import device_name, versions
from eval.engine import make_variants
from eval.errors import EvalError
from eval.speed_runs import Run, Side, Work, check_covering, generate
from eval.speed_shapes import SHAPES, build_model
from eval.store import write_json
from hf_sparse_attn import SparseMethod, sparse_attention
from hf_sparse_attn.memory import PeakMemory
from hf_sparse_attn.models import ModelLoadError, load_model, resolve_device
from hf_sparse_attn.patch import max_positions

DYNAMIC, PREALLOCATED = "dense, DynamicCache", "dense, preallocated"


Progress = Callable[[str, int, int], None]
"""Called before each run with what it is, how many are done, and how many there are."""


@dataclass(frozen=True)
class SpeedConfig:
    """What is timed, and how.

    Parameters
    ----------
    model : str or None
        What ``hf_sparse_attn.models.load_model`` takes: real weights and a prompt that ``generate()`` prefills.
    shape : str or None
        A name in ``SHAPES``, in place of ``model``: random weights, and a cache that is filled without a prefill.
    contexts : tuple of int
        Tokens before the first new one.
    method, token_budget, parameters
        As in :class:`eval.config.RunConfig`; dense attention runs in any case.
    new_tokens : int
        Tokens that each run generates, at least 2.
    repeats : int
        Runs of each side that count.
    warmup : int
        Runs of each side before that, which do not; memory and tokens read are taken there. At least 1.
    dtype, device : str or None
        As in :class:`eval.config.RunConfig`.
    seed : int
        Of weights, cache and prompt.
    """

    model: str | None = None
    shape: str | None = None
    contexts: tuple[int, ...] = ()
    method: tuple[str, ...] = ("quest",)
    token_budget: tuple[int, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    new_tokens: int = 32
    repeats: int = 5
    warmup: int = 1
    dtype: str | None = None
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values that need no model.

        Raises
        ------
        EvalError
            A value is not allowed.
        """
        if (self.model is None) == (self.shape is None):
            raise EvalError(f"model={self.model!r}, shape={self.shape!r}: exactly one of the two must be given")
        if self.shape is not None and self.shape not in SHAPES:
            raise EvalError(f"shape={self.shape!r} is unknown; known: {', '.join(SHAPES)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise EvalError(f"dtype={self.dtype!r} is unknown; known: {', '.join(DTYPES)}")
        if not self.contexts:
            raise EvalError("contexts is empty: at least one number of tokens must be given")
        for name, least in (("contexts", 1), ("new_tokens", 2), ("repeats", 1), ("warmup", 1)):
            value = getattr(self, name)
            for entry in value if isinstance(value, tuple) else (value,):
                if isinstance(entry, bool) or not isinstance(entry, int) or entry < least:
                    raise EvalError(f"{name}={entry!r} is not allowed: a whole number, at least {least}")
        if len(set(self.contexts)) != len(self.contexts):
            raise EvalError(f"contexts={list(self.contexts)} has the same entry twice")
        self.methods()

    def methods(self) -> list[SparseMethod]:
        """Every method but dense attention, with every budget.

        Raises
        ------
        EvalError
            A method, a budget or a hyperparameter is not allowed.
        """
        run = RunConfig(
            benchmark="speed",
            model=self.model or self.shape or "",
            method=self.method,
            token_budget=self.token_budget,
            parameters=self.parameters,
        )
        return [variant.method for variant in make_variants(run) if not variant.is_dense]


def measure(config: SpeedConfig, on_progress: Progress | None = None) -> dict[str, Any]:
    """Load or build the model, and time it; see :func:`measure_model` for what is returned.

    Raises
    ------
    EvalError
        There is no such model or device, or what :func:`measure_model` raises.
    """
    special_ids: Collection[int] = ()
    try:
        device = resolve_device(config.device)
        dtype: torch.dtype = getattr(torch, config.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        if config.shape is not None:
            model = build_model(SHAPES[config.shape], dtype, device, config.seed)
        else:
            model, tokenizer = load_model(config.model or "", dtype, device)
            special_ids = tokenizer.all_special_ids
    except ModelLoadError as error:
        raise EvalError(str(error)) from error
    return measure_model(model, config, on_progress, special_ids)


def measure_model(
    model: PreTrainedModel,
    config: SpeedConfig,
    on_progress: Progress | None = None,
    special_ids: Collection[int] = (),
) -> dict[str, Any]:
    """Time a model's ``generate()``, dense and patched by turns; the model is left unpatched.

    Parameters
    ----------
    model : PreTrainedModel
        Not patched.
    config : SpeedConfig
        With ``shape``, the cache is filled with random keys and values; without, the prompt is prefilled.
    on_progress : callable, optional
        See ``Progress``.
    special_ids : collection of int
        Tokens that the random prompt leaves out.

    Returns
    -------
    dict
        As JSON has it: ``machine``, ``settings``, ``ttft_covers`` and ``memory_measures`` in words, and ``results``:
        one entry per context, with one of ``sides`` each for dense attention over Transformers' own cache and over a
        preallocated one, and for each method and budget. A side has ``ttft_ms`` and ``tpot_ms`` (medians and
        quartiles), ``kv_fraction``, ``realised_budget`` (tokens), ``peak_memory_bytes``; a patched one also ``ratio``:
        the better dense median over its own, and which dense side that was.

    Raises
    ------
    EvalError
        The model cannot be patched with a method or cannot hold a context, memory runs out, or a patched run is not
        what it should be: other tokens than dense attention's with a budget for everything, or nothing left out.
    """
    methods = config.methods()
    _check(model, config, methods)
    per_context = (2 + len(methods)) * (config.warmup + config.repeats) + len(methods)
    progress = _numbered(on_progress, per_context * len(config.contexts))
    results = []
    for context in config.contexts:
        try:
            work = Work.start(model, config, context, special_ids)
            results.append({"context": context, "sides": _measure_context(model, config, work, methods, progress)})
        except ImportError as error:  # what measures memory is optional
            raise EvalError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise EvalError(f"context={context} does not fit in the memory of {device_name(model.device)}") from error
    cached = config.shape is not None
    shared = "; the cache that all sides start from is counted in" if cached else ""
    return {
        "machine": {
            "device": device_name(model.device),
            **versions(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        "ttft_covers": "one token: the context is cached" if cached else "the prefill of the context and one token",
        "memory_measures": PeakMemory(model.device).measures + shared,
        "results": results,
    }


def speed_table(report: dict[str, Any]) -> Table:
    """Show a report of :func:`measure` as a table, with quartiles in parentheses."""
    settings, machine = report["settings"], report["machine"]
    table = Table(
        title=f"{escape(settings['model'] or settings['shape'])} ({settings['dtype']}, {machine['device']})",
        caption=f"Median (quartiles) of {settings['repeats']} runs of {settings['new_tokens']} tokens. TTFT covers "
        f"{report['ttft_covers']}. Speed-up: against the faster dense side. Memory: {report['memory_measures']}.",
    )
    table.add_column("context", justify="right")
    table.add_column("side")
    for heading in ("TTFT, ms", "ms per token", "speed-up", "KV read", "tokens read", "peak memory, MiB"):
        table.add_column(heading, justify="right")
    for result in report["results"]:
        for side in result["sides"]:
            table.add_row(
                f"{result['context']:,}",
                side["name"],
                *(f"{s['median']:.2f} ({s['q1']:.2f}-{s['q3']:.2f})" for s in (side["ttft_ms"], side["tpot_ms"])),
                f"{side['ratio']['tpot']:.2f}x" if side["ratio"] else "",
                f"{side['kv_fraction']:.1%}",
                f"{side['realised_budget']:,.0f}",
                f"{side['peak_memory_bytes'] / 2**20:,.0f}",
            )
        table.add_section()
    return table


def save(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON, into a folder that is made where it is missing.

    Raises
    ------
    EvalError
        The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, report)
    except OSError as error:
        raise EvalError(f"{path} cannot be written: {error}") from error


def _measure_context(
    model: PreTrainedModel,
    config: SpeedConfig,
    work: Work,
    methods: Sequence[SparseMethod],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    sides = [
        Side(DYNAMIC, None, work.new_dynamic_cache),
        Side(PREALLOCATED, None, partial(work.new_cache, DENSE)),
        *(Side(f"{made.name}, {made.token_budget}", made, partial(work.new_cache, made)) for made in methods),
    ]
    where = f"{work.context:,} tokens"
    probes: dict[str, tuple[Run, int]] = {}
    for _ in range(config.warmup):
        for side in sides:
            progress(f"{where}, warm-up: {side.name}")
            # Not around the runs that count: on a CPU, sampling takes its share of the time.
            with PeakMemory(model.device) as memory:
                run = generate(model, side, work, config.new_tokens)
            probes[side.name] = run, memory.peak_bytes
    for made in methods:
        progress(f"{where}, check: {made.name}, {made.token_budget}")
        check_covering(model, work, made, probes[PREALLOCATED][0].token_ids)

    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    for repeat in range(config.repeats):
        first = repeat % len(sides)  # no side always follows the same one
        for side in sides[first:] + sides[:first]:
            progress(f"{where}, round {repeat + 1} of {config.repeats}: {side.name}")
            runs[side.name].append(generate(model, side, work, config.new_tokens))
    return _entries(sides, runs, probes)


def _entries(
    sides: Sequence[Side], runs: dict[str, list[Run]], probes: dict[str, tuple[Run, int]]
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for side in sides:
        first_ms = [run.ttft_ms for run in runs[side.name]]
        probe, peak_bytes = probes[side.name]
        entry: dict[str, Any] = {
            "name": side.name,
            "method": DENSE if side.method is None else side.method.name,
            "token_budget": None if side.method is None else side.method.token_budget,
            "hyperparameters": {} if side.method is None else asdict(side.method),
            "ttft_ms": {**_quartiles(first_ms), "all": first_ms},
            "tpot_ms": _quartiles([ms for run in runs[side.name] for ms in run.token_ms]),
            **probe.costs,
            "peak_memory_bytes": peak_bytes,
            "ratio": None,
        }
        if side.method is not None:
            entry["ratio"] = _ratio(entry, entries[:2])
        entries.append(entry)
    return entries


def _ratio(patched: dict[str, Any], dense: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Dense over patched medians, for the better of the dense sides."""
    ratio: dict[str, Any] = {}
    for quantity in ("ttft", "tpot"):
        medians = {side["name"]: side[f"{quantity}_ms"]["median"] for side in dense}
        best = min(medians, key=medians.__getitem__)
        ratio |= {quantity: medians[best] / patched[f"{quantity}_ms"]["median"], f"{quantity}_against": best}
    return ratio


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "q1": q1, "q3": q3}


def _check(model: PreTrainedModel, config: SpeedConfig, methods: Sequence[SparseMethod]) -> None:
    """Raise what can be known before any run."""
    limit = max_positions(model.config)
    longest = max(config.contexts) + config.new_tokens
    if longest > limit:
        raise EvalError(
            f"contexts={list(config.contexts)} with new_tokens={config.new_tokens} needs {longest} positions; "
            f"the model has {limit}"
        )
    for method in methods:
        try:
            with sparse_attention(model, method):
                pass
        except (TypeError, ValueError) as error:
            raise EvalError(f"method={method.name!r}: {error}") from error


def _numbered(on_progress: Progress | None, total: int) -> Callable[[str], None]:
    done = iter(range(total))
    return lambda what: None if on_progress is None else on_progress(what, next(done), total)
