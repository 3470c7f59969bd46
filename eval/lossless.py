"""Timing of lossless decoding: sparse drafts that dense attention verifies, beside dense ``generate()``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import DENSE
from eval.costs import device_name, versions
from eval.errors import EvalError
from eval.lossless_config import LosslessConfig
from eval.sources import books, read_book
from eval.speed import Progress, check_model, numbered, open_model, quartiles
from eval.speed_check import TIE_ROUNDINGS, logit_gap
from eval.speed_runs import UNCOMPILED, Run, Side, Work, forget_compiled, generate, is_cuda, random_ids, setting
from hf_sparse_attn import SparseCache, SparseMethod

Keep = Callable[[dict[str, Any]], None]
OUT_OF_MEMORY = "out of memory"
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

        In float32 and float64 a side whose tokens differ without a tie is not timed: it ``is_wrong``, and has an error.

    Raises
    ------
    EvalError
        The settings do not suit the model, or a book is missing or too short.
    """
    methods = config.methods()
    check_model(model, config.speed, methods)
    _check_forks(model, methods)
    names, prompts = _prompts(model, config, tokenizer)
    per_prompt = len(_names(model, config, methods)) * (1 + config.repeats)
    progress = numbered(on_progress, per_prompt * config.prompts * len(config.contexts))
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


@dataclass
class _Cell:
    """The runs of one side over all prompts of a context."""

    described: dict[str, Any]
    tokens: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    first_seconds: float = 0.0
    graphs: dict[str, int] = field(default_factory=lambda: {"first": 0, "timed": 0})
    error: str | None = None
    is_wrong: bool = False

    def run(self, work: Work, side: Side, new_tokens: int, kind: str) -> Run | None:
        """Run once; None if memory runs out, which ends the measurement of the side."""
        graphs = counters["stats"]["unique_graphs"]
        try:
            run = generate(work.model, side, work, new_tokens)
        except torch.OutOfMemoryError:
            self.error = OUT_OF_MEMORY
            return None
        self.graphs[kind] += counters["stats"]["unique_graphs"] - graphs
        return run


