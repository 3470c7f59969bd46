"""The runs of one configuration of lossless decoding, its prompts, and the comparison with dense attention's tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.errors import EvalError
from eval.lossless_config import LosslessConfig
from eval.sources import books, read_book
from eval.speed_check import TIE_ROUNDINGS, logit_gap
from eval.speed_runs import FUSED, GRAPH, UNCOMPILED, Run, Side, Work, generate, is_cuda, random_ids, setting
from hf_sparse_attn import SparseMethod

OUT_OF_MEMORY = "out of memory"
LATE = "not measured: the time limit was reached before"


@dataclass
class Cell:
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


def start(
    model: PreTrainedModel, config: LosslessConfig, context: int, number: int, prompt: torch.Tensor | None
) -> Work:
    """Return a cached context and the token after it: random keys and values for a shape, else a prefilled prompt."""
    if prompt is None:
        return Work.start(model, replace(config.speed, seed=config.seed + number), context, ())
    return Work.prefill(model, prompt[:, : context + 1].to(model.device), config.new_tokens)


@dataclass
class Clock:
    """Tells whether a measurement has reached its limit; without one it never does."""

    limit_seconds: float | None
    started: float = field(default_factory=time.perf_counter)

    @property
    def is_late(self) -> bool:
        """Whether no further run may begin."""
        return self.limit_seconds is not None and time.perf_counter() - self.started >= self.limit_seconds


@dataclass
class SideRuns:
    """The runs of all sides over one prompt. The first dense side that fits in memory gives the tokens to compare."""

    work: Work
    config: LosslessConfig
    number: int
    clock: Clock
    progress: Callable[[str], None]
    reference: tuple[Side, list[list[int]]] | None = None

    def measure(self, side: Side, cell: Cell) -> None:
        """Compare the tokens of a first run, then time further ones. The limit spares no side its first timed run."""
        where = f"{self.work.context:,} tokens, prompt {self.number + 1}"
        self.progress(f"{where}, comparison: {side.name}")
        if cell.error is None and not cell.runs and self.clock.is_late:
            cell.error = LATE
        if cell.error is None and self.reference is None and side.method is not None:
            cell.error = "nothing to compare with: dense attention does not fit in memory"
        if cell.error is None and not self.clock.is_late:
            self._compare(side, cell)
        for repeat in range(self.config.repeats):
            self.progress(f"{where}, round {repeat + 1} of {self.config.repeats}: {side.name}")
            if cell.error is None and not (cell.runs and self.clock.is_late):
                run = cell.run(self.work, side, self.config.new_tokens, "timed")
                cell.runs += [] if run is None else [run]

    def _compare(self, side: Side, cell: Cell) -> None:
        work, config = self.work, self.config
        run = cell.run(work, side, config.new_tokens, "first")
        if run is None:
            return
        if self.number == 0:
            cell.first_seconds = run.seconds
        self.reference = self.reference or (side, run.token_ids)
        try:
            compared = _compared(work, *self.reference, run.token_ids)
        except torch.OutOfMemoryError:
            cell.error = OUT_OF_MEMORY
            return
        cell.tokens.append({"prompt": self.number, **compared})
        is_exact = work.model.dtype in (torch.float32, torch.float64)
        if side.method is not None and compared["is_tie"] is False and is_exact:
            cell.is_wrong = True
            cell.error = (
                f"token {compared['in_common'] + 1} of prompt {self.number + 1} is not dense attention's, whose logits "
                f"of both are {compared['gap']:.3g} apart"
            )


def _compared(work: Work, reference: Side, expected: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    pairs = zip(expected[0], found[0], strict=True)
    in_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    compared: dict[str, Any] = {"compared": len(expected[0]), "in_common": in_common}
    if in_common == len(expected[0]):
        return {**compared, "gap": None, "roundings": None, "is_tie": None}
    gap, roundings = logit_gap(work.model, work, reference, expected, 0, found[0][in_common], in_common)
    return {**compared, "gap": gap, "roundings": roundings, "is_tie": roundings <= TIE_ROUNDINGS}


def make_sides(work: Work, config: LosslessConfig, methods: Sequence[SparseMethod]) -> list[Side]:
    """Return the dense sides of ``eval speed``, each method with each length of draft, then the other sides.

    So a limit that cuts a measurement short leaves the fastest dense side to compare with. On CUDA a method runs as
    CUDA graphs without compilation before it is compiled. The others are, on CUDA, the methods as neither. All sides of
    a method share a cache, whose addresses compiled code relies on.
    """
    drafting: list[Side] = []
    uncompiled: list[Side] = []
    for method in methods:
        make_cache = work.kept(partial(work.new_cache, method))
        for draft_tokens in config.draft_tokens:
            side = Side(
                f"{method.name}, {setting(method)}, draft {draft_tokens}",
                method,
                make_cache,
                compiled=is_cuda(work.model),
                draft_tokens=draft_tokens,
            )
            if side.compiled:
                graph = replace(side, name=side.name + GRAPH, compiled=False, cuda_graph=True)
                drafting += [replace(graph, name=side.name + FUSED, fuse=True), graph]
            drafting.append(side)
            if side.compiled:
                uncompiled.append(replace(side, name=side.name + UNCOMPILED, compiled=False))
    return [*work.sides(()), *drafting, *uncompiled]


def side_count(drafts: int, on_cuda: bool) -> int:
    """Return how many sides :func:`make_sides` makes of so many pairs of a method and a length of draft."""
    return 3 + drafts * (4 if on_cuda else 1)


def make_prompts(
    model: PreTrainedModel, config: LosslessConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, list[torch.Tensor] | None]:
    """Return a description of the prompts, and their tokens, [1, longest context + 1] each; None with a shape.

    Raises
    ------
    EvalError
        There are too few books that are long enough.
    """
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
        if len(prompts) == config.prompts:
            break
        text = read_book(path)[: 16 * longest]  # English tokens average fewer than 16 characters
        token_ids = list(tokenizer(text)["input_ids"])[:longest]
        if len(token_ids) == longest:
            names.append(path.stem)
            prompts.append(torch.tensor([token_ids]))
    if len(prompts) < config.prompts:
        raise EvalError(
            f"prompts={config.prompts} with contexts={list(config.contexts)} needs as many books of {longest} tokens; "
            f"{config.data_dir} has {len(prompts)}"
        )
    return f"beginnings of books: {', '.join(names)}", prompts
