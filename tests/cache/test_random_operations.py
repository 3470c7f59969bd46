"""Random sequences of forward passes and cache operations, compared with one dense pass of the unpatched model.

Methods select everything, but by the code that selects (``covers`` is False), so every logit is known. A row is a list
of token ids, each with the first token that it could see, since masks may show padding late.
"""

import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from hf_sparse_attn_kernels import encode_keys, page_bounds, use_impl
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hf_sparse_attn import (
    H2O,
    NTK,
    PSA,
    TOVA,
    ArkVale,
    DoubleSparsity,
    DuoAttention,
    Full,
    InfiniGen,
    InfLLM,
    KeyCodes,
    MInference,
    OracleTopK,
    Quest,
    RaBitQCache,
    SelfExtend,
    SnapKV,
    SparseAttentionStats,
    SparseCache,
    Squeezed,
    StreamingLLM,
    TokenSelect,
    patch_model,
    sparse_attention,
    unpatch_model,
)
from hf_sparse_attn.methods.coded import CodedMethod
from hf_sparse_attn.methods.paged import PagedMethod
from hf_sparse_attn.patched import is_patched
from tests.methods.toy import MassThreshold, MassThresholdInHostMemory, TokenTopK
from tests.models import POSITIONS, VOCABULARY, make_model

MAX_TOKENS = 90  # growing buffers begin with room for 64
MAX_ROWS = 4
LAYERS = 2
OFFLOADED = {"token_budget": 92, "page_size": 4, "dense_layers": 0, "offload": True, "gpu_cache_tokens": 176}
"""Parameters that read everything, with a pool that holds one of the two layers of MAX_ROWS rows."""
METHODS = {
    "full": Full(),
    "psa": PSA(threshold=1.0, block_size=4, microbatch=2),
    "quest": Quest(token_budget=POSITIONS, page_size=4, dense_layers=1, sink_tokens=4),
    "quest-exact": Quest(token_budget=POSITIONS, page_size=4, dense_layers=0, sink_tokens=0, bounds_dtype="model"),
    "arkvale": ArkVale(token_budget=POSITIONS, page_size=4, dense_layers=1, sink_tokens=4, bounds_dtype="model"),
    "tokenselect": TokenSelect(token_budget=POSITIONS, chunk_size=8),
    "squeezed": Squeezed(target_sparsity=0, clusters=0.2, window=3),
    "keycodes": KeyCodes(token_budget=POSITIONS, page_size=16),
    "rabitqcache": RaBitQCache(top_p=1, page_size=16, sink_tokens=16, dense_layers=0),
    "oracle_topk": OracleTopK(token_budget=POSITIONS),
    "double_sparsity": DoubleSparsity(token_budget=POSITIONS, channels=4, dense_layers=1),
    "infllm": InfLLM(token_budget=POSITIONS, n_init=0, n_local=128, chunk_size=8),
    "infinigen": InfiniGen(alpha=math.inf, max_share=1.0),
    "self_extend": SelfExtend(group_size=1, window=9, chunk_size=8),
    "streaming_llm": StreamingLLM(token_budget=POSITIONS),
    "h2o": H2O(token_budget=POSITIONS),
    "minference": MInference(token_budget=POSITIONS),
    "duo_attention": DuoAttention(token_budget=POSITIONS, heads=((1, 0), (0, 1))),
    "toy": MassThreshold(threshold=2.0, block_size=4),
    "quest-offloaded": Quest(**OFFLOADED),
    "psa-offloaded": PSA(threshold=1.0, block_size=4, microbatch=2, offload=True, gpu_cache_tokens=36),
}
MORE_METHODS = {
    "ntk": NTK(factor=1.0),
    "toy-token-top-k": TokenTopK(token_budget=POSITIONS),
    "psa-minmax": PSA(threshold=1.0, block_size=8, microbatch=1, metadata="minmax", bounds_dtype="model"),
    "squeezed-levels": Squeezed(target_sparsity=0, clusters=0.3, coarse_clusters=0.1, levels=2, window=2),
    "quest-offloaded-fifo": Quest(**OFFLOADED, eviction="fifo", bounds_dtype="model"),
    "keycodes-2-bits": KeyCodes(
        token_budget=POSITIONS,
        page_size=16,
        bits=2,
        group_reduce="max",
        query_centre=False,
        dense_layers=1,
        correction="least_squares",
    ),
    "rabitqcache-budget": RaBitQCache(
        token_budget=POSITIONS, top_p=1, page_size=16, sink_tokens=0, dense_layers=1, query_centre=False
    ),
    "double_sparsity-exact": DoubleSparsity(token_budget=POSITIONS, channels=5, label_bits=16, dense_layers=0),
    "tova": TOVA(token_budget=POSITIONS, dense_layers=1),
    "snapkv": SnapKV(token_budget=POSITIONS, window=4),
    "tokenselect-anew": TokenSelect(token_budget=POSITIONS, chunk_size=8, selection_cache_threshold=1),
}
IN_HOST_MEMORY = {
    "quest": METHODS["quest"],
    "keycodes": METHODS["keycodes"],
    "arkvale": METHODS["arkvale"],
    "infinigen": METHODS["infinigen"],
    "psa": METHODS["psa"],
    "rabitqcache": METHODS["rabitqcache"],
    "toy": MassThresholdInHostMemory(threshold=2.0, block_size=4),
}
"""Methods that run with ``kv_storage="host"`` too; the selections of the last four have no maximum size."""
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]
PLACES = ["embed_tokens", "layers.0.mlp", "layers.1.input_layernorm", "layers.1.mlp", "norm"]
ERRORS = [RuntimeError, KeyboardInterrupt]


