"""Clocks for the host's part of a token: the parts of a step, calls of the compiled step, and its compilation."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import hf_sparse_attn_kernels
import torch
from torch._dynamo import guards
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.utils import compilation_time_metrics, counters
from transformers import AttentionInterface, PreTrainedModel

from eval.speed_runs import TokenClock
from hf_sparse_attn import SparseCache, cache_argument
from hf_sparse_attn.attention import sparse_attention_forward
from hf_sparse_attn.patch.hook import DecoderHooks
from hf_sparse_attn.patch.patch import IMPLEMENTATIONS

PARTS = MODULES, CACHE, CHECKS, DISPATCH, LAUNCH = "modules", "cache", "checks", "dispatch", "launch"
GUARD_CHECKS = 200
"""Evaluations of the guards that are timed."""
PACKAGES = ("hf_sparse_attn_kernels", "hf_sparse_attn", "transformers", "torch")


class PartsClock:
    """Adds up the seconds spent in each part of a program, without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        """Seconds spent in the parts called by each part that is running."""

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as belonging to a part."""

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with self.running(part):
                return function(*arguments, **options)

        return call

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Time the block as belonging to a part."""
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[part] += seconds - self._inner.pop()
            if self._inner:
                self._inner[-1] += seconds


class StepsClock(TokenClock):
    """Records the times of tokens, and forgets the parts that were timed before the first one."""

    def __init__(self, parts: PartsClock) -> None:
        super().__init__()
        self.parts = parts

    def put(self, value: torch.Tensor) -> None:
        """Record the time; the first call brings the prompt, the second one the first token."""
        super().put(value)
        if len(self.marks) == 2:
            self.parts.seconds.clear()

    @property
    def seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.marks[-1] - self.marks[1]


@contextmanager
def timed_parts(model: PreTrainedModel) -> Iterator[PartsClock]:
    """Time the parts of uncompiled steps inside the ``with`` block. The model must be patched inside it too.

    The parts are the model's modules, the package's cache and methods, and of its ops the checks of arguments, the
    choice of an implementation, and the implementation: launches on CUDA, the whole computation on a CPU.
    """
    clock = PartsClock()

    def implementation(stock: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *names: clock.timed(LAUNCH, stock(*names))

    with ExitStack() as stack:
        stack.enter_context(patch.object(model, "forward", clock.timed(MODULES, model.forward)))
        for owner, name in ((SparseCache, "update"), (DecoderHooks, "before"), (DecoderHooks, "after")):
            stack.enter_context(patch.object(owner, name, clock.timed(CACHE, getattr(owner, name))))
        for op in vars(hf_sparse_attn_kernels).values():
            dispatch = getattr(op, "dispatch", None)
            if dispatch is not None:
                stack.enter_context(patch.object(dispatch, "check", clock.timed(CHECKS, dispatch.check)))
                stack.enter_context(patch.object(dispatch, "run", clock.timed(DISPATCH, dispatch.run)))
                stack.enter_context(patch.object(dispatch, "implementation", implementation(dispatch.implementation)))
        for name in IMPLEMENTATIONS:
            AttentionInterface.register(name, clock.timed(CACHE, sparse_attention_forward))
            stack.callback(AttentionInterface.register, name, sparse_attention_forward)
        yield clock


class CallsClock:
    """Records when the host calls the compiled step and when the call returns, in seconds."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    def timed(self, get_compiled_call: Callable[..., Any]) -> Callable[..., Any]:
        """Return Transformers' ``get_compiled_call``, whose result is then timed."""

        @wraps(get_compiled_call)
        def get(*arguments: Any, **options: Any) -> Callable[..., Any]:
            compiled = get_compiled_call(*arguments, **options)

            def call(*inputs: Any, **named: Any) -> Any:
                started = time.perf_counter()
                output = compiled(*inputs, **named)
                self.calls.append((started, time.perf_counter()))
                return output

            return call

        return get


class CompilationClock:
    """Records what Dynamo traces, the guards that it makes, and the phases of a compilation.

    It reads Dynamo's internals. What another version of torch does not have is missing from the figures.
    """

    def __init__(self) -> None:
        self.traced = PartsClock()
        """Seconds of tracing by the package whose functions were traced."""
        self.guarded: list[tuple[Any, Any]] = []
        """Managers of guards, each with the variables of its frame."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the compilations inside the ``with`` block, which begins with nothing compiled."""
        torch._dynamo.reset()
        counters.clear()
        compilation_time_metrics.clear()
        clock, inline = self.traced, InliningInstructionTranslator.inline_call_

        def timed_inline(tracer: Any) -> Any:
            with clock.running(_package_of(tracer.f_code.co_filename)):
                return inline(tracer)

        def keep(manager: Any, scope: Any, builder: Any) -> None:
            # The frame that is about to run takes arguments out of its dictionaries.
            self.guarded.append(
                (manager, {name: copy.copy(it) if type(it) is dict else it for name, it in scope.items()})
            )

        with (
            patch.object(InliningInstructionTranslator, "inline_call_", timed_inline),
            patch.object(guards, "guard_manager_testing_hook_fn", keep, create=True),
        ):
            yield

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase of the compilations, which do not overlap.

        ``kernels`` is the time for which Inductor waits for Triton, or for the C++ compiler on a CPU.
        """
        total = {name: sum(seconds) for name, seconds in compilation_time_metrics.items()}
        whole, tracing = total.get("_compile.compile_inner", 0.0), total.get("bytecode_tracing", 0.0)
        graph_compiler, guards_ = total.get("OutputGraph.call_user_compiler", 0.0), total.get("build_guards", 0.0)
        inductor, triton = total.get("compile_fx_inner", 0.0), total.get("async_compile.wait", 0.0)
        if tracing + graph_compiler > whole:  # some versions of torch call the graph compiler while they trace
            tracing -= graph_compiler
        return {
            "dynamo_tracing": tracing,
            "dynamo_guards": guards_,
            "dynamo_rest": whole - tracing - graph_compiler - guards_,
            "aot_autograd": graph_compiler - inductor,
            "inductor": max(0.0, inductor - triton),
            "kernels": triton,
        }

    def guards(self) -> dict[str, Any]:
        """Return the ``number`` of guards, and of them those ``of_cache`` and those that are functions ``in_python``.

        ``microseconds`` is the time of one evaluation of all; None if they do not hold any more. Call it before the
        model is unpatched.
        """
        lines = [line for manager, _ in self.guarded for line in _leaves(str(manager))]
        seconds = []
        for manager, scope in self.guarded:
            with torch.no_grad():  # as in generate()
                started = time.perf_counter()
                passed = [manager.check(scope) for _ in range(GUARD_CHECKS)]
            seconds.append((time.perf_counter() - started) / GUARD_CHECKS if all(passed) else None)
        return {
            "number": len(lines),
            "of_cache": sum(f"{cache_argument.CACHE}']" in line for line in lines),
            "in_python": sum(line.startswith("LAMBDA_GUARD") for line in lines),
            "microseconds": None if None in seconds else 1e6 * sum(each for each in seconds if each is not None),
        }


def _leaves(guards_text: str) -> list[str]:
    """Return the guards of a printed tree, without its inner nodes."""
    nodes = [line.lstrip("| ").removeprefix("+- ") for line in guards_text.splitlines() if "+- " in line]
    return [node for node in nodes if "GuardManager" not in node.partition(":")[0]]


def _package_of(path: str) -> str:
    folders = path.replace("\\", "/").split("/")
    return next((package for package in PACKAGES if package in folders), "other")
