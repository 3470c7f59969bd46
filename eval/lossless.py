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
from eval.lossless_runs import OUT_OF_MEMORY, Cell, Clock, SideRuns, make_prompts, make_sides, side_count, start
from eval.speed import Progress, check_model, name_of, numbered, open_model, quartiles
from eval.speed_runs import forget_compiled, is_cuda
from eval.yarn import Yarn
from hf_sparse_attn import SparseCache, SparseMethod, SpeculationStats

Keep = Callable[[dict[str, Any], int, dict[str, Any]], None]
"""Called after each side with the report so far, the context, and the side's entry in it."""
COMPILED_VARIANTS = 256
"""Compiled steps that Dynamo may keep: one for each method and budget, more than its default of 8."""


def measure_lossless(
    config: LosslessConfig, on_progress: Progress | None = None, keep: Keep | None = None
) -> dict[str, Any]:
    """Load or build the model, and measure it; see :func:`measure_lossless_model`.

    Raises
    ------
    EvalError
        Unknown model or device, or a RoPE that YaRN cannot extend; also see :func:`measure_lossless_model`.
    """
    if config.data_dir is not None and not config.data_dir.is_dir():
        raise EvalError(f"data_dir={str(config.data_dir)!r} is not a folder")
    model, tokenizer = open_model(config.speed)
    if config.yarn is not None:
        Yarn(config.yarn).apply(model)
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
    either: its tokens are compared with those of the first dense side. With random weights (``shape``) only the costs
    of drafts and dense passes are measured: how many drafts are kept says nothing about text there.

    Parameters
    ----------
    model : PreTrainedModel
        An unpatched model.
    config : LosslessConfig
        Settings. With ``shape``, the context is random keys and values; without, a prompt is prefilled once.
    on_progress : callable, optional
        See :data:`eval.speed.Progress`.
    keep : callable, optional
        See :data:`Keep`.
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
        one dense pass), ``draft_step_ms`` and ``verification_ms`` (both parts; median and quartiles over the rounds
        with a whole draft), ``break_even_tokens`` (tokens per pass that give the fastest dense side's speed), and
        ``kv_fraction`` and ``realised_budget`` of the drafts. With ``shape``, ``ms_per_token``, ``speed_up``,
        ``acceptance_rate`` and ``tokens_per_pass`` of a lossless side are None.

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
    sides = side_count(len(methods) * len(config.draft_tokens), is_cuda(model))
    progress = numbered(on_progress, sides * (1 + config.repeats) * config.prompts * len(config.contexts))
    report: dict[str, Any] = {
        "machine": {
            "device": device_name(model.device),
            "versions": versions(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "model": name_of(config.model),
            "data_dir": None if config.data_dir is None else config.data_dir.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        "prompts": names,
        "results": [],
    }
    clock = Clock(config.limit_seconds)
    # Each size of Transformers' static cache is compiled as such, not as a dynamic shape, which is slower. The sparse
    # methods' steps serve every size, and are compiled once for all contexts.
    with torch._dynamo.config.patch(recompile_limit=COMPILED_VARIANTS, automatic_dynamic_shapes=False):
        try:
            for context in config.contexts:
                entry: dict[str, Any] = {"context": context, "error": None, "fastest_dense": None, "sides": []}
                report["results"].append(entry)

                def keep_side(side: dict[str, Any], context: int = context) -> None:
                    if keep is not None:
                        keep(report, context, side)

                try:
                    _measure_context(model, config, methods, prompts, progress, entry, clock, keep_side)
                except torch.OutOfMemoryError:
                    entry.update(error=OUT_OF_MEMORY, fastest_dense=None, sides=[])
                gc.collect()
        finally:
            forget_compiled(model)
    return report


def _measure_context(
    model: PreTrainedModel,
    config: LosslessConfig,
    methods: Sequence[SparseMethod],
    prompts: Sequence[torch.Tensor] | None,
    progress: Callable[[str], None],
    entry: dict[str, Any],
    clock: Clock,
    keep_side: Callable[[dict[str, Any]], None],
) -> None:
    """Measure every side from one context, and write what is known to ``entry`` after each of them."""
    cells: dict[str, Cell] = {}
    for number in range(config.prompts):
        work = start(model, config, entry["context"], number, None if prompts is None else prompts[number])
        runs = SideRuns(work, config, number, clock, progress)
        for side in make_sides(work, config, methods):
            cell = cells.setdefault(side.name, Cell({**side.described(), "draft_tokens": side.draft_tokens}))
            runs.measure(side, cell)
            entry["sides"] = [_entry(each, config) for each in cells.values()]
            entry["fastest_dense"] = _compare_times(entry["sides"])
            keep_side(entry["sides"][list(cells).index(side.name)])
        del work, runs, side  # frees memory before the next prompt's cache is allocated


def _entry(cell: Cell, config: LosslessConfig) -> dict[str, Any]:
    entry = {**cell.described, "error": cell.error, "is_wrong": cell.is_wrong, "tokens": cell.tokens}
    if cell.error is not None:
        return entry
    entry |= {
        "ms_per_token": quartiles([sum(run.token_ms) / len(run.token_ms) for run in cell.runs]),
        "first_seconds": cell.first_seconds,
        "graphs": cell.graphs,
    }
    stats = [run.speculation for run in cell.runs if run.speculation is not None]
    if not stats:
        return entry
    entry |= {
        "acceptance_rate": sum(sum(each.accepted) for each in stats) / sum(sum(each.drafted) for each in stats),
        "tokens_per_pass": sum(each.generated - 1 for each in stats) / sum(each.verifications for each in stats),
        **_round_times(stats, cell.described["draft_tokens"]),
        **cell.runs[-1].costs,
    }
    if config.shape is not None:
        entry |= dict.fromkeys(("ms_per_token", "acceptance_rate", "tokens_per_pass"))
    return entry


def _round_times(stats: Sequence[SpeculationStats], draft_tokens: int) -> dict[str, dict[str, float]]:
    """Return the times of a round and of its parts, over the rounds with a whole draft; over all if none is."""
    rounds = [
        (drafted, draft * 1e3, verification * 1e3)
        for each in stats
        for drafted, draft, verification in zip(
            each.drafted, each.draft_seconds, each.verification_seconds, strict=True
        )
    ]
    whole = [each for each in rounds if each[0] == draft_tokens] or rounds
    return {
        "round_ms": quartiles([draft + verification for _, draft, verification in whole]),
        "draft_step_ms": quartiles([draft / max(1, drafted) for drafted, draft, _ in whole]),
        "verification_ms": quartiles([verification for *_, verification in whole]),
    }


def _compare_times(entries: Sequence[dict[str, Any]]) -> str | None:
    """Add what compares a side with the fastest dense side, and return its name; None if none was timed."""
    timed = [entry for entry in entries if entry["error"] is None]
    dense = [entry for entry in timed if entry["draft_tokens"] is None]
    fastest = min(dense, key=lambda entry: float(entry["ms_per_token"]["median"]), default=None)
    dense_ms = None if fastest is None else fastest["ms_per_token"]["median"]
    for entry in timed:
        own = entry["ms_per_token"]
        entry["speed_up"] = None if dense_ms is None or own is None else dense_ms / own["median"]
        if entry["draft_tokens"] is not None:
            entry["break_even_tokens"] = None if dense_ms is None else entry["round_ms"]["median"] / dense_ms
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