@functools.cache
def models(device):
    """A model to patch, and an unpatched copy."""
    return tuple(
        make_model("llama", dtype=torch.float64, num_hidden_layers=LAYERS).to(device).requires_grad_(False)
        for _ in range(2)
    )


@dataclass
class Rows:
    """The expected contents of a cache, [batch, tokens] and [batch]."""

    tokens: torch.Tensor
    seen_from: torch.Tensor
    """The first token that each token could see."""
    start: torch.Tensor
    """Padding shown by the last mask."""
    first: torch.Tensor
    """The place of position 0."""
    has_shown_padding: bool = False

    @classmethod
    def empty(cls, batch):
        nothing = torch.zeros(batch, dtype=torch.long)
        return cls(nothing[:, None][:, :0], nothing[:, None][:, :0], nothing, nothing)

    @property
    def length(self):
        return self.tokens.shape[1]

    @property
    def batch(self):
        return self.tokens.shape[0]

    @property
    def positions(self):
        return (torch.arange(self.length) - self.first[:, None]).clamp_min(0)

    @property
    def mask(self):
        return (torch.arange(self.length) >= self.start[:, None]).long()

    @property
    def least_start(self):
        """The end of the padding known from the first call, whose contents are arbitrary."""
        at = torch.arange(self.length)
        return ((self.seen_from > at) * (at + 1)).amax(1)

    def fed(self, tokens, start):
        seen_from = start[:, None].expand(-1, tokens.shape[1])
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens], dim=1),
            seen_from=torch.cat([self.seen_from, seen_from], dim=1),
            start=start,
            has_shown_padding=self.has_shown_padding or bool((start > 0).any()),
        )

    def cropped(self, length):
        if length == 0:
            return Rows.empty(self.batch)
        first = self.first.clamp_max(length)  # of a row that is now all padding
        return replace(self, tokens=self.tokens[:, :length], seen_from=self.seen_from[:, :length], first=first)

    def chosen(self, rows):
        rows = torch.tensor(rows)
        return replace(
            self,
            tokens=self.tokens[rows],
            seen_from=self.seen_from[rows],
            start=self.start[rows],
            first=self.first[rows],
        )

    def logits(self, device):
        """Compute the logits by one pass of the unpatched model; a padding token sees itself."""
        at = torch.arange(self.length)
        mask = (at <= at[:, None]) & (at >= self.seen_from[:, :, None]) | (at == at[:, None])
        with torch.no_grad():
            output = models(device)[1](
                self.tokens.to(device),
                attention_mask=mask[:, None].to(device),
                position_ids=self.positions.to(device),
                use_cache=False,
            )
        return output.logits