def _measure_context(
    model: PreTrainedModel,
    config: LosslessConfig,
    context: int,
    methods: Sequence[SparseMethod],
    prompts: Sequence[torch.Tensor] | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    cells: dict[str, _Cell] = {}
    for number in range(config.prompts):
        work = _start(model, config, context, number, None if prompts is None else prompts[number])
        sides = {side.name: side for side in _sides(work, config, methods)}
        for name, side in sides.items():
            cells.setdefault(name, _Cell(_described(side)))
        where = f"{context:,} tokens, prompt {number + 1}"
        _compare_tokens(work, config, sides, cells, number, progress)
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


def _compare_tokens(
    work: Work,
    config: LosslessConfig,
    sides: dict[str, Side],
    cells: dict[str, _Cell],
    number: int,
    progress: Callable[[str], None],
) -> None:
    """Run every side once, and compare its tokens with those of the first dense side that fits in memory."""
    reference: tuple[Side, list[list[int]]] | None = None
    for name, side in sides.items():
        progress(f"{work.context:,} tokens, prompt {number + 1}, comparison: {name}")
        cell = cells[name]
        if cell.error is not None:
            continue
        if reference is None and side.method is not None:
            cell.error = "nothing to compare with: dense attention does not fit in memory"
            continue
        run = cell.run(work, side, config.new_tokens, "first")
        if run is None:
            continue
        if number == 0:
            cell.first_seconds = run.seconds
        reference = reference or (side, run.token_ids)
        try:
            compared = _compared(work, *reference, run.token_ids)
        except torch.OutOfMemoryError:
            cell.error = OUT_OF_MEMORY
            continue
        cell.tokens.append({"prompt": number, **compared})
        if compared["is_tie"] is False and work.model.dtype in (torch.float32, torch.float64):
            cell.is_wrong = True
            cell.error = (
                f"token {compared['in_common'] + 1} of prompt {number + 1} is not dense attention's, whose logits of "
                f"both are {compared['gap']:.3g} apart"
            )


def _compared(work: Work, reference: Side, expected: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    pairs = zip(expected[0], found[0], strict=True)
    in_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    compared: dict[str, Any] = {"compared": len(expected[0]), "in_common": in_common}
    if in_common == len(expected[0]):
        return {**compared, "gap": None, "roundings": None, "is_tie": None}
    gap, roundings = logit_gap(work.model, work, reference, expected, 0, found[0][in_common], in_common)
    return {**compared, "gap": gap, "roundings": roundings, "is_tie": roundings <= TIE_ROUNDINGS}


def _sides(work: Work, config: LosslessConfig, methods: Sequence[SparseMethod]) -> list[Side]:
    """Return the dense sides of ``eval speed``, then each method with each length of draft, compiled and not on CUDA.

    All sides of a method share a cache, whose addresses compiled code relies on.
    """
    sides = work.sides(())
    for method in methods:
        make_cache = work.kept(partial(work.new_cache, method))
        for draft_tokens in config.draft_tokens:
            name = f"{method.name}, {setting(method)}, draft {draft_tokens}"
            if is_cuda(work.model):
                sides.append(Side(name, method, make_cache, compiled=True, draft_tokens=draft_tokens))
                name += UNCOMPILED
            sides.append(Side(name, method, make_cache, draft_tokens=draft_tokens))
    return sides


def _names(model: PreTrainedModel, config: LosslessConfig, methods: Sequence[SparseMethod]) -> list[str]:
    nothing = torch.empty(1, 0, dtype=torch.long)
    return [side.name for side in _sides(Work(model, 0, 0, nothing, None), config, methods)]


def _start(
    model: PreTrainedModel, config: LosslessConfig, context: int, number: int, prompt: torch.Tensor | None
) -> Work:
    """Return a cached context and the token after it: random keys and values for a shape, else a prefilled prompt."""
    speed = config.speed
    speed = type(speed)(**{**vars(speed), "seed": config.seed + number})
    if prompt is None:
        return Work.start(model, speed, context, ())
    return Work.prefill(model, prompt[:, : context + 1].to(model.device), config.new_tokens)


def _described(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "method": DENSE if side.method is None else side.method.name,
        "token_budget": None if side.method is None else side.method.token_budget,
        "hyperparameters": {} if side.method is None else asdict(side.method),
        "draft_tokens": side.draft_tokens,
        "compiled": side.compiled,
    }


def _entry(cell: _Cell) -> dict[str, Any]:
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
    if not dense:
        return None
    fastest = min(dense, key=lambda entry: float(entry["ms_per_token"]["median"]))
    for entry in timed:
        entry["speed_up"] = fastest["ms_per_token"]["median"] / entry["ms_per_token"]["median"]
    return str(fastest["name"])


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


def _prompts(
    model: PreTrainedModel, config: LosslessConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, list[torch.Tensor] | None]:
    """Return a description of the prompts, and their tokens, [1, longest context + 1]; None with a shape."""
    if config.shape is not None:
        return "random keys and values", None
    longest = max(config.contexts) + 1
    special_ids = () if tokenizer is None else tokenizer.all_special_ids
    if config.data_dir is None:
        seeds = range(config.seed, config.seed + config.prompts)
        return "random tokens", [random_ids(model, (1, longest), special_ids, seed) for seed in seeds]
    if tokenizer is None:
        raise EvalError(f"data_dir={str(config.data_dir)!r} needs a tokenizer")
    names: list[str] = []
    prompts: list[torch.Tensor] = []
    for path in books(config.data_dir):
        text = read_book(path)[: 16 * longest]  # English tokens average fewer than 16 characters
        token_ids = list(tokenizer(text)["input_ids"])[:longest]
        if len(token_ids) == longest and len(prompts) < config.prompts:
            names.append(path.stem)
            prompts.append(torch.tensor([token_ids]))
    if len(prompts) < config.prompts:
        raise EvalError(
            f"prompts={config.prompts} with contexts={list(config.contexts)} needs as many books of {longest} tokens; "
            f"{config.data_dir} has {len(prompts)}"
        )
    return f"beginnings of books: {', '.join(names)}", prompts
