"""Timing of ``generate()``, dense and patched: time to first token and ms per token, in one run, round by round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import DENSE
from eval.costs import device_name, versions
from eval.errors import EvalError
from eval.processes import Processes
from eval.speed_check import check_if_it_fits
from eval.speed_config import SpeedConfig
from eval.speed_runs import (
    AHEAD,
    AHEAD_FUSED,
    DYNAMIC,
    FUSED,
    GRAPH,
    PREALLOCATED,
    STATIC,
    UNCOMPILED,
    Run,
    Side,
    Work,
    forget_compiled,
    generate,
    is_cuda,
)
from eval.speed_shapes import SHAPES, build_model
from eval.speed_table import speed_table
from eval.split import Split, exchange, load_split
from eval.store import write_json
from hf_sparse_attn import SparseMethod, sparse_attention
from hf_sparse_attn.cli.memory import PeakMemory
from hf_sparse_attn.patch.generation import is_split_by_layers
from hf_sparse_attn.rope import max_positions

__all__ = ["Progress", "SpeedConfig", "measure", "measure_model", "save", "speed_table"]

Progress = Callable[[str, int, int], None]
"""Function called before each run with its description, and the numbers of runs done and in total."""
Keep = Callable[[dict[str, Any]], None]
"""Function called after each round with the report so far."""


def measure(config: SpeedConfig, on_progress: Progress | None = None, keep: Keep | None = None) -> dict[str, Any]:
    """Load or build the model, and time it; see :func:`measure_model` for the returned report.

    Raises
    ------
    EvalError
        Unknown model or device; also see :func:`measure_model`.
    """
    model, tokenizer = open_model(config)
    return measure_model(model, config, on_progress, () if tokenizer is None else tokenizer.all_special_ids, keep)


def open_model(config: SpeedConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load the model with its tokenizer, or build the shape, which has none.

    Raises
    ------
    EvalError
        Unknown model or device.
    """
    # Imports packages needed only to fetch models.
    from hf_sparse_attn.cli.models import ModelLoadError, load_model, resolve_device

    try:
        device = resolve_device(config.device)
        dtype: torch.dtype = getattr(torch, config.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        if config.shape is not None:
            return build_model(SHAPES[config.shape], dtype, device, config.seed, Split(config.split)), None
        if config.split != Split.NONE:
            return load_split(config.model or "", dtype, Split(config.split))
        return load_model(config.model or "", dtype, device)
    except ModelLoadError as error:
        raise EvalError(str(error)) from error


def measure_model(
    model: PreTrainedModel,
    config: SpeedConfig,
    on_progress: Progress | None = None,
    special_ids: Collection[int] = (),
    keep: Keep | None = None,
) -> dict[str, Any]:
    """Time a model's ``generate()``, dense and patched in turn, and leave the model unpatched.

    Parameters
    ----------
    model : PreTrainedModel
        An unpatched model.
    config : SpeedConfig
        Settings. With ``shape``, the cache is filled with random keys and values; without, the prompt is prefilled.
    on_progress : callable, optional
        See ``Progress``.
    special_ids : collection of int
        Tokens that the random prompt leaves out.
    keep : callable, optional
        See ``Keep``.

    Returns
    -------
    dict
        The report as JSON values: ``machine``, ``settings``, ``ttft_covers`` and ``memory_measures`` (texts), and
        ``results``, with one entry per context.

        An entry has ``weights_and_kv_bytes``, ``checked`` (see :func:`check_if_it_fits`), ``rounds`` (those measured so
        far), ``sides``, and ``skipped``: with ``kv_storage="host"``, the names of the sides that do not fit on the
        device. Dense attention has three sides: over Transformers' dynamic cache, a preallocated one, and Transformers'
        static one. Each method and budget has one side, on CUDA six: compiled, the same with
        :class:`~hf_sparse_attn.DecodeAhead`, with ``DecodeAhead(fuse=True)``, with ``DecodeAhead(cuda_graph=True)``,
        with ``fuse=True`` too, and not compiled; ``config.ways`` can leave some out. Of a model that is split over GPUs
        none is compiled. With ``kv_storage="host"`` it has one more.

        A side has ``tokens`` (the first row's new ones), ``compiled``, ``ttft_ms`` and ``tpot_ms`` (medians and
        quartiles), ``kv_fraction``, ``realised_budget`` (tokens), ``traffic`` (see
        :func:`~eval.costs.traffic_per_step`) and ``peak_memory_bytes``.
        ``first_run_extra_seconds`` is the time by which its first run exceeds the median of its later ones: of a
        compiled side, compilation and the first recordings; of one with ``fuse=True``, compilation of the fused parts;
        of any other, what is set up once in a process, such as kernels that no side before has used. The recording that
        each call makes anew with ``cuda_graph=True`` is in all runs, not in the difference. ``compile_seconds`` is the
        same for compiled sides, None for others. ``memory_ratio``, on CUDA, is peak memory over weights and dense K
        and V. ``ratio``, of a patched side, is the best dense median over its own, with that dense side's name; None if
        no dense side fits. ``tokens_in_common``, of a compiled patched side, counts the first tokens equal to the
        uncompiled ones
        (roundings differ).

    Raises
    ------
    EvalError
        The model cannot be patched with a method or does not support a context, or memory runs out. Or a patched run is
        wrong: it differs from dense attention although the budget covers everything, or reads as much.
    """
    methods = config.methods()
    check_model(model, config, methods)
    progress: Callable[[str], None] | None = None
    results: list[dict[str, Any]] = []

    def keep_round(entry: dict[str, Any]) -> None:
        if keep is not None:
            keep(_report(model, config, [*results, entry]))

    for context in config.contexts:
        work: Work | None = None
        try:
            work = Work.start(model, config, context, special_ids)
            if progress is None:
                runs = len(work.sides(methods, config.ways)) * (config.warmup + config.repeats) + len(methods)
                progress = numbered(on_progress, runs * len(config.contexts))
            results.append(_measure_context(model, config, work, methods, progress, keep_round))
        except ImportError as error:  # the package that measures memory is optional
            raise EvalError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise EvalError(f"context={context} does not fit in the memory of {device_name(model.device)}") from error
        finally:
            work = None  # frees memory before the next context's cache is allocated
            forget_compiled(model)
    return _report(model, config, results)


def _report(model: PreTrainedModel, config: SpeedConfig, results: list[dict[str, Any]]) -> dict[str, Any]:
    cached = config.shape is not None
    first = "" if config.split == Split.NONE else ", of the first GPU"
    where = " on the device" if config.kv_storage == "host" else ""
    shared = f"; the cache that all sides{where} start from is counted in" if cached else ""
    return {
        "machine": {
            "device": device_name(model.device),
            "devices": torch.cuda.device_count() if config.split == Split.LAYERS else Processes.started().world_size,
            "exchange": exchange() if config.split == Split.HEADS else None,
            **versions(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "model": name_of(config.model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        "ttft_covers": "one token: the context is cached" if cached else "the prefill of the context and one token",
        "memory_measures": PeakMemory(model.device).measures + first + shared,
        "results": results,
    }


def name_of(model: str | None) -> str | None:
    """Return a model's name for a report: that of a file or a folder without its place on the machine."""
    return Path(model).name if model is not None and Path(model).exists() else model


def save(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON, and create its folder if it is missing.

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


@dataclass
class _Probe:
    """The results of a side's warm-up runs."""

    first_seconds: float
    last: Run
    peak_bytes: int


def _measure_context(
    model: PreTrainedModel,
    config: SpeedConfig,
    work: Work,
    methods: Sequence[SparseMethod],
    progress: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure all sides from one context, and pass the entry on after each round."""
    sides = work.sides(methods, config.ways)
    where = f"{work.context:,} tokens"
    probes, skipped = _warm_up(model, config, work, sides, lambda name: progress(f"{where}, warm-up: {name}"))
    dense_ids = next((probes[name].last.token_ids for name in (PREALLOCATED, STATIC, DYNAMIC) if name in probes), None)
    checked = []
    for method in methods:
        progress(f"{where}, check: {method.name}, {method.token_budget}")
        checked.append(check_if_it_fits(model, work, method, dense_ids, sides))
    sides = [side for side in sides if side.name in probes]

    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    entry: dict[str, Any] = {}
    for repeat in range(config.repeats):
        first = repeat % len(sides)  # rotates the order of the sides
        for side in sides[first:] + sides[:first]:
            progress(f"{where}, round {repeat + 1} of {config.repeats}: {side.name}")
            runs[side.name].append(generate(model, side, work, config.new_tokens))
        entry = {
            "context": work.context,
            "weights_and_kv_bytes": work.weights_and_kv_bytes,
            "checked": checked,
            "rounds": repeat + 1,
            "skipped": skipped,
            "sides": _entries(sides, runs, probes, work),
        }
        keep(entry)
    return entry


def _warm_up(
    model: PreTrainedModel, config: SpeedConfig, work: Work, sides: Sequence[Side], say: Callable[[str], None]
) -> tuple[dict[str, _Probe], list[str]]:
    """Run each side without timing it; return the results, and the names of the sides that ran out of memory.

    Sides in host memory are the first, before the context is on the device. Without any, all sides must fit.
    """
    probes: dict[str, _Probe] = {}
    skipped: list[str] = []
    for _ in range(config.warmup):
        for side in sorted(sides, key=lambda side: side.kv_storage == "device"):
            if side.name in skipped:
                continue
            say(side.name)
            try:
                work.prepare(side)
                # Not around timed runs: on a CPU, sampling memory takes time.
                with PeakMemory(model.device) as memory:
                    run = generate(model, side, work, config.new_tokens)
            except torch.OutOfMemoryError:
                if work.kv_storage == "device" or side.kv_storage == "host":
                    raise
                skipped.append(side.name)
                probes.pop(side.name, None)
                continue
            first_seconds = probes[side.name].first_seconds if side.name in probes else run.seconds
            probes[side.name] = _Probe(first_seconds, run, memory.peak_bytes)
    return probes, skipped


def _entries(
    sides: Sequence[Side], runs: dict[str, list[Run]], probes: dict[str, _Probe], work: Work
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    # Elsewhere memory is the whole process's, including interpreter and libraries, or that of the first GPU.
    has_ratio = is_cuda(work.model) and not is_split_by_layers(work.model)
    for side in sides:
        first_ms = [run.ttft_ms for run in runs[side.name]]
        probe = probes[side.name]
        extra_seconds = max(0.0, probe.first_seconds - median(run.seconds for run in runs[side.name]))
        copied_bytes = work.kv_bytes if side.copies_cache else 0
        entry: dict[str, Any] = {
            **side.described(),
            "tokens": probe.last.token_ids[0],
            "compile_seconds": extra_seconds if side.compiled else None,
            "first_run_extra_seconds": extra_seconds,
            "ttft_ms": {**quartiles(first_ms), "all": first_ms},
            "tpot_ms": quartiles([ms for run in runs[side.name] for ms in run.token_ms]),
            **probe.last.costs,
            "traffic": probe.last.traffic,
            "peak_memory_bytes": probe.peak_bytes,
            "tokens_in_common": _tokens_in_common(side, probes),
            "memory_ratio": (probe.peak_bytes - copied_bytes) / work.weights_and_kv_bytes if has_ratio else None,
            "ratio": None,
        }
        if side.method is not None:
            entry["ratio"] = _ratio(entry, [dense for dense in entries if dense["method"] == DENSE])
        entries.append(entry)
    return entries


def _tokens_in_common(side: Side, probes: Mapping[str, _Probe]) -> int | None:
    name = side.name
    for way in (AHEAD, AHEAD_FUSED, GRAPH, FUSED):
        name = name.removesuffix(way)
    uncompiled = probes.get(name + UNCOMPILED)
    if uncompiled is None:
        return None
    pairs = zip(probes[side.name].last.token_ids[0], uncompiled.last.token_ids[0], strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _ratio(patched: dict[str, Any], dense: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the dense medians over the patched ones, for the best of the dense sides; None without any."""
    if not dense:
        return None
    ratio: dict[str, Any] = {}
    for quantity in ("ttft", "tpot"):
        medians = {side["name"]: side[f"{quantity}_ms"]["median"] for side in dense}
        best = min(medians, key=medians.__getitem__)
        ratio |= {quantity: medians[best] / patched[f"{quantity}_ms"]["median"], f"{quantity}_against": best}
    return ratio


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and both quartiles."""
    q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "q1": q1, "q3": q3}


def check_model(model: PreTrainedModel, config: SpeedConfig, methods: Sequence[SparseMethod]) -> None:
    """Raise errors that can be found before any run."""
    for method in methods:
        try:
            with sparse_attention(model, method):
                pass
        except (TypeError, ValueError) as error:
            raise EvalError(f"method={method.name!r}: {error}") from error
    limit = max_positions(model.config)
    longest = max(config.contexts) + config.new_tokens
    if longest > limit:
        raise EvalError(
            f"contexts={list(config.contexts)} with new_tokens={config.new_tokens} needs {longest} positions; "
            f"the model has {limit}"
        )


def numbered(on_progress: Progress | None, total: int) -> Callable[[str], None]:
    """Return a function that is called before each run with its description, and counts the runs."""
    done = iter(range(total))
    return lambda what: None if on_progress is None else on_progress(what, next(done), total)
