"""Passes recorded as a graph give the tokens, counts and caches of passes that are not.

On a CPU a tape stands in for the CUDA graph. It repeats the recorded ops alone, and fails if the host waits for one.
"""

import gc
import sys
import weakref
from functools import partial, wraps
from types import FunctionType

import pytest
import torch
from hf_sparse_attn_kernels import one_row_linear, use_impl
from torch._dynamo.utils import counters
from torch.nn.functional import linear

from hf_sparse_attn import (
    DecodeAhead,
    SelfSpeculation,
    SparseCache,
    patch_model,
    record_selections,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.patch import fused as fusing
from hf_sparse_attn.patch.fused import fused
from hf_sparse_attn.patch.pass_graph import PassGraph
from tests.compared import compile_config
from tests.graph_tape import use_tape
from tests.models import SPARSE, VOCABULARY, make_model, random_ids
from tests.patch.test_decode_ahead import GREEDY, KEEPING, assert_same_turns, padded_batch, patched
from tests.patch.test_speculation import DRAFTING, dense_model
from tests.patch.test_speculation import patched as draft_with

pytestmark = pytest.mark.usefixtures("exact")

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a tape of a CPU's ops; CUDA has tests of its own below")


@pytest.fixture
def tapes(monkeypatch):
    return use_tape(monkeypatch)


@pytest.fixture
def counted(monkeypatch):
    """Nothing is compiled yet, and what will be is counted."""
    monkeypatch.setattr(fusing, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


def recorded(fuse=False):
    return DecodeAhead(cuda_graph=True, fuse=fuse)


@on_cpu
@pytest.mark.parametrize("method", KEEPING)
def test_tokens_and_counts_are_those_of_generate(method, tapes):
    model, inputs = patched(method), padded_batch()
    arguments = {**GREEDY, "max_new_tokens": 24}  # pages fill in the meantime
    expected = model.generate(**inputs, **arguments)
    stats = sparse_attention_stats(model)
    assert torch.equal(model.generate(**inputs, **arguments, custom_generate=recorded()), expected)
    assert sparse_attention_stats(model) == stats
    assert len(tapes) == 1


@on_cpu
@pytest.mark.parametrize("loop", [recorded, lambda: SelfSpeculation(4, cuda_graph=True)])
def test_graphs_are_freed_with_the_answer(loop, tapes, monkeypatch):
    graphs = []
    start = PassGraph.__init__

    def note(graph, *arguments):
        graphs.append(weakref.ref(graph))
        start(graph, *arguments)

    monkeypatch.setattr(PassGraph, "__init__", note)
    model = patched("quest")
    gc.disable()  # a cycle would keep them
    try:
        model.generate(random_ids(1, 90), **GREEDY, custom_generate=loop())
        assert graphs
        assert all(graph() is None for graph in graphs)
    finally:
        gc.enable()


@on_cpu
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_other_families(family, tapes):
    model = patch_model(make_model(family, dtype=torch.float64), "quest", token_budget=48)
    ids = random_ids(2, 90)
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY, custom_generate=recorded()), expected)
    assert len(tapes) == 1


@on_cpu
@pytest.mark.usefixtures("tapes", "counted")
@pytest.mark.parametrize(("family", "graphs"), [("llama", 2), ("qwen2", 2), ("qwen3", 3), ("mistral", 2)])
def test_norms_and_rope_are_compiled_once_for_all_layers(family, graphs):
    """Those of queries and keys have shapes of their own."""
    model = patch_model(make_model(family, dtype=torch.float64, num_hidden_layers=3), "quest", token_budget=48)
    ids = random_ids(2, 90)
    expected = model.generate(ids, **GREEDY)
    for _ in range(2):  # the second one compiles nothing
        assert torch.equal(model.generate(ids, **GREEDY, custom_generate=recorded(fuse=True)), expected)
        assert counters["stats"]["unique_graphs"] == graphs
    assert not any("forward" in vars(module) for module in model.modules())


@on_cpu
@pytest.mark.usefixtures("tapes", "counted")
def test_lossless_decoding_with_fused_norms():
    model, inputs = dense_model(), padded_batch()
    expected = model.generate(**inputs, **GREEDY)
    draft_with(model, "quest")
    speculation = SelfSpeculation(4, cuda_graph=True, fuse=True)
    assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=speculation), expected)
    assert counters["stats"]["unique_graphs"] == 4  # of a draft's step and of a dense pass


