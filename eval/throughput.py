"""Throughput of batched decoding: requests with Poisson arrivals, dense and with each method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.config import DENSE
from eval.costs import device_name, versions
from eval.errors import EvalError
from eval.serving import arrivals, serve
from eval.speed_check import check_if_it_fits
from eval.speed_config import SpeedConfig
from eval.speed_runs import UNCOMPILED, Run, Side, Work, forget_compiled, generate
from eval.speed_shapes import SHAPES, build_model
from hf_sparse_attn import SparseMethod
from hf_sparse_attn.cli.memory import PeakMemory
from hf_sparse_attn.rope import max_positions

Say = Callable[[str], None]


@dataclass(frozen=True)
class ThroughputConfig:
    """The settings of a measurement.

    Parameters
    ----------
    shape : str
        A name in ``SHAPES``: an architecture with random weights, and a cache filled without a prefill.
    context : int
        Tokens of each request's prompt.
    batch : int
        The most requests that are decoded together.
    method, token_budget, parameters
        As in :class:`eval.config.RunConfig`; dense attention always runs too.
    new_tokens : int
        Tokens of each answer, at least 2.
    requests : int or None
        Number of requests; None for four full batches.
    rate : float or None
        Mean requests per second of the Poisson process; None for saturation: all requests are there from the start.
    dtype, device : str or None
        As in :class:`eval.config.RunConfig`.
    seed : int
        Seed of weights, cache, prompts and arrivals.
    kv_storage : str
        As in :class:`eval.speed_config.SpeedConfig`.
    """

    shape: str
    context: int
    batch: int = 8
    method: tuple[str, ...] = ("quest",)
    token_budget: tuple[int, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    new_tokens: int = 64
    requests: int | None = None
    rate: float | None = None
    dtype: str | None = None
    device: str | None = None
    seed: int = 0
    kv_storage: str = "device"

    def __post_init__(self) -> None:
        """Check the values that need no model.

        Raises
        ------
        EvalError
            A value is not allowed.
        """
        for name in ("batch", "requests"):
            value = getattr(self, name)
            if value is None and name == "requests":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise EvalError(f"{name}={value!r} is not allowed: a whole number, at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise EvalError(f"rate={self.rate!r} is not allowed: requests per second, above 0")
        self.speed.methods()

    @property
    def speed(self) -> SpeedConfig:
        """The settings of one call of ``generate()``, checked."""
        return SpeedConfig(
            shape=self.shape,
            contexts=(self.context,),
            method=self.method,
            token_budget=self.token_budget,
            parameters=self.parameters,
            new_tokens=self.new_tokens,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            kv_storage=self.kv_storage,
        )


def measure_throughput(config: ThroughputConfig, say: Say) -> dict[str, Any]:
    """Serve the same requests with dense attention over each stock cache and with each method.

    Requests are decoded in static batches, grouped as they arrive: a batch begins when the last one has ended, with the
    requests that wait. Transformers' continuous batching has a paged cache of its own, which no method can use. Every
    batch has all its rows, so that the shapes, and compiled code, stay the same; unused rows count for nothing. The
    context's keys and values are random, so the prefill is neither run nor counted.

    Parameters
    ----------
    config : ThroughputConfig
        Settings.
    say : callable
        Called with a description before each part.

    Returns
    -------
    dict
        The report as JSON values: ``machine``, ``settings``, ``checked`` (see :func:`check_if_it_fits`),
        ``best_dense``, the name of the dense side with the most tokens per second, or None if none fits, and ``sides``.
        A side has the figures of :meth:`~eval.serving.Served.figures`, ``kv_fraction``, ``realised_budget``,
        ``peak_memory_bytes``, ``compiled`` and ``first_seconds`` (its first call, which compiles); a patched one has
        ``ratio``, its tokens per second over the best dense side's. A side that ran out of memory has ``error`` alone.
        Methods in host memory run first, before the context is on the device.

    Raises
    ------
    EvalError
        The settings do not suit the model; no dense side fits in memory, and ``kv_storage`` is not ``"host"``; or a
        method's first tokens, with a setting that reads everything, differ from dense attention's.
    """
    from hf_sparse_attn.cli.models import resolve_device  # imports packages needed only to fetch models

    device = resolve_device(config.device)
    dtype: torch.dtype = getattr(torch, config.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = build_model(SHAPES[config.shape], dtype, device, config.seed)
    most = max_positions(model.config)
    if config.context + config.new_tokens > most:
        raise EvalError(
            f"context={config.context} with new_tokens={config.new_tokens} needs {config.context + config.new_tokens} "
            f"positions; the shape has {most}"
        )
    methods = config.speed.methods()
    try:
        sides, checked = _measure_sides(model, config, methods, say)
    finally:
        forget_compiled(model)
    return {
        "machine": {
            "device": device_name(device),
            "versions": versions(),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "requests": _requests(config),
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
        },
        "memory_measures": PeakMemory(device).measures,
        "checked": checked,
        "best_dense": _compare(sides),
        "sides": sides,
    }


def _measure_sides(
    model: PreTrainedModel, config: ThroughputConfig, methods: Sequence[SparseMethod], say: Say
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    work = Work.start(model, config.speed, config.context, (), config.batch)
    arrived = arrivals(_requests(config), config.rate, config.seed)
    entries: dict[str, dict[str, Any]] = {}
    dense_ids: list[list[int]] | None = None
    checks: dict[SparseMethod, dict[str, Any]] = {}
    sides = list(_sides(work, methods))
    for side in sorted(sides, key=lambda side: side.kv_storage == "device"):  # host memory before the device is filled
        if side.method is not None and dense_ids is None and config.kv_storage == "device":
            raise EvalError(f"batch={config.batch}: no dense side fits in the memory of {device_name(model.device)}")
        try:
            work.prepare(side)
            if side.method is not None and side.kv_storage == "device" and side.method not in checks:
                say(f"check: {side.name}")
                checks[side.method] = check_if_it_fits(model, work, side.method, dense_ids, sides)
            say(side.name)
            entry, warm = _serve(side, work, arrived, config)
        except torch.OutOfMemoryError:
            entry, warm = {"error": "out of memory"}, None
        if side.method is None and warm is not None:
            dense_ids = warm.token_ids
        entries[side.name] = {**side.described(), "kv_storage": side.kv_storage, "error": None} | entry
    if config.kv_storage == "host":  # methods of which no side fits on the device
        missing = [method for method in methods if method not in checks]
        checks |= {method: check_if_it_fits(model, work, method, None, sides) for method in missing}
    return [entries[side.name] for side in sides], list(checks.values())


def _sides(work: Work, methods: Sequence[SparseMethod]) -> Iterator[Side]:
    """Yield dense attention over each cache, then each method, compiled where ``generate()`` compiles.

    An offloaded method comes after the same method on the device, compiled and not, since it is never compiled itself.
    """
    offloaded = {method.resident for method in methods if method.offloading is not None}
    both = dict.fromkeys(each for method in methods for each in (method.resident, method))
    for side in work.sides(list(both)):
        if side.method in offloaded or not (side.ahead or side.name.endswith(UNCOMPILED)):
            yield side


def _serve(side: Side, work: Work, arrived: Sequence[float], config: ThroughputConfig) -> tuple[dict[str, Any], Run]:
    """Run one batch that is not counted, then serve all requests."""
    with PeakMemory(work.model.device) as memory:
        warm = generate(work.model, side, work, config.new_tokens)

    def run_batch() -> list[float]:
        run = generate(work.model, side, work, config.new_tokens)
        return [ms / 1e3 for ms in accumulate([run.ttft_ms, *run.token_ms])]

    served = serve(arrived, config.batch, run_batch)
    return {
        **served.figures(arrived),
        **warm.costs,
        "traffic": warm.traffic,
        "peak_memory_bytes": memory.peak_bytes,
        "first_seconds": warm.seconds,
    }, warm


def _compare(sides: Sequence[dict[str, Any]]) -> str | None:
    """Add every patched side's ratio to the best dense side, and return that side's name; None if none fits."""
    dense = [side for side in sides if side["method"] == DENSE and side["error"] is None]
    if not dense:
        return None
    best = max(dense, key=lambda side: float(side["tokens_per_second"]))
    for side in sides:
        if side["method"] != DENSE and side["error"] is None:
            side["ratio"] = side["tokens_per_second"] / best["tokens_per_second"]
    return str(best["name"])


def _requests(config: ThroughputConfig) -> int:
    return 4 * config.batch if config.requests is None else config.requests
