"""Profile of the host's part of a token: an uncompiled step, a compiled step, and the first compiled call."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from transformers import Cache, CompileConfig, PreTrainedModel, StaticCache

from eval.compile_config import make_compile_config
from eval.config import DENSE
from eval.costs import device_name, versions
from eval.errors import EvalError
from eval.host_clock import PARTS, CallsClock, CompilationClock, PartsClock, StepsClock, timed_parts
from eval.speed import quartiles
from eval.speed_config import SpeedConfig
from eval.speed_runs import is_cuda, random_ids, setting
from eval.speed_shapes import SHAPES, build_model, seeded
from hf_sparse_attn import SparseCache, SparseMethod, sparse_attention
from hf_sparse_attn.cache_argument import CACHE

BACKENDS = ("inductor", "aot_eager", "eager")
FIRST_CALLS = 4
"""Calls of the compiled step whose times are listed; on CUDA, graphs are recorded in the second or third."""


@dataclass(frozen=True)
class HostConfig:
    """The settings of one profile.

    Parameters
    ----------
    shape : str
        A name in ``SHAPES``: random weights, and a cache filled without a prefill.
    context : int
        Tokens before the first new one.
    method, token_budget, parameters, dtype, device, seed
        As in :class:`eval.speed_config.SpeedConfig`; dense attention is always profiled too.
    layers : int or None
        Number of layers; None for the shape's own.
    new_tokens : int
        Tokens that each run generates, more than ``FIRST_CALLS``.
    backend : str
        Compiler of the graph, one of ``BACKENDS``. ``"inductor"`` records a CUDA graph where there is a GPU.
    module_guards : bool
        Whether compiled steps check that the model's modules are as they were.
    """

    shape: str
    context: int
    method: tuple[str, ...] = ("quest",)
    token_budget: tuple[int, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    new_tokens: int = 32
    backend: str = "inductor"
    module_guards: bool = True
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
        least = (("context", self.context, 1), ("new_tokens", self.new_tokens, FIRST_CALLS + 1))
        for name, value, minimum in (*least, *(() if self.layers is None else (("layers", self.layers, 1),))):
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise EvalError(f"{name}={value!r} is not allowed: a whole number, at least {minimum}")
        if self.backend not in BACKENDS:
            raise EvalError(f"backend={self.backend!r} is unknown; known: {', '.join(BACKENDS)}")
        self.methods()

    def methods(self) -> list[SparseMethod]:
        """Create every method except dense attention, with every budget.

        Raises
        ------
        EvalError
            The shape, a method, a budget or a hyperparameter is not allowed, or the method's steps are not compiled.
        """
        methods = SpeedConfig(
            shape=self.shape,
            contexts=(self.context,),
            method=self.method,
            token_budget=self.token_budget,
            parameters=self.parameters,
            dtype=self.dtype,
        ).methods()
        for method in methods:
            if method.offloading is not None:
                raise EvalError(f"method={method.name!r} is not allowed: its steps are not compiled")
            if self.layers is not None and method.dense_layers >= self.layers:
                raise EvalError(
                    f"layers={self.layers} is not allowed with method={method.name!r}: more than its "
                    f"dense_layers={method.dense_layers}"
                )
        return methods


def profile_host(config: HostConfig, on_side: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Build the model of a shape, and profile dense attention and each method on it.

    Parameters
    ----------
    config : HostConfig
        Settings.
    on_side : callable, optional
        Called with the name of each side before it is profiled.

    Returns
    -------
    dict
        The report as JSON values: ``machine``, ``settings`` and ``sides``. Each side has three parts.

        ``uncompiled``: ``token_ms`` (median and quartiles) without clocks, and ``parts_ms``, the mean milliseconds of a
        token spent by the host in Transformers' ``loop`` and in each part of :func:`~eval.host_clock.timed_parts`.

        ``compiled``: ``token_ms``; ``call_ms``, the time until a call of the compiled step returns, and
        ``between_calls_ms``, Transformers' loop with its wait for the device; ``guards`` (see
        :meth:`~eval.host_clock.CompilationClock.guards`). Medians and quartiles of the calls after the first
        ``FIRST_CALLS``.

        ``first_call``: ``calls_seconds`` of the first calls, ``phases_seconds`` (see
        :meth:`~eval.host_clock.CompilationClock.phases`), ``traced_seconds`` by the package whose functions Dynamo
        traced, and the numbers of ``graphs``, ``recompilations``, ``graph_breaks`` and graphs ``found_on_disk``.

    Raises
    ------
    EvalError
        Unknown device, or the context does not fit in its memory.
    """
    from hf_sparse_attn.cli.models import ModelLoadError, resolve_device

    try:
        device = resolve_device(config.device)
    except ModelLoadError as error:
        raise EvalError(str(error)) from error
    dtype: torch.dtype = getattr(torch, config.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    shape = SHAPES[config.shape]
    if config.layers is not None:
        shape = replace(shape, num_hidden_layers=config.layers)
    model = build_model(shape, dtype, device, config.seed)
    sides: list[dict[str, Any]] = []
    for method in (None, *config.methods()):
        name = "dense, StaticCache" if method is None else f"{method.name}, {setting(method)}"
        if on_side is not None:
            on_side(name)
        try:
            side = _Side(model, method, config)
            entry = {"uncompiled": _profile_uncompiled(side), **_profile_compiled(side)}
        except torch.OutOfMemoryError as error:
            raise EvalError(f"context={config.context} does not fit in the memory of {device_name(device)}") from error
        finally:
            model.__dict__.pop("_compiled_call", None)
            torch._dynamo.reset()
        sides.append({"name": name, "method": DENSE if method is None else method.name, **entry})
    return {
        "machine": {
            "device": device_name(device),
            "versions": versions(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()},
            "layers": shape.num_hidden_layers,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
        },
        "sides": sides,
    }


@dataclass(frozen=True)
class _Side:
    """A model with dense attention or a method, whose steps are profiled."""

    model: PreTrainedModel
    method: SparseMethod | None
    config: HostConfig

    def patched(self) -> AbstractContextManager[Any]:
        """Patch the model with the method inside a ``with`` block."""
        return nullcontext() if self.method is None else sparse_attention(self.model, self.method)

    def generate(self, clock: StepsClock, compile_config: CompileConfig | None = None) -> None:
        """Generate from the end of a new cache with random contents."""
        model, config = self.model, self.config
        cache = self._filled_cache()
        input_ids = random_ids(model, (1, config.context + 1), (), config.seed)
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            **{CACHE: cache},
            max_new_tokens=config.new_tokens,
            min_new_tokens=config.new_tokens,
            do_sample=False,
            streamer=clock,
            compile_config=compile_config,
            disable_compile=compile_config is None,
        )

    def _filled_cache(self) -> Cache:
        model, config = self.model, self.config
        gc.collect()  # frees the last run's cache
        capacity = config.context + config.new_tokens + 1
        if self.method is None:
            cache = StaticCache(config=model.config, max_cache_len=capacity)
        else:
            cache = SparseCache(model.config, self.method, max_cache_len=capacity)
        shape = (1, model.config.num_key_value_heads, config.context, model.config.head_dim)
        with seeded(model.device, config.seed), torch.no_grad():
            append = cache.append_tokens if isinstance(cache, SparseCache) else cache.update
            for layer_idx in range(model.config.num_hidden_layers):
                keys, values = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in "kv")
                append(keys, values, layer_idx)
        return cache