@pytest.mark.usefixtures("counted")
def test_fused_parts_compute_what_the_model_does_and_leave_it_as_it_was():
    model, ids = make_model("qwen3", dtype=torch.float64), random_ids(2, 30)
    model.model.norm.forward = own = partial(model.model.norm.forward)  # as a user's or accelerate's wrapper
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(ids).logits
        with fused(model):
            torch.testing.assert_close(model(ids).logits, expected)
            assert "forward" in vars(model.model.layers[0].input_layernorm)
            assert model.model.norm.forward is own
        with pytest.raises(RuntimeError, match="out of memory"), fused(model):
            raise RuntimeError("out of memory")
    assert {name: vars(module) for name, module in model.named_modules()} == before
    rope = sys.modules[type(model).__module__].apply_rotary_pos_emb
    assert not hasattr(rope, "_torchdynamo_orig_callable")  # only a copy of attention's forward has another one


class Wrapped(torch.Tensor):
    """A kind of tensor with rules of its own, as DTensor is."""


@pytest.fixture
def products(monkeypatch):
    """The products that a kernel for one row makes: shape of the weights, whether with a bias, and whether ready."""
    made = []

    def observed(input, weight, *, bias, weight_is_ready):
        made.append((tuple(weight.shape), bias is not None, weight_is_ready))
        return one_row_linear(input, weight, bias=bias, weight_is_ready=weight_is_ready)

    monkeypatch.setattr(fusing, "one_row_linear", observed)
    return made


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_products_of_one_row_have_a_kernel_of_their_own(family, products):
    model, ids = make_model(family, dtype=torch.float64), random_ids(1, 1)
    expected = model(ids).logits
    assert products == []
    with fused(model):
        torch.testing.assert_close(model(ids).logits, expected)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert sorted(products) == sorted((tuple(each.weight.shape), each.bias is not None, True) for each in linears)
    with fused(model):
        model(random_ids(2, 1))
    assert len(products) == len(linears)


ROW, WEIGHT = torch.arange(3.0).view(1, 3), torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("bias", [None, torch.arange(4.0)], ids=["plain", "bias"])
@torch.no_grad()
def test_weights_that_may_be_the_result_of_the_kernel_before_are_waited_for(bias, products):
    expected = linear(ROW, WEIGHT, bias)
    with fusing.ONE_ROW:
        for weight in (WEIGHT, torch.nn.Parameter(WEIGHT)):
            assert torch.equal(linear(ROW, weight, bias), expected)
            assert torch.equal(linear(ROW[0], weight=weight, bias=bias), expected[0])
    assert [ready for *_, ready in products] == [False, False, True, True]


@pytest.mark.parametrize(
    ("row", "weight"),
    [
        (ROW.expand(2, 3), WEIGHT),
        (ROW, WEIGHT.as_subclass(Wrapped)),
        (ROW, WEIGHT[0]),
        (ROW, WEIGHT[:0]),
        (ROW, WEIGHT.T.contiguous().T),
        (ROW.to(torch.complex64), WEIGHT.to(torch.complex64)),
    ],
    ids=["two rows", "another kind", "a vector", "empty", "transposed", "complex"],
)
@torch.no_grad()
def test_other_products_are_left_to_torch(row, weight, products):
    expected = linear(row, weight)
    with fusing.ONE_ROW:
        actual = linear(row, weight)
    assert type(actual) is type(expected)
    assert torch.equal(actual, expected)
    assert products == []


def test_products_with_gradients_or_other_dtypes_are_left_to_torch(products):
    weight = torch.nn.Parameter(WEIGHT)
    with fusing.ONE_ROW:
        assert linear(ROW, weight).requires_grad
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert linear(ROW, weight).dtype == torch.bfloat16
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
            linear(ROW.double(), weight)
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
            linear(ROW[:, :2], weight)
    assert products == []


