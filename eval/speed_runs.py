"""One timed call of ``generate()``, and the caches that it starts from."""

from __future__ import annotations

import copy
import functools
import gc
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import Cache, CompileConfig, DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from eval.compile_config import make_compile_config
from eval.config import DENSE
from eval.costs import sparse_reads, traffic_per_step
from eval.errors import EvalError
from eval.knobs import BUDGET, knob_of
from eval.speed_shapes import seeded
from eval.split import wait_for_others
from hf_sparse_attn import (
    DecodeAhead,
    SelfSpeculation,
    SparseCache,
    SparseMethod,
    SpeculationStats,
    sparse_attention,
)
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.heads import head_dim_of, kv_heads_of
from hf_sparse_attn.methods import make_method
from hf_sparse_attn.patch.generation import is_split_by_layers
from hf_sparse_attn.patch.tensor_parallel import head_shard_of
from hf_sparse_attn.patched import layer_devices
from hf_sparse_attn.rope import RopeTables, decoder_rotary, rotated

if TYPE_CHECKING:
    from eval.speed_config import SpeedConfig

DYNAMIC, PREALLOCATED, STATIC = "dense, DynamicCache", "dense, preallocated", "dense, StaticCache"
UNCOMPILED = ", not compiled"
ON_HOST = ", in host memory"
AHEAD = ", ahead"
GRAPH = ", CUDA graph"
AHEAD_FUSED, FUSED = f"{AHEAD}, fused", f"{GRAPH}, fused"
WAYS = ("compiled", "ahead", "ahead-fused", "graph", "fused", "uncompiled")
"""How a method's decode steps can run: see :attr:`Side.way`."""

AnyCache = TypeVar("AnyCache", bound=Cache)
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Records the time at which each token reaches the host, as for any streaming user; nothing else waits."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the time; the first call brings the prompt."""
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Side:
    """One of the compared configurations of ``generate()``."""

    name: str
    method: SparseMethod | None
    """None for dense attention, on the unpatched model."""
    make_cache: Callable[[], Cache]
    compiled: bool = False
    """Whether ``generate()`` compiles its decode step."""
    copies_cache: bool = False
    """Whether its cache is a copy of the one that all sides start from."""
    kv_storage: str = "device"
    """Where the cache keeps K and V."""
    draft_tokens: int | None = None
    """Tokens that the method drafts before each dense pass; None if it decodes by itself."""
    ahead: bool = False
    """Whether the host launches a step before it knows the tokens of the step before (``DecodeAhead``)."""
    cuda_graph: bool = False
    """Whether its passes are recorded as CUDA graphs, without compilation of the model."""
    fuse: bool = False
    """Whether products of one row have their own kernel, and norms and RoPE of recorded passes are compiled."""

    @property
    def way(self) -> str:
        """How its steps run: one of ``WAYS``."""
        if self.cuda_graph:
            return "fused" if self.fuse else "graph"
        if self.ahead:
            return "ahead-fused" if self.fuse else "ahead"
        return "compiled" if self.compiled else "uncompiled"

    def described(self) -> dict[str, Any]:
        """Return what a report says of the side, as JSON values."""
        return {
            "name": self.name,
            "method": DENSE if self.method is None else self.method.name,
            "token_budget": None if self.method is None else self.method.token_budget,
            "hyperparameters": {} if self.method is None else asdict(self.method),
            "compiled": self.compiled,
        }


