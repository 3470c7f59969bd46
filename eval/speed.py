"""How fast ``generate()`` is, dense and patched: time to first token and ms per token, in one run, round by round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eval.config import DENSE, RunConfig
from eval.costs import device_name, sparse_reads, versions
from eval.engine import make_variants
from eval.errors import EvalError
from eval.store import write_json
from hf_sparse_attn import SparseCache, SparseMethod, sparse_attention
from hf_sparse_attn.greedy import forward
from hf_sparse_attn.memory import PeakMemory
from hf_sparse_attn.models import ModelLoadError, load_model
from hf_sparse_attn.patch import max_positions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DYNAMIC, PREALLOCATED = "dense, DynamicCache", "dense, preallocated"
CHECKED_TOKENS = 4
"""Tokens that a method with a budget for everything must have in common with dense attention."""
TIE_ROUNDINGS = 4
"""Logits that are no further apart than this many roundings of the largest one are a tie."""

_SHAPE_POSITIONS = 1 << 20  # RoPE keeps no table, so that positions cost nothing

Progress = Callable[[str, int, int], None]
"""Called before each run with what it is, how many are done, and how many there are."""


@dataclass(frozen=True)
class Shape:
    """The architecture of a published model, in the names of its Transformers configuration; no weights."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    tie_word_embeddings: bool = False


SHAPES: dict[str, Shape] = {
    "llama-2-7b": Shape("llama", 4096, 32, 32, 32, 128, 11008, 32000, 1e4),
    "llama-3.1-8b": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 5e5),
    "qwen2.5-7b": Shape("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 1e6),
    "mistral-7b": Shape("mistral", 4096, 32, 32, 8, 128, 14336, 32768, 1e6),
    "smollm2-135m": Shape("llama", 576, 30, 9, 3, 64, 1536, 49152, 1e5, tie_word_embeddings=True),
    "tiny": Shape("llama", 64, 4, 4, 2, 16, 128, 97, 1e4),
}


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


def build_model(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Make a model of a shape with random weights, in place on its device, in evaluation mode and with SDPA.

    It has a million positions, and no token ends its text. Weights are as small as for training: outputs are finite.
    """
    settings = asdict(shape)
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    config = AutoConfig.for_model(
        **settings,
        rope_parameters=rope,
        max_position_embeddings=_SHAPE_POSITIONS,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with _seeded(device, seed), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def measure(config: SpeedConfig, on_progress: Progress | None = None) -> dict[str, Any]:
    """Load or build the model, and time it; see :func:`measure_model` for what is returned.

    Raises
    ------
    EvalError
        There is no such model or device, or what :func:`measure_model` raises.
    """
    device = _device(config.device)
    dtype = DTYPES[config.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    special_ids: Collection[int] = ()
    if config.shape is not None:
        model = build_model(SHAPES[config.shape], dtype, device, config.seed)
    else:
        try:
            model, tokenizer = load_model(config.model or "", dtype, device)
        except ModelLoadError as error:
            raise EvalError(str(error)) from error
        special_ids = tokenizer.all_special_ids
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
            work = _Work.start(model, config, context, special_ids)
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


class _TokenClock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token reached the host; that alone waits for the device, as for anyone who streams."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time; the first call brings the prompt."""
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class _Work:
    """What every side of one context starts from."""

    context: int
    input_ids: torch.Tensor
    """[1, context], with one token more where the context is cached."""
    new_cache: Callable[[SparseMethod | str], SparseCache]
    new_dynamic_cache: Callable[[], DynamicCache]

    @classmethod
    def start(cls, model: PreTrainedModel, config: SpeedConfig, context: int, special_ids: Collection[int]) -> _Work:
        capacity = context + config.new_tokens + 1
        if config.shape is None:
            input_ids = _random_ids(model, context, special_ids, config.seed)
            new_cache = partial(SparseCache, model.config, initial_capacity=capacity)
            return cls(context, input_ids, new_cache, partial(DynamicCache, config=model.config))
        input_ids = _random_ids(model, context + 1, special_ids, config.seed)
        filled = SparseCache(model.config, DENSE, initial_capacity=capacity)
        shape = (1, model.config.num_key_value_heads, context, model.config.head_dim)
        with _seeded(model.device, config.seed):
            for layer in filled.layers:
                layer.update(*(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)))
        return cls(context, input_ids, filled.fork, partial(_dynamic_copy, model, filled))


@dataclass(frozen=True)
class _Side:
    name: str
    method: SparseMethod | None
    """None for dense attention, on the unpatched model."""
    make_cache: Callable[[], Cache]


@dataclass(frozen=True)
class _Run:
    token_ids: list[int]
    ttft_ms: float
    token_ms: list[float]
    """Of every token but the first."""
    costs: dict[str, float | None]