@pytest.mark.usefixtures("counted")
@torch.no_grad()
def test_the_second_compilation_serves_all_further_batch_sizes():
    """Queries, keys and layers have norms of one class, so a compilation for each batch size would soon be too many."""
    model, graphs = make_model("qwen3", dtype=torch.float64), []
    for batch in (1, 2, 3, 5, 8, 13):
        with fused(model):
            model(random_ids(batch, 1))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [3] + [6] * 5
    assert graphs[-1] < torch._dynamo.config.recompile_limit  # beyond it nothing would be compiled or counted


@pytest.mark.usefixtures("counted")
@torch.no_grad()
def test_a_rope_that_was_replaced_since_is_the_one_that_is_compiled(monkeypatch):
    """Libraries of kernels replace the function in its module."""
    model, ids = make_model("llama", dtype=torch.float64), random_ids(2, 9)
    with fused(model):
        before = model(ids).logits
    module = sys.modules[type(model).__module__]
    rope = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: rope(q, k, cos, -sin))
    expected = model(ids).logits
    with fused(model):
        torch.testing.assert_close(model(ids).logits, expected)
    assert not torch.allclose(expected, before)


@on_cpu
@pytest.mark.parametrize("loop", [DecodeAhead, SelfSpeculation])
def test_nothing_is_fused_in_steps_that_are_neither_compiled_nor_recorded(loop):
    model, ids = patched(), random_ids(1, 40)
    cache = SparseCache.for_model(model, max_cache_len=80)
    with pytest.raises(ValueError, match="fuse=True needs decode steps that are compiled or recorded"):
        model.generate(ids, past_key_values=cache, max_new_tokens=4, custom_generate=loop(fuse=True))
    assert cache.length == 0


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("loop", "passes"), [(DecodeAhead, 1), (partial(SelfSpeculation, 4), 2)], ids=["ahead", "draft"]
)
def test_products_of_compiled_steps(loop, passes, family):
    """In a step of one row all have the kernel, and wait for no weights; a dense pass and a batch have none."""
    graphs = []

    def backend(graph, inputs):
        own = torch.ops.hf_sparse_attn_kernels.one_row_linear
        graphs.append([node.kwargs["weight_is_ready"] for node in graph.graph.nodes if node.target is own])
        return graph.forward

    model = make_model(family, dtype=torch.float64, num_hidden_layers=2)
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    patch_model(model, "quest", token_budget=4096, dense_layers=0)  # drafts are those of dense attention
    compiled = {**GREEDY, "disable_compile": False, "compile_config": compile_config(backend=backend)}
    for batch, fuse in ((1, False), (1, True), (1, True), (2, True)):
        ids, before = random_ids(batch, 60), len(graphs)
        actual = model.generate(ids, **compiled, custom_generate=loop(fuse=fuse))
        assert torch.equal(actual, model.generate(ids, **GREEDY))
        if batch == 1:
            assert graphs[before:] in ([[True] * linears] if fuse else [[]] * passes, [])
        else:
            assert not any(graphs[before:])
    assert sum(map(bool, graphs)) == 1


@on_cpu
@pytest.mark.parametrize("method", ["quest", "keycodes", "psa", "tokenselect"])
def test_several_turns_that_end_early(method, tapes):
    assert_same_turns(patched(method), recorded())
    assert len(tapes) == 3


@on_cpu
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_short_answers_record_only_what_they_repeat(max_new_tokens, tapes):
    model, ids = patched(), random_ids(2, 80)
    arguments = {**GREEDY, "max_new_tokens": max_new_tokens}
    expected = model.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, **arguments, custom_generate=recorded()), expected)
    assert len(tapes) == (max_new_tokens == 3)  # the prompt's token and the first step's take no graph


@on_cpu
@pytest.mark.parametrize("method", ["quest", "keycodes", "psa"])
def test_keys_and_values_in_host_memory(method, tapes):
    model = make_model("llama", dtype=torch.float64)
    patch_model(model, method, token_budget=48, kv_storage="host", **SPARSE.get(method, {}))
    ids = random_ids(2, 90)
    expected = model.generate(ids, **GREEDY)
    stats = sparse_attention_stats(model)
    assert torch.equal(model.generate(ids, **GREEDY, custom_generate=recorded()), expected)
    assert sparse_attention_stats(model) == stats
    assert len(tapes) == 1