class Interrupt:
    """Raises once, at a call of a module of the decoder, if that call happens."""

    def __init__(self, model, place, error, at_call):
        self.error, self.calls_left = error, at_call
        self.hook = model.model.get_submodule(place).register_forward_pre_hook(self)

    def __call__(self, *args):
        self.calls_left -= 1
        if self.calls_left == 0:
            raise self.error("of the test")

    @property
    def has_raised(self):
        return self.calls_left <= 0


numbers = st.integers(0, 2**16)
some_new_tokens = st.one_of(st.just(1), st.just(1), st.integers(2, 30))


class Operations(RuleBasedStateMachine):
    """The operations on one cache of a patched model."""

    def __init__(self, method, is_static, device, kv_storage):
        super().__init__()
        self.method, self.is_static, self.device, self.kv_storage = method, is_static, device, kv_storage
        # RoPE's tables are float32, and so are the norms, which a GPU adds up in an order that depends on the shape.
        self.tolerance = 1e-4 if method.rotates_keys or device == "cuda" else 1e-6
        self.model = patch_model(models(device)[0], method, kv_storage=kv_storage)
        self.mode = torch.no_grad
        self.rows = Rows.empty(1)
        self.cache = self.new_cache()
        self.counts_are_known = True
        self.steps = self.read = 0
        self.is_settled = True

    def teardown(self):
        if is_patched(self.model):
            unpatch_model(self.model)

    def new_cache(self):
        max_cache_len = MAX_TOKENS if self.is_static else None
        return SparseCache(self.model.config, self.method, max_cache_len, kv_storage=self.kv_storage)

    def draw_tokens(self, batch, number, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, VOCABULARY, (batch, number), generator=generator)

    def fed_anew(self, number, seed, starts):
        """Return the rows after a call; the first call takes the number of rows from the starts."""
        starts = torch.tensor(starts)
        if self.rows.length == 0:
            rows = Rows.empty(len(starts))
            start = starts % number
            rows.first = start.clone()
        else:
            rows = self.rows
            start = rows.start.clamp_max(rows.length)
        return rows.fed(self.draw_tokens(rows.batch, number, seed), start)

    def inputs(self, rows, number, needs_mask=False):
        """Return the arguments of a call that leaves these rows."""
        shows = rows.has_shown_padding or needs_mask
        return {
            "input_ids": rows.tokens[:, -number:].to(self.device),
            "attention_mask": rows.mask.to(self.device) if shows else None,
            "position_ids": rows.positions[:, -number:].to(self.device),
        }

    def call(self, rows, number, cache, model=None, **options):
        with self.mode():
            inputs = self.inputs(rows, number, **options)
            output = (model or self.model)(**inputs, past_key_values=cache)
        self.compare(output.logits, rows, number)

    def compare(self, logits, rows, number):
        assert not logits.isnan()[:, -1].any()
        is_token = rows.mask[:, -number:].bool().to(self.device)
        expected = rows.logits(self.device)[:, -number:]
        torch.testing.assert_close(
            logits.detach()[is_token], expected[is_token], rtol=self.tolerance, atol=self.tolerance
        )

    def feed(self, rows, number):
        is_step = number == 1 and self.rows.length > 0
        self.call(rows, number, self.cache)
        self.rows, self.is_settled = rows, True
        if is_step:
            self.steps += 1
            self.read += int(rows.mask.sum())

    @initialize(
        mode=st.sampled_from(MODES),
        seed=numbers,
        number=st.integers(1, 40),
        starts=st.lists(numbers, min_size=1, max_size=3),
    )
    def begin(self, mode, seed, number, starts):
        self.mode = mode
        self.extend(number, seed, starts)

    @rule(number=some_new_tokens, seed=numbers, starts=st.lists(numbers, min_size=1, max_size=3))
    def extend(self, number, seed, starts):
        if self.rows.length + number <= MAX_TOKENS:
            self.feed(self.fed_anew(number, seed, starts), number)

    @rule(seed=numbers)
    @precondition(lambda self: 0 < self.rows.length < MAX_TOKENS)
    def step(self, seed):
        self.feed(self.fed_anew(1, seed, [0]), 1)

    @rule(number=some_new_tokens, seed=numbers, starts=st.lists(numbers, min_size=MAX_ROWS, max_size=MAX_ROWS))
    @precondition(lambda self: self.rows.length > 0)
    def extend_under_a_mask_that_changes(self, number, seed, starts):
        if self.device == "cuda":
            number = max(number, 2)  # a decode step does not wait for its mask there: a changed one is refused later
        if self.rows.length + number > MAX_TOKENS:
            return
        start = torch.tensor(starts)[: self.rows.batch] % (self.rows.length + number)
        start = torch.maximum(start, self.rows.least_start)
        rows = self.rows.fed(self.draw_tokens(self.rows.batch, number, seed), start)
        rows.has_shown_padding = True
        self.feed(rows, number)

    @rule(mode=st.sampled_from(MODES))
    def change_mode(self, mode):
        self.mode = mode

    @rule(tokens=numbers)
    def crop(self, tokens):
        tokens %= min(self.rows.length, 20) + 1
        with self.mode():
            self.cache.crop(-tokens)
        self.rows, self.is_settled = self.rows.cropped(self.rows.length - tokens), True

    @rule()
    def reset(self):
        with self.mode():
            self.cache.reset()
        self.rows, self.is_settled = Rows.empty(1), True

    @rule(order=st.lists(numbers, min_size=MAX_ROWS, max_size=MAX_ROWS))
    @precondition(lambda self: self.rows.length > 0)
    def reorder(self, order):
        rows = [row % self.rows.batch for row in order[: self.rows.batch]]
        with self.mode():
            self.cache.reorder_cache(torch.tensor(rows, device=self.device))
        self.rows, self.is_settled = self.rows.chosen(rows), True

    @rule(repeats=st.integers(1, 3))
    @precondition(lambda self: self.rows.length > 0)
    def repeat(self, repeats):
        if self.rows.batch * repeats <= MAX_ROWS:
            with self.mode():
                self.cache.batch_repeat_interleave(repeats)
            rows = [row for row in range(self.rows.batch) for _ in range(repeats)]
            self.rows, self.is_settled = self.rows.chosen(rows), True

    @rule(chosen=st.lists(numbers, min_size=1, max_size=MAX_ROWS))
    @precondition(lambda self: self.rows.length > 0)
    def select(self, chosen):
        rows = [row % self.rows.batch for row in chosen]
        with self.mode():
            self.cache.batch_select_indices(torch.tensor(rows, device=self.device))
        self.rows, self.is_settled = self.rows.chosen(rows), True

    @rule(seed=numbers, numbers_of_tokens=st.lists(some_new_tokens, max_size=2), keeps=st.booleans())
    def fork(self, seed, numbers_of_tokens, keeps):
        """Continue with the fork, or with its source."""
        with self.mode():
            fork = self.cache.fork(self.method)
        rows, self.is_settled = self.rows, True
        for number in numbers_of_tokens if rows.length else ():
            if rows.length + number <= MAX_TOKENS:
                rows = rows.fed(self.draw_tokens(rows.batch, number, seed), rows.start.clamp_max(rows.length))
                self.call(rows, number, fork)
        if keeps:
            self.cache, self.rows, self.counts_are_known = fork, rows, False

    @rule(
        place=st.sampled_from(PLACES),
        error=st.sampled_from(ERRORS),
        at_call=st.integers(1, 2),
        number=some_new_tokens,
        seed=numbers,
        starts=st.lists(numbers, min_size=1, max_size=3),
    )
    def fail(self, place, error, at_call, number, seed, starts):
        if self.rows.length + number > MAX_TOKENS:
            return
        rows = self.fed_anew(number, seed, starts)
        interrupt = Interrupt(self.model, place, error, at_call)
        try:
            self.call(rows, number, self.cache)
        except error:
            if not interrupt.has_raised:
                raise
            self.is_settled = False  # until the next use of the cache
        else:
            self.rows = rows
        finally:
            interrupt.hook.remove()
            self.counts_are_known = False

    @rule(seed=numbers)
    @precondition(lambda self: 0 < self.rows.length < MAX_TOKENS)
    def fail_behind_the_decoder(self, seed):
        """Whether the cache is in the state after a successful pass."""
        rows = self.fed_anew(1, seed, [0])
        hook = self.model.lm_head.register_forward_pre_hook(lambda *args: 1 / 0)
        try:
            with pytest.raises(ZeroDivisionError):
                self.call(rows, 1, self.cache)
        finally:
            hook.remove()
        self.rows, self.is_settled, self.counts_are_known = rows, True, False

    @rule()
    def patch_anew(self):
        unpatch_model(self.model)
        patch_model(self.model, self.method, kv_storage=self.kv_storage)

    @rule(number=some_new_tokens, seed=numbers, starts=st.lists(numbers, min_size=1, max_size=3))
    @precondition(lambda self: self.is_settled)
    def feed_the_unpatched_model(self, number, seed, starts):
        """It reads the cache as its own, or refuses one with keys that are not its own, which changes nothing."""
        if self.rows.length + number > MAX_TOKENS:
            return
        rows = self.fed_anew(number, seed, starts)
        has_own_keys = self.method.rotates_keys or self.method.changes_rope
        refusal = pytest.raises(ValueError, match=r"caches keys .*patch_model") if has_own_keys else nullcontext()
        unpatch_model(self.model)
        try:
            with refusal:
                self.call(rows, number, self.cache, needs_mask=True)
        finally:
            patch_model(self.model, self.method, kv_storage=self.kv_storage)
        if not has_own_keys:
            self.rows = rows

    @rule(method=st.sampled_from(list(METHODS.values())), seed=numbers)
    def use_another_method_in_between(self, method, seed):
        outer, self.tolerance = self.tolerance, 1e-4
        with sparse_attention(self.model, method):
            cache = SparseCache.for_model(self.model)
            rows = Rows.empty(2)
            start = torch.tensor([0, seed % 9])
            for number in (12, 1, 1):
                rows = rows.fed(self.draw_tokens(2, number, seed), start)
                self.call(rows, number, cache)
        self.tolerance = outer

    @rule(number=st.integers(1, 20), seed=numbers)
    def call_without_a_cache(self, number, seed):
        rows = Rows.empty(2).fed(self.draw_tokens(2, number, seed), torch.tensor([0, seed % number]))
        with self.mode():
            output = self.model(**self.inputs(rows, number), use_cache=False)
        assert output.past_key_values is None
        self.compare(output.logits, rows, number)

    @rule(seed=numbers, padding=st.integers(1, 9), with_cache=st.booleans())
    def pad_another_batch_on_the_right(self, seed, padding, with_cache):
        tokens = self.draw_tokens(2, 12, seed).to(self.device)
        mask = torch.ones_like(tokens)
        mask[1, -padding:] = 0
        with self.mode():
            output = self.model(tokens, attention_mask=mask, use_cache=with_cache)
        expected = models(self.device)[1](tokens, attention_mask=mask).logits
        torch.testing.assert_close(output.logits.detach()[mask == 1], expected[mask == 1])
        if with_cache:
            with pytest.raises(ValueError, match="padding after a token"):
                self.model(tokens[:, :1], past_key_values=output.past_key_values)

    @rule(number=st.integers(2, 9), seed=numbers, padding=st.integers(1, 8))
    @precondition(lambda self: 0 < self.rows.length < MAX_TOKENS - 9 and not self.method.rotates_keys)
    def pad_on_the_right_and_go_back(self, number, seed, padding):
        rows = self.fed_anew(number, seed, [0])
        inputs = self.inputs(rows, number, needs_mask=True)
        inputs["attention_mask"][-1, rows.length - min(padding, number - 1) :] = 0
        inputs["attention_mask"][-1, 0] = 1  # always padding after a token
        with self.mode():
            self.model(**inputs, past_key_values=self.cache)
            self.cache.crop(-number)
        self.is_settled = True

    @rule(name=st.sampled_from(["eager", "sdpa"]))
    @precondition(lambda self: self.rows.length > 0)
    def switch_the_implementation_and_back(self, name):
        ours = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        with pytest.raises(ValueError, match="unpatch_model"):
            self.model(self.rows.tokens[:, :1].to(self.device), past_key_values=self.cache)
        self.model.set_attn_implementation(ours)

    @rule()
    @precondition(lambda self: self.is_static and self.rows.length > 0)
    def overfill(self):
        number = MAX_TOKENS - self.rows.length + 1
        rows = self.fed_anew(number, 0, [0])
        with pytest.raises(ValueError, match="do not fit"):
            self.model(**self.inputs(rows, number), past_key_values=self.cache)
        self.is_settled = True

    @invariant()
    def lengths_are_right(self):
        assert self.cache.get_seq_length() == self.rows.length
        if not self.is_settled or self.rows.length == 0:
            return
        for layer in self.cache.layers:
            assert layer.length == layer.held == self.rows.length
            assert layer.seq_end.tolist() == [self.rows.length] * self.rows.batch
            assert layer.keys.shape[0] == layer.values.shape[0] == layer.finished.shape[0] == self.rows.batch

    @invariant()
    def tensors_may_be_written_in_any_mode(self):
        for layer in self.cache.layers:
            if layer.is_initialized:
                rope = layer.rope if self.method.rotates_keys else ()
                tensors = [layer.keys, layer.values, layer.seq_start, layer.seq_end, layer.finished]
                tensors += [layer.counter.totals, layer.counter.own, *layer.metadata.values(), *rope]
                assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)
                assert not layer.finished.any()

    @invariant()
    def stats_add_up(self):
        stats = SparseAttentionStats.from_counters(self.cache.counters)
        assert stats.kv_bytes == stats.dense_bytes == sum(layer.dense_bytes for layer in stats.layers)
        if self.counts_are_known:
            assert stats.decode_steps == self.steps
            assert stats.tokens_read == self.read * LAYERS * self.model.config.num_key_value_heads

    @invariant()
    @precondition(lambda self: type(self.method) is Quest and self.is_settled and self.rows.length > 0)
    def bounds_hold_every_key_of_their_page(self):
        for layer in self.cache.layers:
            if not layer.metadata or self.method.offload:  # reading the keys would store the newest ones on the host
                continue
            lower, upper = layer.metadata["page_min"].double(), layer.metadata["page_max"].double()
            if self.method.bounds_dtype == "int8":
                exponents = (layer.metadata["page_exponent"][..., None], layer.metadata["channel_exponent"][:, :, None])
                factor = 2.0 ** (exponents[0].double() + exponents[1].double())
                lower, upper = lower * factor, upper * factor
            for row, start in enumerate(layer.seq_start.tolist()):
                keys = layer.keys[row, :, start : layer.length]
                page = torch.arange(keys.shape[1], device=self.device) // self.method.page_size
                assert (lower[row][:, page] <= keys).all()
                assert (keys <= upper[row][:, page]).all()

    @invariant()
    @precondition(lambda self: isinstance(self.method, PagedMethod) and self.is_settled and self.rows.length > 0)
    def bounds_in_the_models_dtype_are_those_of_the_keys(self):
        for layer in self.cache.layers:
            if not layer.metadata or self.method.bounds_dtype != "model" or self.method.offload:  # as above
                continue
            anew = {name: torch.full_like(bound, float("nan")) for name, bound in layer.metadata.items()}
            rows = {"seq_start": layer.seq_start, "seq_end": layer.seq_end, "num_new": layer.length}
            page_bounds(layer.keys, **anew, **rows, page_size=self.method._page_size, statistic=self.method._statistic)
            for row, tokens in enumerate(layer.row_lengths().tolist()):
                pages = -(-tokens // self.method._page_size)
                for name, bound in anew.items():
                    assert torch.equal(layer.metadata[name][row, :, :pages], bound[row, :, :pages])

    @invariant()
    @precondition(lambda self: isinstance(self.method, CodedMethod) and self.is_settled and self.rows.length > 0)
    def codes_are_those_of_the_keys(self):
        for layer in self.cache.layers:
            if not layer.metadata:
                continue
            metadata, size = layer.metadata, self.method.page_size
            anew = {name: metadata[name].clone().fill_(0 if name == "coded" else 7) for name in metadata}
            shared = self.method.shared_centre
            given = {"query_centre"} | ({"centres", "centre_scale"} if shared else set())
            centres = {name: metadata[name] for name in given & metadata.keys()}
            rows = {"seq_start": layer.seq_start, "seq_end": layer.seq_end, "page_size": size}
            options = {"bits": self.method.bits, "correction": self.method.correction, "shared_centre": shared}
            encode_keys(layer.keys, **{**anew, **centres}, **rows, **options)
            full = anew.pop("coded")
            if not self.cache.shared.prompt_is_open:
                assert torch.equal(metadata["coded"], full)
            assert (metadata["coded"] <= full).all()
            for row, pages in enumerate(metadata["coded"][:, 0].tolist()):
                for name in anew.keys() - centres.keys():
                    held = pages * (1 if name.startswith("centre") else size)
                    assert torch.equal(metadata[name][row, :, :held], anew[name][row, :, :held])


def run(method, is_static, device, monkeypatch, examples, kv_storage="device"):
    if method.sparse_phases:
        monkeypatch.setattr(type(method), "covers", lambda self, length: False)
    with use_impl("reference"):
        run_state_machine_as_test(
            lambda: Operations(method, is_static, device, kv_storage),
            settings=settings(
                max_examples=examples,
                stateful_step_count=20,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


def on_devices(methods):
    """Parametrize a test. The state of caches does not depend on the device, and many small passes are faster on a CPU;
    streams that copy keys and values from and to host memory are only on CUDA."""
    on_cpu = [pytest.param(method, "cpu", id=name) for name, method in methods.items()]
    on_cuda = [
        pytest.param(method, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu)
        for name, method in methods.items()
        if methods is IN_HOST_MEMORY or (isinstance(method, PagedMethod) and method.offload)
    ]
    return pytest.mark.parametrize(("method", "device"), on_cpu + on_cuda)


storages = pytest.mark.parametrize("is_static", [False, True], ids=["growing", "static"])


@storages
@on_devices(METHODS)
def test_any_sequence_of_operations(method, device, is_static, monkeypatch):
    run(method, is_static, device, monkeypatch, examples=6)


@storages
@on_devices(IN_HOST_MEMORY)
def test_any_sequence_of_operations_in_host_memory(method, device, is_static, monkeypatch):
    run(method, is_static, device, monkeypatch, examples=6, kv_storage="host")


@pytest.mark.grid
@storages
@on_devices(IN_HOST_MEMORY)
def test_many_sequences_of_operations_in_host_memory(method, device, is_static, monkeypatch):
    run(method, is_static, device, monkeypatch, examples=100, kv_storage="host")


@pytest.mark.grid
@storages
@on_devices(METHODS | MORE_METHODS)
def test_many_sequences_of_operations(method, device, is_static, monkeypatch):
    run(method, is_static, device, monkeypatch, examples=100)
