"""Timing of lossless decoding: sparse drafts that dense attention verifies, beside dense ``generate()``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import DENSE
from eval.costs import device_name, versions
from eval.errors import EvalError
from eval.lossless_config import LosslessConfig
from eval.lossless_runs import OUT_OF_MEMORY, Cell, compare_tokens, make_prompts, make_sides, start
from eval.speed import Progress, check_model, numbered, open_model, quartiles
from eval.speed_runs import forget_compiled, is_cuda
from hf_sparse_attn import SparseCache, SparseMethod

Keep = Callable[[dict[str, Any]], None]
COMPILED_VARIANTS = 256
"""Compiled steps that Dynamo may keep: one for each method and budget, more than its default of 8."""


def measure_lossless(
    config: LosslessConfig, on_progress: Progress | None = None, keep: Keep | None = None
) -> dict[str, Any]:
    """Load or build the model, and measure it; see :func:`measure_lossless_model`.

    Raises
    ------
    EvalError
        Unknown model or device; also see :func:`measure_lossless_model`.
    """
    model, tokenizer = open_model(config.speed)
    return measure_lossless_model(model, config, on_progress, keep, tokenizer)


def measure_lossless_model(
    model: PreTrainedModel,
    config: LosslessConfig,
    on_progress: Progress | None = None,
    keep: Keep | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, Any]:
    """Time a model's dense ``generate()``, and lossless decoding with each method, budget and length of draft.

    All runs start from the same cached context, so the prefill is not timed. The first run of each side is not timed
    either: its tokens are compared with those of the first dense side.

    Parameters
    ----------
    model : PreTrainedModel
        An unpatched model.
    config : LosslessConfig
        Settings. With ``shape``, the context is random keys and values; without, a prompt is prefilled once.
    on_progress : callable, optional
        See :data:`eval.speed.Progress`.
    keep : callable, optional
        Called with the report so far after each context.
    tokenizer : PreTrainedTokenizerBase, optional
        The tokenizer of the books; its special tokens are left out of random prompts.

    Returns
    -------
    dict
        The report as JSON values: ``machine``, ``settings``, ``prompts`` (a text) and ``results``, one entry for each
        context. An entry has ``error`` (None, or "out of memory"), ``fastest_dense``, a side's name, and ``sides``.

        A side has ``compiled``, ``error`` and ``tokens``, a list with an entry for each prompt: the number
        ``compared``, the number ``in_common`` before the first difference, and there ``gap``, ``roundings`` (see
        :func:`~eval.speed_check.logit_gap`) and ``is_tie``. Without an error it has ``ms_per_token``, median and
        quartiles over the runs of the mean time between tokens, ``speed_up``, the fastest dense side's median over its
        own, and ``graphs``, the graphs that Dynamo compiled in the ``first`` runs and in the ``timed`` ones.

        A lossless side also has ``draft_tokens``, ``acceptance_rate``, ``tokens_per_pass``, ``round_ms`` (drafts and
        one dense pass; median and quartiles) and ``kv_fraction`` and ``realised_budget`` of the drafts.

        In float32 and float64 a lossless side whose tokens differ without a tie is not timed: it ``is_wrong``, and has
        an error. ``speed_up`` is None if no dense side was timed.

    Raises
    ------
    EvalError
        The settings do not suit the model, or a book is missing or too short.
    """
    methods = config.methods()
    check_model(model, config.speed, methods)
    _check_forks(model, methods)
    names, prompts = make_prompts(model, config, tokenizer)
    sides = 3 + len(methods) * len(config.draft_tokens) * (2 if is_cuda(model) else 1)
    progress = numbered(on_progress, sides * (1 + config.repeats) * config.prompts * len(config.contexts))
    report: dict[str, Any] = {
        "machine": {
            "device": device_name(model.device),
            "versions": versions(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "data_dir": None if config.data_dir is None else config.data_dir.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        "prompts": names,
        "results": [],
    }
    with torch._dynamo.config.patch(recompile_limit=COMPILED_VARIANTS):
        for context in config.contexts:
            try:
                entry = _measure_context(model, config, context, methods, prompts, progress)
            except torch.OutOfMemoryError:
                entry = {"context": context, "error": OUT_OF_MEMORY, "fastest_dense": None, "sides": []}
            finally:
                forget_compiled(model)
                gc.collect()
            report["results"].append(entry)
            if keep is not None:
                keep(report)
    return report


def _measure_context(
    model: PreTrainedModel,
    config: LosslessConfig,
    context: int,
    methods: Sequence[SparseMethod],
    prompts: Sequence[torch.Tensor] | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    cells: dict[str, Cell] = {}
    for number in range(config.prompts):
        work = start(model, config, context, number, None if prompts is None else prompts[number])
        sides = {side.name: side for side in make_sides(work, config, methods)}
        for name, side in sides.items():
            cells.setdefault(name, Cell({**side.described(), "draft_tokens": side.draft_tokens}))
        where = f"{context:,} tokens, prompt {number + 1}"
        compare_tokens(work, config, sides, cells, number, progress)
        for repeat in range(config.repeats):
            first = repeat % len(sides)  # rotates the order of the sides
            names = list(sides)
            for name in names[first:] + names[:first]:
                progress(f"{where}, round {repeat + 1} of {config.repeats}: {name}")
                if cells[name].error is None:
                    run = cells[name].run(work, sides[name], config.new_tokens, "timed")
                    cells[name].runs += [] if run is None else [run]
        del work, sides, side  # frees memory before the next prompt's cache is allocated
    entries = [_entry(cell) for cell in cells.values()]
    return {"context": context, "error": None, "fastest_dense": _compare_times(entries), "sides": entries}


def _entry(cell: Cell) -> dict[str, Any]:
    entry = {**cell.described, "error": cell.error, "is_wrong": cell.is_wrong, "tokens": cell.tokens}
    if cell.error is not None:
        return entry
    entry |= {
        "ms_per_token": quartiles([sum(run.token_ms) / len(run.token_ms) for run in cell.runs]),
        "first_seconds": cell.first_seconds,
        "graphs": cell.graphs,
    }
    stats = [(run, run.speculation) for run in cell.runs if run.speculation is not None]
    if stats:
        rounds = sum(each.verifications for _, each in stats)
        drafted = sum(sum(each.drafted) for _, each in stats)
        entry |= {
            "acceptance_rate": sum(sum(each.accepted) for _, each in stats) / drafted,
            "tokens_per_pass": sum(each.generated - 1 for _, each in stats) / rounds,
            "round_ms": quartiles([sum(run.token_ms) / each.verifications for run, each in stats]),
            **cell.runs[-1].costs,
        }
    return entry


def _compare_times(entries: Sequence[dict[str, Any]]) -> str | None:
    """Add the speed-ups over the fastest dense side, and return its name; None if none was timed."""
    timed = [entry for entry in entries if entry["error"] is None]
    dense = [entry for entry in timed if entry["draft_tokens"] is None]
    fastest = min(dense, key=lambda entry: float(entry["ms_per_token"]["median"]), default=None)
    for entry in timed:
        own = entry["ms_per_token"]["median"]
        entry["speed_up"] = None if fastest is None else fastest["ms_per_token"]["median"] / own
    return None if fastest is None else str(fastest["name"])


def _check_forks(model: PreTrainedModel, methods: Sequence[SparseMethod]) -> None:
    """Raise if a method cannot start from a context that dense attention has cached."""
    cache = SparseCache(model.config, DENSE)
    if len(cache.sparse_layers) != len(cache.layers):
        raise EvalError("models with sliding windows are not supported: their windows cannot be shared by all sides")
    for method in methods:
        try:
            cache.fork(method)
        except ValueError as error:
            raise EvalError(str(error)) from error