@on_cpu
@pytest.mark.parametrize("method", DRAFTING)
def test_lossless_decoding(method, tapes):
    """Drafts and dense passes take turns, and the cache is cut between them."""
    model, inputs = dense_model(), padded_batch()
    arguments = {**GREEDY, "max_new_tokens": 20}
    expected = model.generate(**inputs, **arguments)
    draft_with(model, method)
    plain, graphs = SelfSpeculation(4), SelfSpeculation(4, cuda_graph=True)
    model.generate(**inputs, **arguments, custom_generate=plain)
    stats = sparse_attention_stats(model)
    assert torch.equal(model.generate(**inputs, **arguments, custom_generate=graphs), expected)
    assert graphs.stats == plain.stats
    assert sparse_attention_stats(model) == stats
    # A draft's step, and a dense pass but for methods that finish a prompt after it, on the host.
    assert len(tapes) == 2 - (method in ("double_sparsity", "infinigen"))


@on_cpu
def test_sampled_lossless_answers_with_ends_over_two_turns(tapes):
    model, ids = dense_model(), random_ids(2, 90)
    draft_with(model, "quest")
    answers = []
    for cuda_graph in (False, True):
        torch.manual_seed(3)
        cache, text = SparseCache.for_model(model, max_cache_len=256), ids
        arguments = {**GREEDY, "cache_implementation": None, "do_sample": True, "max_new_tokens": 16}
        arguments |= {"eos_token_id": list(range(0, VOCABULARY, 8)), "past_key_values": cache}
        for _ in range(2):
            custom = SelfSpeculation(3, cuda_graph=cuda_graph)
            text = model.generate(text, attention_mask=torch.ones_like(text), **arguments, custom_generate=custom)
            assert cache.get_seq_length() == text.shape[1] - 1
        answers.append(text)
    assert torch.equal(*answers)
    assert tapes


@on_cpu
@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("at_pass", [2, 3], ids=["first step", "recording"])
def test_a_step_that_fails_leaves_a_cache_that_can_be_used(at_pass):
    model, ids = patched(), random_ids(1, 80)
    expected = model.generate(ids, **GREEDY)
    cache, passes = SparseCache.for_model(model, max_cache_len=128), []

    def fail(*args):
        passes.append(None)
        if len(passes) == at_pass:
            raise RuntimeError("out of memory")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    arguments = {**GREEDY, "cache_implementation": None, "past_key_values": cache}
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(ids, **arguments, custom_generate=recorded())
    hook.remove()
    assert not cache.is_traced
    cache.crop(80 - cache.get_seq_length())
    assert torch.equal(model.generate(expected[:, :81], **{**arguments, "max_new_tokens": 11}), expected)
    unpatch_model(model)
    assert model.generate(ids, **GREEDY).shape == expected.shape


@on_cpu
@pytest.mark.usefixtures("tapes")
def test_what_a_graph_cannot_do_is_refused_before_any_step():
    model, ids = patched(), random_ids(1, 80)
    static = {**GREEDY, "cache_implementation": None}
    with pytest.raises(ValueError, match=r"static cache.*, got 'cpu' and a growing cache"):
        model.generate(ids, **static, custom_generate=recorded())
    cache = SparseCache.for_model(model, max_cache_len=85)
    with pytest.raises(ValueError, match="11 more tokens may be cached, but past_key_values has room for 5"):
        model.generate(ids, **static, past_key_values=cache, custom_generate=recorded())
    assert cache.get_seq_length() == 80
    with record_selections(model), pytest.raises(ValueError, match="record_selections cannot record the steps of"):
        model.generate(ids, **GREEDY, custom_generate=recorded())


@on_cpu
@pytest.mark.usefixtures("tapes")
def test_steps_that_need_the_host_are_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = patch_model(make_model("llama", rope_parameters=scaling), "quest", token_budget=48)
    with pytest.raises(ValueError, match="cuda_graph=True is not supported by this LlamaForCausalLM: a decode step"):
        model.generate(random_ids(1, 40), **GREEDY, custom_generate=recorded())


@on_cpu
def test_other_devices_are_refused():
    with pytest.raises(ValueError, match=r"cuda_graph=True needs a CUDA device and a static cache.*, got 'cpu'"):
        patched().generate(random_ids(1, 40), **GREEDY, custom_generate=recorded())