@dataclass(frozen=True)
class Work:
    """The common starting point of all sides for one context."""

    model: PreTrainedModel
    context: int
    capacity: int
    """Tokens that the longest run caches, plus one."""
    input_ids: torch.Tensor
    """[batch, context], with one more token if the context is cached."""
    fill: Callable[[], SparseCache] | None
    """Returns the cached context on the device, always the same cache; None if each run prefills its own."""
    draw: Callable[[int], KeysAndValues] | None = None
    """Returns the keys and values of a layer's context, [batch, kv_heads, context, head_dim], without ``fill``; None if
    that has the only ones."""
    kv_storage: str = "device"
    """``"host"`` to run each method with K and V in host memory too."""
    compile_config: CompileConfig | None = None
    """How compiled sides are compiled; None as Transformers does by default."""

    @classmethod
    def start(
        cls, model: PreTrainedModel, config: SpeedConfig, context: int, special_ids: Collection[int], batch: int = 1
    ) -> Work:
        """Create the prompts of a batch and, with ``config.shape``, the means to fill caches."""
        capacity = context + config.new_tokens + 1
        start = partial(
            cls, model, context, capacity, kv_storage=config.kv_storage, compile_config=_compile_config(config, model)
        )
        if config.shape is None:
            prompts = random_ids(model, (batch, context), special_ids, config.seed)
            return start(prompts, None)
        shape = (batch, model.config.num_key_value_heads, context, model.config.head_dim)
        draw = partial(_draw_layer, model, shape, config.seed, layer_devices(model))

        @functools.cache
        def fill() -> SparseCache:
            filled = _with_context(empty_cache(model, DENSE, capacity), draw, model.config.num_hidden_layers)
            _clear_beyond(filled, context)
            return filled

        input_ids = random_ids(model, (batch, context + 1), special_ids, config.seed)
        return start(input_ids, fill, draw)

    @classmethod
    def prefill(cls, model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> Work:
        """Cache all tokens of a prompt, [batch, length], but the last, in one dense pass."""
        context = prompt.shape[1] - 1
        filled = empty_cache(model, DENSE, context + new_tokens + 1)
        with torch.no_grad(), sparse_attention(model, DENSE):
            model(prompt[:, :context], use_cache=True, logits_to_keep=1, **{CACHE: filled})
        _clear_beyond(filled, context)
        return cls(model, context, context + new_tokens + 1, prompt, lambda: filled)

    @property
    def is_cached(self) -> bool:
        """Whether all sides start from the same cached context."""
        return self.fill is not None

    @property
    def filled(self) -> SparseCache | None:
        """The cached context on the device, filled when it is first asked for; None if each run prefills its own."""
        return None if self.fill is None else self.fill()

    def prepare(self, side: Side) -> None:
        """Fill the cached context if a side reads it on the device, so that later measurements have it from the start.

        Raises
        ------
        torch.OutOfMemoryError
            The device has no room for it.
        """
        if self.fill is not None and side.kv_storage == "device":
            self.fill()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cached context's keys and values; 0 if each run prefills its own cache."""
        return self._context_bytes() if self.is_cached else 0

    @property
    def weights_and_kv_bytes(self) -> int:
        """Bytes of this process's weights and of its part of the cached context, the minimum for dense attention."""
        own = [each.to_local() if hasattr(each, "to_local") else each for each in self.model.parameters()]
        weights: dict[int, int] = {each.data_ptr(): each.numel() * each.element_size() for each in own}
        return sum(weights.values()) + self._context_bytes()

    def _context_bytes(self) -> int:
        config = self.model.config
        tokens = self.input_ids.shape[0] * self.context
        numbers: int = 2 * tokens * config.num_hidden_layers * kv_heads_of(config) * head_dim_of(config)
        bits: int = torch.finfo(self.model.dtype).bits
        return numbers * bits // 8 // head_shard_of(self.model).size

    def sides(self, methods: Sequence[SparseMethod], ways: Collection[str] = WAYS) -> list[Side]:
        """Return dense attention over three caches, then each method; on CUDA in each of six ways to run its steps.

        Of a model that is split no side is compiled. A CUDA graph is that of one device. Steps over sliding windows are
        neither compiled nor recorded.

        Raises
        ------
        EvalError
            A method's steps run in none of the ``ways`` here.
        """
        copies, on_cuda, by_layers = self.is_cached, is_cuda(self.model), is_split_by_layers(self.model)
        compiles = on_cuda and not by_layers and head_shard_of(self.model).is_whole
        repeats = SparseCache(self.model.config, DENSE, max_cache_len=1).is_compileable  # False over sliding windows
        compiles_sparse = compiles and repeats
        sides = [
            Side(DYNAMIC, None, self.new_dynamic_cache, copies_cache=copies),
            Side(PREALLOCATED, None, self.new_growing_cache, copies_cache=copies),
            Side(STATIC, None, self.kept(self.new_static_cache), compiled=compiles),
        ]
        for method in methods:
            is_resident = method.offloading is None
            name = f"{method.name}, {setting(method)}" + ("" if is_resident else ", offloaded")
            new_cache = partial(self.new_cache, method)
            side = Side(name, method, self.kept(new_cache), compiled=compiles_sparse and is_resident)
            sides.append(side)
            if on_cuda and is_resident:
                ahead = replace(side, name=f"{name}{AHEAD}", ahead=True)  # the same code, over the same cache
                sides.append(ahead)
                if side.compiled:
                    sides.append(replace(ahead, name=f"{name}{AHEAD_FUSED}", fuse=True))
                if repeats and not by_layers:
                    graph = replace(ahead, name=f"{name}{GRAPH}", compiled=False, cuda_graph=True)
                    sides += [graph, replace(graph, name=f"{name}{FUSED}", fuse=True)]
            if side.compiled:
                sides.append(Side(f"{name}{UNCOMPILED}", method, self.kept(new_cache)))
            if self.kv_storage == "host" and is_resident:
                on_host = self.kept(partial(self.new_cache, method, "host"))
                sides.append(Side(f"{name}{ON_HOST}", method, on_host, compiled=compiles_sparse, kv_storage="host"))
        wanted = [side for side in sides if side.method is None or side.way in ways]
        for method in methods:
            possible = dict.fromkeys(side.way for side in sides if side.method == method)
            if not any(side.method == method for side in wanted):
                raise EvalError(
                    f"ways={list(ways)} leaves no side of {method.name}; possible here: {', '.join(possible)}"
                )
        return wanted

    def new_cache(self, method: SparseMethod | str, kv_storage: str = "device") -> SparseCache:
        """Create a cache as a patched ``generate()`` does, over the filled buffers if there are any.

        Their random content serves as keys after RoPE, or before it for a method that caches those. Host memory is
        filled layer by layer, so that the device never holds more than a few layers of the context.
        """
        instance = make_method(method)
        if self.is_cached and kv_storage == "host":
            return self._new_host_cache(instance)
        if self.filled is None:
            return empty_cache(self.model, instance, self.capacity, kv_storage)
        if instance.offloading is not None:
            return self._copied(self._growing(instance))
        filled = copy.copy(self.filled)
        if filled.method.rotates_keys != instance.rotates_keys:
            filled.method = instance
        return filled.fork(instance)

    def _new_host_cache(self, method: SparseMethod) -> SparseCache:
        new, config = empty_cache(self.model, method, self.capacity, "host"), self.model.config
        kv_heads = kv_heads_of(config) // head_shard_of(self.model).size
        shape = (self.input_ids.shape[0], kv_heads, self.context, head_dim_of(config))
        try:
            new.reserve_host(shape, self.model.dtype, partial(layer_devices, self.model))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EvalError(f"context={self.context}: {error}") from error
        return _with_context(new, self.draw or self._stored, config.num_hidden_layers)

    def new_rotated_cache(self) -> SparseCache:
        """Create a dense cache of the filled buffers, with their keys taken as keys before RoPE."""
        assert self.filled is not None
        cache = self._growing(DENSE)
        tables = RopeTables(decoder_rotary(self.model), self.context)
        for layer_idx, layer in enumerate(self.filled.sparse_layers):
            keys, values = (buffer[:, :, : self.context] for buffer in (layer.keys, layer.values))
            cache.update(rotated(keys, *tables.on(keys.device)).to(keys.dtype), values, layer_idx)
        return cache

    def new_dynamic_cache(self) -> DynamicCache:
        """Create Transformers' dynamic cache, with its own copy of the tokens as after a prefill."""
        return self._copied(DynamicCache(config=self.model.config))

    def new_growing_cache(self) -> SparseCache:
        """Create a preallocated cache, of which a step reads the filled part."""
        return self._copied(self._growing(DENSE))

    def _growing(self, method: SparseMethod | str) -> SparseCache:
        return SparseCache(
            self.model.config, method, initial_capacity=self.capacity, head_shard=head_shard_of(self.model)
        )

    def new_static_cache(self) -> StaticCache:
        """Create Transformers' static cache, over the filled buffers if there are any."""
        cache = StaticCache(config=self.model.config, max_cache_len=self.capacity)
        if self.filled is None:
            return cache
        for layer, ours in zip(cache.layers, self.filled.sparse_layers, strict=True):
            no_tokens = ours.keys.new_empty(*ours.keys.shape[:2], 0, ours.keys.shape[3])
            layer.max_cache_len = 0  # so that it allocates nothing
            layer.lazy_initialization(no_tokens, no_tokens)
            layer.max_cache_len = self.capacity
            # New tensors, without the marks for torch.compile on the filled buffers.
            layer.keys, layer.values = ours.keys.detach(), ours.values.detach()
            torch._dynamo.mark_static_address(layer.keys, guard=False)
            torch._dynamo.mark_static_address(layer.values, guard=False)
        _cut(cache, self.context)
        return cache

    def _copied(self, new: AnyCache) -> AnyCache:
        return _with_context(new, self._stored, self.model.config.num_hidden_layers) if self.is_cached else new

    def _stored(self, layer_idx: int) -> KeysAndValues:
        """Return a layer's keys and values in the filled cache."""
        assert self.filled is not None
        layer = self.filled.sparse_layers[layer_idx]
        return layer.keys[:, :, : self.context], layer.values[:, :, : self.context]

    def kept(self, new_cache: Callable[[], Cache]) -> Callable[[], Cache]:
        """Create the cache once and cut it back for each run, since compiled code relies on its addresses."""
        if not self.is_cached:
            return new_cache
        kept: list[Cache] = []

        def cut_back() -> Cache:
            if not kept:
                kept.append(new_cache())
            _cut(kept[0], self.context)
            return kept[0]

        return cut_back


@dataclass(frozen=True)
class Run:
    """The tokens of one call of ``generate()``, with its times."""

    token_ids: list[list[int]]
    """The new tokens of each row."""
    ttft_ms: float
    token_ms: list[float]
    """Times of every token except the first."""
    costs: dict[str, float | None]
    seconds: float
    """Time of the whole call."""
    traffic: dict[str, float] | None = None
    """An offloaded method's :func:`~eval.costs.traffic_per_step`."""
    speculation: SpeculationStats | None = None
    """Drafts of a side that has ``draft_tokens``."""


def generate(model: PreTrainedModel, side: Side, work: Work, new_tokens: int) -> Run:
    """Time one call of ``generate()``, and check that it decoded from the end of the cache."""
    gc.collect()  # not during the timed call; also frees the last run's cache before the next is allocated
    cache, clock = side.make_cache(), TokenClock()
    speculation = (
        None
        if side.draft_tokens is None
        else SelfSpeculation(side.draft_tokens, streamer=clock, cuda_graph=side.cuda_graph, fuse=side.fuse)
    )
    ahead = DecodeAhead(clock, cuda_graph=side.cuda_graph, fuse=side.fuse) if side.ahead else None
    settings = {"compile_config": work.compile_config} if side.compiled and work.compile_config else {}
    custom_generate = ahead or speculation
    with nullcontext() if side.method is None else sparse_attention(model, side.method, kv_storage=side.kv_storage):
        wait_for_others()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        started = time.perf_counter()
        output = model.generate(
            work.input_ids,
            attention_mask=torch.ones_like(work.input_ids),
            **{CACHE: cache},
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock if custom_generate is None else None,
            custom_generate=custom_generate,
            disable_compile=not side.compiled,
            **settings,
        )
        seconds = time.perf_counter() - started
        reads = None if side.method is None else sparse_reads(model, cache)
        is_offloaded = side.kv_storage == "host" or (side.method is not None and side.method.offloading is not None)
        traffic = traffic_per_step(model) if is_offloaded else None
    prompt_tokens = work.input_ids.shape[1]
    token_ids = output[:, prompt_tokens:].tolist()
    times = clock.marks[1:]  # without that of the prompt
    steps = int(cache.get_seq_length()) - work.context  # decode steps: each cached the token that it was fed
    found = (len(token_ids[0]), len(times), work.context + steps)
    expected = (new_tokens, new_tokens, prompt_tokens + new_tokens - 1)
    if found != expected:
        raise EvalError(
            f"{side.name}, context={work.context}: generate() returned {found[0]} tokens in {found[1]} parts and left "
            f"{found[2]} in the cache, expected {expected}"
        )
    if reads is None or side.method is None:
        costs: dict[str, float | None] = {"kv_fraction": 1.0, "realised_budget": work.context + (steps + 1) / 2}
    else:
        # Other methods read as much as the queries ask for, which may be everything.
        is_fixed = knob_of(side.method.name) is BUDGET and not side.method.covers(work.context)
        if is_fixed and not (reads.kv_bytes or 0) < (reads.dense_bytes or 0):
            raise EvalError(f"{side.name}, context={work.context}: the patched run read as much as dense attention")
        costs = {"kv_fraction": reads.kv_fraction, "realised_budget": reads.realised_budget}
    return Run(
        token_ids,
        (times[0] - started) * 1e3,
        (np.diff(times) * 1e3).tolist(),
        costs,
        seconds,
        traffic,
        None if speculation is None else speculation.stats,
    )


def setting(method: SparseMethod) -> str:
    """Name what bounds the method's reads: its budget, or its threshold if it has none."""
    if method.token_budget is not None:
        return str(method.token_budget)
    parameter = knob_of(method.name).parameter
    return f"{parameter}={getattr(method, parameter)}"


def _compile_config(config: SpeedConfig, model: PreTrainedModel) -> CompileConfig | None:
    """Return the settings of compiled sides; None if they are Transformers' own."""
    if config.module_guards and not config.compile_options:
        return None
    return make_compile_config(config.compile_options, module_guards=config.module_guards, on_cuda=is_cuda(model))


def is_cuda(model: PreTrainedModel) -> bool:
    """Whether the model is on CUDA, where ``generate()`` compiles decode steps over static caches."""
    return str(model.device.type) == "cuda"


def forget_compiled(model: PreTrainedModel) -> None:
    """Drop compiled code: a second size would be compiled as a dynamic shape, which is slower."""
    if model.__dict__.pop("_compiled_call", None) is not None:
        torch._dynamo.reset()


def empty_cache(
    model: PreTrainedModel, method: SparseMethod | str, capacity: int, kv_storage: str = "device"
) -> SparseCache:
    """Create an empty cache as a patched ``generate()`` does: static on CUDA, growing elsewhere."""
    longest, initial = (capacity, 0) if is_cuda(model) else (None, capacity)
    shard = head_shard_of(model)
    return SparseCache(model.config, method, longest, initial, kv_storage=kv_storage, head_shard=shard)


def _cut(cache: Cache, length: int) -> None:
    """Remove all tokens after the first ``length``, in place."""
    if isinstance(cache, StaticCache):
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)
        return
    surplus = int(cache.get_seq_length()) - length
    if surplus:
        cache.crop(-surplus)