def _measure_context(
    model: PreTrainedModel,
    config: SpeedConfig,
    work: _Work,
    methods: Sequence[SparseMethod],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    sides = [
        _Side(DYNAMIC, None, work.new_dynamic_cache),
        _Side(PREALLOCATED, None, partial(work.new_cache, DENSE)),
        *(_Side(f"{made.name}, {made.token_budget}", made, partial(work.new_cache, made)) for made in methods),
    ]
    where = f"{work.context:,} tokens"
    probes: dict[str, tuple[_Run, int]] = {}
    for _ in range(config.warmup):
        for side in sides:
            progress(f"{where}, warm-up: {side.name}")
            # Not around the runs that count: on a CPU, sampling takes its share of the time.
            with PeakMemory(model.device) as memory:
                run = _generate(model, side, work, config.new_tokens)
            probes[side.name] = run, memory.peak_bytes
    for made in methods:
        progress(f"{where}, check: {made.name}, {made.token_budget}")
        _check_covering(model, work, made, probes[PREALLOCATED][0].token_ids)

    runs: dict[str, list[_Run]] = {side.name: [] for side in sides}
    for repeat in range(config.repeats):
        first = repeat % len(sides)  # no side always follows the same one
        for side in sides[first:] + sides[:first]:
            progress(f"{where}, round {repeat + 1} of {config.repeats}: {side.name}")
            runs[side.name].append(_generate(model, side, work, config.new_tokens))
    return _entries(sides, runs, probes)


def _generate(model: PreTrainedModel, side: _Side, work: _Work, new_tokens: int) -> _Run:
    """One call of ``generate()``, timed, and checked to have decoded from where the cache ended."""
    gc.collect()  # not while the clock runs, and the former run's cache goes before the next one is made
    cache, clock = side.make_cache(), _TokenClock()
    with nullcontext() if side.method is None else sparse_attention(model, side.method):
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        started = time.perf_counter()
        output = model.generate(
            work.input_ids,
            attention_mask=torch.ones_like(work.input_ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
        )
        reads = None if side.method is None else sparse_reads(model, cache)
    prompt_tokens = work.input_ids.shape[1]
    token_ids = output[0, prompt_tokens:].tolist()
    times = clock.marks[1:]  # without the prompt's
    steps = cache.get_seq_length() - work.context  # decode steps: each cached the token that it was fed
    made = (len(token_ids), len(times), work.context + steps)
    expected = (new_tokens, new_tokens, prompt_tokens + new_tokens - 1)
    if made != expected:
        raise EvalError(
            f"{side.name}, context={work.context}: generate() made {made[0]} tokens in {made[1]} parts and left "
            f"{made[2]} in the cache, expected {expected}"
        )
    if reads is None or side.method is None:
        costs = {"kv_fraction": 1.0, "realised_budget": work.context + (steps + 1) / 2}
    else:
        if not side.method.covers(work.context) and not (reads.kv_bytes or 0) < (reads.dense_bytes or 0):
            raise EvalError(f"{side.name}, context={work.context}: the patched run read as much as dense attention")
        costs = {"kv_fraction": reads.kv_fraction, "realised_budget": reads.realised_budget}
    return _Run(token_ids, (times[0] - started) * 1e3, (np.diff(times) * 1e3).tolist(), costs)


def _check_covering(model: PreTrainedModel, work: _Work, method: SparseMethod, dense_ids: Sequence[int]) -> None:
    """Raise unless the method, with a budget for everything, begins as dense attention over the same buffers does.

    Dense attention on CUDA does not always agree with itself: two tokens that it rates alike count as the same.
    """
    everything = replace(method, token_budget=2 * (work.context + len(dense_ids)))
    side = _Side(f"{method.name}, {everything.token_budget}", everything, partial(work.new_cache, everything))
    expected = list(dense_ids[:CHECKED_TOKENS])
    found = _generate(model, side, work, len(expected)).token_ids
    differing = [step for step in range(len(expected)) if found[step] != expected[step]]
    if not differing:
        return
    step = differing[0]  # what comes after it has another beginning
    cache = work.new_cache(DENSE)
    logits = forward(model, cache, work.input_ids[0, cache.get_seq_length() :].tolist() + expected[:step])
    gap = float(logits[expected[step]] - logits[found[step]])
    if abs(gap) > TIE_ROUNDINGS * torch.finfo(logits.dtype).eps * float(logits.abs().max()):
        raise EvalError(
            f"{side.name}, context={work.context}: with a budget for everything the patched model begins with tokens "
            f"{found}, dense attention with {expected}"
        )


def _entries(
    sides: Sequence[_Side], runs: dict[str, list[_Run]], probes: dict[str, tuple[_Run, int]]
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


def _dynamic_copy(model: PreTrainedModel, filled: SparseCache) -> DynamicCache:
    """Transformers' own cache with the same tokens, in tensors of its own as after a prefill."""
    cache = DynamicCache(config=model.config)
    for layer_idx, layer in enumerate(filled.sparse_layers):
        cache.update(layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length], layer_idx)
    return cache


def _random_ids(model: PreTrainedModel, length: int, special_ids: Collection[int], seed: int) -> torch.Tensor:
    """[1, length] ordinary tokens."""
    allowed = torch.tensor(sorted(set(range(model.config.vocab_size)) - set(special_ids)))
    chosen = torch.randint(len(allowed), (1, length), generator=torch.Generator().manual_seed(seed))
    return allowed[chosen].to(model.device)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from the device's own generator, and leave it as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise EvalError(f"device={name!r} is not a device: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EvalError(f"device={name!r} asks for CUDA, which torch does not find here")
    return device


def _numbered(on_progress: Progress | None, total: int) -> Callable[[str], None]:
    done = iter(range(total))
    return lambda what: None if on_progress is None else on_progress(what, next(done), total)