def test_only_a_static_cache_with_a_prompt_is_captured():
    model = patched()
    for cache, kind in ((SparseCache.for_model(model), "grows"), (SparseCache.for_model(model, 64), "on 0 devices")):
        message = f"needs a static cache that holds a prompt .*, got one (that )?{kind}"
        with pytest.raises(ValueError, match=message), cache.captured():
            pass


@pytest.mark.gpu
@pytest.mark.parametrize("method", KEEPING)
def test_on_cuda(method):
    model = make_model("llama", num_hidden_layers=2)
    settings = {"token_budget": 48, "dense_layers": int(method == "infinigen"), **SPARSE.get(method, {})}
    patch_model(model, method, **settings)
    inputs, arguments = padded_batch(), {"max_new_tokens": 40, "do_sample": False}
    with use_impl("triton"):
        expected = model.generate(**inputs, **arguments, disable_compile=True, cache_implementation="static")
        for ends in ({}, {"eos_token_id": expected[:, 120].tolist()}):
            static = {**arguments, **ends, "disable_compile": True, "cache_implementation": "static"}
            stock = model.generate(**inputs, **static)
            stats = sparse_attention_stats(model)
            actual = model.generate(**inputs, **arguments, **ends, custom_generate=recorded())
            assert torch.equal(actual, stock)
            ends_early = stock.shape[1] < expected.shape[1]
            assert sparse_attention_stats(model).decode_steps == stats.decode_steps + ends_early


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quest", "keycodes", "psa"])
@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("qwen2", 1), ("qwen3", 5)])
def test_fused_on_cuda(family, seed, method):
    """With these seeds no token depends on the last bits of a sum, as some do with others."""
    model = make_model(family, seed, num_hidden_layers=3)
    patch_model(model, method, token_budget=48, **SPARSE.get(method, {}))
    arguments = {"max_new_tokens": 40, "do_sample": False}
    for inputs in (padded_batch(), {"input_ids": random_ids(1, 120)}):
        with use_impl("triton"):
            expected = model.generate(**inputs, **arguments, disable_compile=True, cache_implementation="static")
            for _ in range(2):
                assert torch.equal(model.generate(**inputs, **arguments, custom_generate=recorded(fuse=True)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quest", "keycodes"])
def test_fused_products_of_compiled_steps_on_cuda(method):
    model = make_model("llama", num_hidden_layers=3)
    patch_model(model, method, token_budget=48, **SPARSE.get(method, {}))
    inputs, arguments = {"input_ids": random_ids(1, 120)}, {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(**inputs, **arguments, disable_compile=True)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **arguments, custom_generate=DecodeAhead(fuse=True)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("method", DRAFTING)
def test_lossless_decoding_on_cuda(method):
    model, inputs = make_model("llama", num_hidden_layers=2), padded_batch()
    arguments = {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(**inputs, **arguments, disable_compile=True)
    draft_with(model, method)
    speculation = SelfSpeculation(4, cuda_graph=True)
    with use_impl("triton"):
        assert torch.equal(model.generate(**inputs, **arguments, custom_generate=speculation), expected)
    assert speculation.stats.verifications > 1


def _decorated(function):
    @wraps(function)
    def decorated(*args, **kwargs):
        return function(*args, **{"scale" if name == "factor" else name: each for name, each in kwargs.items()})

    return decorated


def test_rope_is_compiled_under_the_decorators_of_a_forward():
    """Transformers 5.24 decorates the ``forward`` of attention, which still takes the old name of an argument."""

    def forward(self, x, scale):
        return apply_rotary_pos_emb(x) * scale  # noqa: F821

    def kept_elsewhere(*args):
        return kept_elsewhere.__wrapped__(*args)

    own = FunctionType(forward.__code__, {"apply_rotary_pos_emb": lambda x: x + 1}, "forward")
    other = FunctionType(forward.__code__, {"apply_rotary_pos_emb": lambda x: x + 2}, "forward")
    kept_elsewhere.__wrapped__ = own
    twice = _decorated(_decorated(own))
    assert twice(None, 3, factor=2) == 8
    assert fusing._with_decorated(twice, own, other)(None, 3, factor=2) == 10
    assert twice(None, 3, factor=2) == 8
    assert fusing._with_decorated(own, own, other) is other
    assert fusing._with_decorated(kept_elsewhere, own, other) is None