def _draw_layer(
    model: PreTrainedModel, shape: tuple[int, ...], seed: int, devices: Sequence[torch.device], layer_idx: int
) -> KeysAndValues:
    """Draw this process's keys and values of a layer, from all KV heads' [batch, kv_heads, context, head_dim]."""
    # A seed a layer, and all heads, so that a split model has the keys and values of a whole one.
    with seeded(devices[layer_idx], seed * 1000 + layer_idx):
        both = [torch.randn(shape, dtype=model.dtype, device=devices[layer_idx]) for _ in "kv"]
    keys, values = (head_shard_of(model).slice(each, dim=1) for each in both)
    return keys, values


def _with_context(new: AnyCache, tokens_of: Callable[[int], KeysAndValues], layers: int) -> AnyCache:
    """Append each layer's keys and values to an empty cache, and return it."""
    append = new.append_tokens if isinstance(new, SparseCache) else new.update
    for layer_idx in range(layers):
        append(*tokens_of(layer_idx), layer_idx)
    return new


def _clear_beyond(cache: SparseCache, length: int) -> None:
    """Fill the room behind the cached tokens: a static cache is read to its end, and a mask does not stop NaN."""
    for layer in cache.sparse_layers:
        for buffer in (layer.keys, layer.values):
            buffer[:, :, length:] = 0.0


def random_ids(model: PreTrainedModel, shape: tuple[int, int], special_ids: Collection[int], seed: int) -> torch.Tensor:
    """Return random ordinary tokens, [batch, length]."""
    allowed = torch.tensor(sorted(set(range(model.config.vocab_size)) - set(special_ids)))
    chosen = torch.randint(len(allowed), shape, generator=torch.Generator().manual_seed(seed))
    return allowed[chosen].to(model.device)