def _profile_uncompiled(side: _Side) -> dict[str, Any]:
    plain = StepsClock(PartsClock())
    with side.patched():
        side.generate(plain)
    with timed_parts(side.model) as parts, side.patched():  # in this order, so that the patch's hooks are timed
        clock = StepsClock(parts)
        side.generate(clock)
    tokens = side.config.new_tokens - 1
    parts_ms = {part: 1e3 * parts.seconds[part] / tokens for part in PARTS}
    loop_ms = 1e3 * clock.seconds / tokens - math.fsum(parts_ms.values())
    return {"token_ms": quartiles(_token_ms(plain, 1)), "parts_ms": {"loop": loop_ms, **parts_ms}}


def _profile_compiled(side: _Side) -> dict[str, Any]:
    model, clock = side.model, StepsClock(PartsClock())
    compile_config = _compile_config(side.config, is_cuda(model))
    calls, compilation = CallsClock(), CompilationClock()
    model.__dict__.pop("_compiled_call", None)
    with (
        side.patched(),
        patch.object(model, "get_compiled_call", calls.timed(model.get_compiled_call)),
        compilation.running(),
    ):
        side.generate(clock, compile_config)
        phases, stats = compilation.phases(), counters["stats"]
        numbers = {
            "graphs": stats["unique_graphs"],
            "recompilations": max(0, len(compilation.guarded) - 1),
            "graph_breaks": sum(counters["graph_break"].values()),
            # A graph in AOTAutograd's cache is one in Inductor's too.
            "found_on_disk": max(
                counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
            ),
        }
        guards = compilation.guards()
    later = calls.calls[FIRST_CALLS:]
    gaps = [begin - end for (_, end), (begin, _) in zip(calls.calls[FIRST_CALLS - 1 :], later, strict=False)]
    return {
        "compiled": {
            "token_ms": quartiles(_token_ms(clock, FIRST_CALLS)),
            "call_ms": quartiles([1e3 * (end - begin) for begin, end in later]),
            "between_calls_ms": quartiles([1e3 * gap for gap in gaps]),
            "guards": guards,
        },
        "first_call": {
            "calls_seconds": [end - begin for begin, end in calls.calls[:FIRST_CALLS]],
            "phases_seconds": phases,
            "traced_seconds": dict(compilation.traced.seconds),
            **numbers,
        },
    }


def _compile_config(config: HostConfig, on_cuda: bool) -> CompileConfig:
    compile_config = make_compile_config(
        {}, module_guards=config.module_guards, on_cuda=on_cuda, backend=config.backend
    )
    compile_config._compile_all_devices = True
    return compile_config


def _token_ms(clock: StepsClock, first: int) -> list[float]:
    """Return the milliseconds of each token after the first ``first`` ones."""
    return [1e3 * (after - before) for before, after in pairwise(clock.marks[first:])]
